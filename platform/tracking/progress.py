"""What every release of a run shows beside its own values: how it compares with its noise, and what has been spent.

| metric | value |
|---|---|
| `…/noise_to_signal` | s√d / ‖g‖: expected norm of the noise over the norm of what was released |
| `…/signal_to_noise` | √max(‖g‖² − ds², 0) / (s√d): estimate of the signal alone over the noise |
| `privacy/epsilon_run`, `privacy/mu_run` | of everything this run has been charged so far |

Searches and trainers show the same, and neither knows the other: so it stands here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from dpray.platform.privacy import gdp, pld
from dpray.platform.privacy.budget import upper_mu
from dpray.platform.privacy.ledger.composing import PLD
from dpray.platform.privacy.units import Unit

if TYPE_CHECKING:
    from dpray.platform.privacy.ledger import Account, PlannedRelease, Run
    from dpray.platform.privacy.ledger.statement import Line
    from dpray.platform.tracking.view import RunView

Row = dict[str, Any]

_MILESTONES = 8


def against_noise(norm: float, floor: float, prefix: str) -> Row:
    """The two ratios of a released vector.

    Args:
        norm: its length ‖g‖.
        floor: s√d, expected length of its noise; 0 without noise.
        prefix: what their names begin with, such as `round`.
    """
    return {
        f"{prefix}/noise_to_signal": floor / norm if norm else math.inf,
        f"{prefix}/signal_to_noise": math.sqrt(max(norm**2 - floor**2, 0.0)) / floor if floor else math.inf,
    }


class Spent:
    """What a run has been charged after each of its releases, on the account that shows it.

    The account is the one of the release's unit, else of the finest unit there is. Counted from the plan in whole
    quanta, not asked of the ledger every time: a statement takes longer than a round.

    Args:
        run, label: which releases.
        unit: theirs.
        spends: quanta of each, in order; None for those without noise.
    """

    def __init__(self, run: Run, label: str, unit: Unit, spends: tuple[int | None, ...]) -> None:
        self.account = _account(run, unit)
        self._weight = _weight(run, self.account.unit, unit)
        self._budget = self.account.budget
        lines = self.account.statement(run.name).lines
        others = [line.amount.quanta for line in lines if line.label != label]
        self._others = None if None in others else sum(quanta for quanta in others if quanta is not None)
        self._spends = spends

    def quanta(self, t: int) -> int | None:
        """Charged to the account by this run after t releases; None: infinite."""
        charged = self._spends[:t]
        if self._others is None or None in charged:
            return None
        return self._others + self._weight * sum(quanta for quanta in charged if quanta is not None)

    def row(self, t: int) -> Row:
        """μ and ε of the run after t releases, rounded up, and whom they protect."""
        quanta = self.quanta(t)
        mu = math.inf if quanta is None else upper_mu(quanta)
        epsilon = gdp.epsilon(mu, self._budget.delta)
        return {"privacy/mu_run": mu, "privacy/epsilon_run": epsilon, "privacy/unit": str(self.account.unit)}

    def show(self, tracker: RunView, t: int) -> None:
        """The same to the tracker, beside what the account has spent over its lifetime."""
        unbounded = self.account.unbounded
        tracker.spend(self._budget, None if unbounded else self.account.spent, self.quanta(t), step=t)


class Composed:
    """As `Spent`, on an account of kind `pld`, whose events have no μ that adds up.

    A composition takes a second, and rounds should not: ε of the run is that of the next of `_MILESTONES` rounds, an
    upper bound until it is reached. The account's ε is asked for there only.

    Args:
        run, label: which releases.
        unit: theirs.
        quanta: μ² without sampling of all of them together.
        steps: how many there are.
        sampling_probability: of each.
    """

    def __init__(self, run: Run, label: str, unit: Unit, quanta: int, steps: int, sampling_probability: float) -> None:
        self.account = _account(run, unit)
        self._delta = self.account.budget.delta
        self._steps, self._probability = steps, sampling_probability
        self._multiplier = math.nextafter(1 / upper_mu(-(-quanta // steps)), 0.0)
        lines = self.account.statement(run.name).lines
        self._others = [event for line in lines if line.label != label for event in events(line)]

    def row(self, t: int) -> Row:
        """ε of the run after t releases, or more, and whom it protects."""
        event = pld.PoissonGaussian(self._multiplier, self._probability, self._milestone(t))
        epsilon = pld.epsilon([*self._others, event], self._delta)
        return {"privacy/epsilon_run": epsilon, "privacy/unit": str(self.account.unit)}

    def show(self, tracker: RunView, t: int) -> None:
        """The same to the tracker; at milestones also what the account has spent over its lifetime."""
        tracker.public({"privacy/epsilon_run": self.row(t)["privacy/epsilon_run"]}, step=t)
        if t == self._milestone(t):
            tracker.public({"privacy/epsilon": self.account.spent_epsilon}, step=t)

    def _milestone(self, t: int) -> int:
        stride = -(-self._steps // _MILESTONES)
        return min(-(-t // stride) * stride, self._steps)


def events(line: Line) -> tuple[pld.Event, ...]:
    """What a line of a statement composes to: its steps cost the same, to the quantum."""
    if line.amount.quanta is None:
        raise ValueError(f"The releases of {line.run}/{line.label} have no noise: nothing can be composed with them.")
    if line.sampling_probability == 1:
        return (pld.Gaussian(math.nextafter(1 / upper_mu(line.amount.quanta), 0.0)),)
    each = upper_mu(-(-line.amount.quanta // line.steps))
    return (pld.PoissonGaussian(math.nextafter(1 / each, 0.0), line.sampling_probability, line.steps),)


def spent(run: Run, planned: PlannedRelease, spends: tuple[int | None, ...]) -> Spent | Composed:
    """What a run has been charged after each release of a line of its plan, by the kind of the account that shows it.

    Args:
        run: whose releases.
        planned: the line.
        spends: quanta of each release, in order; None for those without noise.
    """
    composed = planned.quanta is not None and _account(run, planned.unit).kind == PLD
    if not composed or planned.quanta is None:
        return Spent(run, planned.label, planned.unit, spends)
    q = planned.sampling_probability
    return Composed(run, planned.label, planned.unit, planned.quanta, planned.steps, q)


def show(tracker: RunView, row: Mapping[str, Any], t: int, public: Collection[str]) -> None:
    """A row's metrics to the tracker, those named in `public` as public, the others as released.

    Infinite ones and `privacy/…` are left out.
    """
    finite = {
        name: float(value)
        for name, value in row.items()
        if not name.startswith("privacy/") and isinstance(value, int | float) and math.isfinite(value)
    }
    finite.pop("training_iteration", None)
    tracker.public({name: value for name, value in finite.items() if name in public}, step=t)
    tracker.released({name: value for name, value in finite.items() if name not in public}, step=t)


def _account(run: Run, unit: Unit) -> Account:
    accounts = run.population.accounts()
    if not accounts:
        raise ValueError(
            f"Population {run.population.name!r} has no account, so nothing says what it may spend. Open one: "
            f"population.account({str(unit)!r}, Budget(epsilon, delta))."
        )
    return next((account for account in accounts if account.unit is unit), min(accounts, key=_fineness))


def _fineness(account: Account) -> int:
    return list(Unit).index(account.unit)


def _weight(run: Run, account: Unit, unit: Unit) -> int:
    """Quanta the account pays for one of the release: 1 if it is as fine, else m² by group privacy."""
    if account.covers(unit):
        return 1
    of = run.population.records_per_user if account is Unit.USER else run.population.records_per_client
    return (of or 1) ** 2
