"""What a trained model costs the people it was trained on, in the form in which it travels with the model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from dpray.platform.privacy.ledger.chain import current_head
from dpray.platform.privacy.noise import SEEDED
from dpray.platform.privacy.units import Unit

if TYPE_CHECKING:
    from dpray.platform.privacy.ledger import Account, Run

_NOT_PRIVATE = "NOT PRIVATE"


@dataclass(frozen=True)
class ModelStatement:
    """Whose data a model was made of, and how well they are protected.

    *Guarantee.* As the account's, at the time of the export: one `unit` of the population replaced by any other changes
    the distribution of everything released up to then, this model included, by at most (`epsilon`, `delta`), if
    `private` and under the `assumptions`. Only the account's `budget` bounds what was released later.

    Attributes:
        population, run: names in the ledger.
        unit, relation: who is protected, against which replacement.
        kind: of the account, `gdp` or `pld`.
        epsilon: of everything the account was ever charged: this model and all that led to it, searches included.
        delta, budget: the account's δ, and its lifetime ε.
        epsilon_run: of this run's charges alone.
        noise: where it came from: `operating system`, `seeded` or `none`.
        stamps: what a reader must know first.
        trust: who could see what while it was trained.
        assumptions: under which all this holds.
        ledger: number and digest of the ledger's last entry then; an anchor for `Ledger.verify`.
        parameters: SHA-256 of the parameters, see `export`.
        account: the account's statement for the run, as JSON values.
    """

    population: str
    run: str
    unit: str
    relation: str
    kind: str
    epsilon: float
    delta: float
    budget: float
    epsilon_run: float
    noise: str
    stamps: tuple[str, ...]
    trust: tuple[str, ...]
    assumptions: tuple[str, ...]
    ledger: tuple[int, str]
    parameters: str
    account: Mapping[str, Any]

    @property
    def private(self) -> bool:
        """Whether it protects anybody: noise that nobody can predict, and a finite ε."""
        return math.isfinite(self.epsilon) and not any(stamp.startswith(_NOT_PRIVATE) for stamp in self.stamps)

    def __str__(self) -> str:
        if not self.private:
            return f"{'; '.join(self.stamps) or _NOT_PRIVATE} (population {self.population}, run {self.run})"
        return (
            f"({self.epsilon:.4g}, {self.delta:g})-DP for one {self.unit} of population {self.population}, "
            f"{self.relation}, everything that led to it included; run {self.run} alone ε = {self.epsilon_run:.4g}"
        )

    def to_json(self) -> str:
        """The text that `from_json` reads; infinities as the text `inf`."""
        plain = {name: str(value) if _infinite(value) else value for name, value in asdict(self).items()}
        return json.dumps(plain, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ModelStatement:
        """Inverse of `to_json`. `ValueError`, `KeyError` or `TypeError` for anything else."""
        plain = json.loads(text)
        for name in ("epsilon", "delta", "budget", "epsilon_run"):
            plain[name] = float(plain[name])
        for name in ("stamps", "trust", "assumptions", "ledger"):
            plain[name] = tuple(plain[name])
        return cls(**{each.name: plain.pop(each.name) for each in fields(cls)}, **plain)


def draw_up(run: Run, unit: Unit, parameters: str) -> ModelStatement:
    """The statement of a model that a run has trained, as the ledger stands.

    Args:
        run: whose releases it is made of.
        unit: whose replacement they hide; the account of that unit speaks, else that of the finest one.
        parameters: SHA-256 of the model's parameters.
    """
    account = _account(run, unit)
    of_run, whole = account.statement(run.name), account.statement()
    budget = account.budget
    stamps = whole.stamps  # of everything that led here: a seeded run may have spent from the same account
    return ModelStatement(
        population=run.population.name,
        run=run.name,
        unit=str(account.unit),
        relation=whole.relation,
        kind=whole.kind,
        epsilon=account.spent_epsilon,
        delta=budget.delta,
        budget=budget.epsilon,
        epsilon_run=math.nan if of_run.run_spent is None else of_run.run_spent.epsilon,
        noise="none" if whole.non_private or account.unbounded else "seeded" if SEEDED in stamps else _SYSTEM,
        stamps=stamps,
        trust=of_run.trust,
        assumptions=whole.assumptions,
        ledger=_head(run),
        parameters=parameters,
        account=of_run.as_dict(),
    )


_SYSTEM = "operating system"


def _account(run: Run, unit: Unit) -> Account:
    accounts = run.population.accounts()
    return next((account for account in accounts if account.unit is unit), accounts[0])


def _head(run: Run) -> tuple[int, str]:
    head = run.population.storage.read(current_head)
    return head.sequence, head.digest


def _infinite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
