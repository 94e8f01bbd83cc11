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

from dpray.platform.privacy import gdp
from dpray.platform.privacy.budget import upper_mu
from dpray.platform.privacy.units import Unit

if TYPE_CHECKING:
    from dpray.platform.privacy.ledger import Account, Run
    from dpray.platform.tracking.view import RunView

Row = dict[str, Any]


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
