"""What a round shows: public facts and released values, and what has been spent to get there.

| metric | value |
|---|---|
| `round/clients`, `round/records` | clients whose sum was used, and their records |
| `round/sigma` | std of the noise on each coordinate of the sum |
| `round/lost` | 1 if the release was lost: charged, no step made |
| `round/gradient_norm` | ‖G‖ |
| `round/noise_to_signal` | s√d / ‖G‖: expected norm of the noise over the norm of what was released |
| `round/signal_to_noise` | √max(‖G‖² − ds², 0) / (s√d): estimate of the signal alone over the noise |
| `round/step_norm`, `round/parameter_norm` | ‖θ_{t+1} − θ_t‖, ‖θ_{t+1}‖ |
| `accuracy`, `loss` | of θ_{t+1} on the evaluation set declared public |
| `privacy/epsilon_run`, `privacy/mu_run` | of everything this run has been charged so far, search included |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dpray.platform.privacy import gdp
from dpray.platform.privacy.ledger.charging import upper_mu
from dpray.platform.privacy.units import Unit
from dpray.trainers.models import FloatArray

if TYPE_CHECKING:
    from dpray.platform.privacy.ledger import Account, Run
    from dpray.platform.tracking import RunView

Row = dict[str, Any]

PUBLIC = frozenset({"round/clients", "round/records", "round/sigma", "round/lost"})


@dataclass(frozen=True)
class Answer:
    """A released round: G (d,), the std of the noise on each of its coordinates and on the sum's, and who answered."""

    gradient: FloatArray
    noise: float
    sigma: float
    clients: int
    records: int


def measure(answer: Answer | None, before: FloatArray, after: FloatArray) -> Row:
    """The `round/` metrics; before and after are θ (d,). An answer of None is a lost round."""
    if answer is None:
        return {"round/lost": 1}
    norm = float(np.linalg.norm(answer.gradient))
    floor = answer.noise * math.sqrt(answer.gradient.size)
    return {
        "round/lost": 0,
        "round/clients": answer.clients,
        "round/records": answer.records,
        "round/sigma": answer.sigma,
        "round/gradient_norm": norm,
        "round/noise_to_signal": floor / norm if norm else math.inf,
        "round/signal_to_noise": math.sqrt(max(norm**2 - floor**2, 0.0)) / floor if floor else math.inf,
        "round/step_norm": float(np.linalg.norm(after - before)),
        "round/parameter_norm": float(np.linalg.norm(after)),
    }


class Spent:
    """What a run has been charged after each round, on the account that shows it.

    The account is the one of the release's unit, else of the finest unit there is. Counted from the plan in whole
    quanta, not asked of the ledger every round: a statement takes longer than a round.
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
        """Charged to the account by this run after round t; None: infinite."""
        charged = self._spends[:t]
        if self._others is None or None in charged:
            return None
        return self._others + self._weight * sum(quanta for quanta in charged if quanta is not None)

    def row(self, t: int) -> Row:
        """μ and ε of the run after round t, rounded up, and whom they protect."""
        quanta = self.quanta(t)
        mu = math.inf if quanta is None else upper_mu(quanta) if quanta else 0.0
        epsilon = gdp.epsilon(mu, self._budget.delta)
        return {"privacy/mu_run": mu, "privacy/epsilon_run": epsilon, "privacy/unit": str(self.account.unit)}

    def show(self, tracker: RunView, t: int) -> None:
        """The same to the tracker, beside what the account has spent over its lifetime."""
        unbounded = self.account.unbounded
        tracker.spend(self._budget, None if unbounded else self.account.spent, self.quanta(t), step=t)


def show(tracker: RunView, row: Mapping[str, Any], t: int) -> None:
    """A row's metrics to the tracker, each as what it is declared as; infinite ones are left out."""
    finite = {
        name: float(value)
        for name, value in row.items()
        if not name.startswith("privacy/") and isinstance(value, int | float) and math.isfinite(value)
    }
    finite.pop("training_iteration", None)
    tracker.public({name: value for name, value in finite.items() if name in PUBLIC}, step=t)
    tracker.released({name: value for name, value in finite.items() if name not in PUBLIC}, step=t)


def _account(run: Run, unit: Unit) -> Account:
    accounts = run.population.accounts()
    if not accounts:
        raise ValueError(
            f"Population {run.population.name!r} has no account, so nothing says what training may spend. Open one: "
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
