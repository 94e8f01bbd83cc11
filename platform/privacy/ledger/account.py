"""An account: the lifetime budget of one unit over a population, and what has happened to it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from sqlalchemy import func, insert, select, update

from dpray.platform.privacy import gdp
from dpray.platform.privacy.budget import Budget, remaining_epsilon, upper_mu
from dpray.platform.privacy.figures import significant
from dpray.platform.privacy.ledger import composing, rows, schema, statement
from dpray.platform.privacy.ledger.chain import Entry, Transaction
from dpray.platform.privacy.ledger.charging import amount
from dpray.platform.privacy.ledger.errors import BudgetConflict, LedgerError
from dpray.platform.privacy.ledger.plan import spend_text
from dpray.platform.privacy.ledger.statement import Statement
from dpray.platform.privacy.mechanisms import Unit

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from dpray.platform.privacy.ledger.population import Population

_TOUCHING = frozenset({"charge", "reserve", "lose", "close"})


class Account:
    """The lifetime budget (ε, δ) of one unit over one population. Every property is read from the ledger anew.

    Guarantee: over everything released on the population, two data sets that differ by replacing one unit are
    (ε, δ)-indistinguishable at the budget in force since before the first release. A budget raised later is a new
    claim, and `statement().claims` lists it. `spent_epsilon` at a moment chosen by looking at releases is a report,
    not a guarantee.
    """

    def __init__(self, population: Population, unit: Unit) -> None:
        self.population, self.unit = population, unit

    def __repr__(self) -> str:
        return f"Account({self.population.name!r}, unit={str(self.unit)!r})"

    @property
    def budget(self) -> Budget:
        """The budget in force."""
        return self._row().budget

    @property
    def kind(self) -> str:
        """`gdp`: spends are exact μ². `pld`: spends are events, and their composed ε decides."""
        return self._row().kind

    @property
    def spent(self) -> int:
        """Quanta of μ² charged; releases without noise are counted in `unbounded` instead.

        On an account of kind `pld`: what the releases would have cost without sampling. `spent_epsilon` is what counts.
        """
        return self._row().spent

    @property
    def unbounded(self) -> int:
        """Number of releases without noise: above 0 the account protects nobody (ε = ∞)."""
        return self._row().unbounded

    @property
    def reserved(self) -> int:
        """Quanta set aside by the plans of runs."""
        return self._row().reserved

    @property
    def remaining(self) -> int | None:
        """Quanta free of every reservation; None where the budget is infinite (non-private).

        Errors: LedgerError on an account of kind `pld`: what is free depends on what it will be spent on.
        """
        row = self._row()
        if row.kind == composing.PLD:
            raise LedgerError(
                f"The {self.unit} account of population {self.population.name!r} is of kind 'pld': composed events "
                "leave no μ² to subtract. Read `spent_epsilon`, and let `Run.reserve` say whether a plan fits."
            )
        return None if row.limit is None else row.limit - row.spent - row.reserved

    @property
    def spent_epsilon(self) -> float:
        """ε of everything charged, at the account's δ, rounded up; ∞ after a release without noise."""
        row = self._row()
        if row.kind == composing.PLD:
            return self.population.storage.read(lambda connection: self._composed(connection, row))
        if row.unbounded:
            return float("inf")
        return gdp.epsilon(upper_mu(row.spent), row.budget.delta)

    @property
    def remaining_epsilon(self) -> float:
        """ε(√(μ_B² − μ²)) of what is neither charged nor set aside; ε does not subtract. NaN for kind `pld`: no such
        number."""
        row = self._row()
        if row.kind == composing.PLD:
            return float("nan")
        if row.limit is None:
            return float("inf")
        return remaining_epsilon(row.budget, row.spent + row.reserved)

    def amend(self, budget: Budget, reason: str) -> Account:
        """Put another budget in force. It is recorded as a new claim with its reason, for ever.

        Errors: LedgerError without a reason; BudgetConflict below what is spent and set aside.
        """
        if not isinstance(reason, str) or not reason.strip():
            raise LedgerError("A budget is amended for a reason that readers of the statement can judge: give one.")

        def work(transaction: Transaction) -> None:
            row = self._find(rows.accounts(transaction.connection, self.population.name))
            if row.budget == budget:
                return
            if row.kind == composing.PLD:
                self._refuse_composed_below(transaction.connection, row, budget)
            else:
                self._refuse_below(row, budget)
            cells = budget_cells(budget)
            sequence = transaction.append(
                "amend",
                {"population": self.population.name, "unit": str(self.unit), "budget": cells, "reason": reason.strip()},
            ).sequence
            key = schema.accounts.c
            transaction.connection.execute(
                update(schema.accounts)
                .where(key.population == self.population.name, key.unit == str(self.unit))
                .values(cells)
            )
            record_claim(transaction, self.population.name, self.unit, cells, reason.strip(), sequence)

        self.population.storage.write(work)
        return self

    def history(self) -> tuple[Entry, ...]:
        """Every entry of the chain that touched this account, oldest first."""
        query = select(schema.entries).order_by(schema.entries.c.sequence)
        found = self.population.storage.read(lambda connection: connection.execute(query).all())
        entries = (Entry(r.sequence, r.at, r.kind, json.loads(r.body), r.digest) for r in found)
        return tuple(
            entry
            for entry in entries
            if entry.body.get("population") == self.population.name
            and (
                entry.kind in _TOUCHING
                or (entry.body.get("unit") == str(self.unit) and entry.kind in {"account", "amend"})
            )
        )

    def statement(self, run: str | None = None) -> Statement:
        """What the account says to a reader; with `run`, that run's lines beside the account's totals."""
        return self.population.storage.read(
            lambda connection: statement.draw_up(connection, self.population.name, self.unit, run)
        )

    def _row(self) -> rows.AccountRow:
        return self._find(
            self.population.storage.read(lambda connection: rows.accounts(connection, self.population.name))
        )

    def _find(self, found: tuple[rows.AccountRow, ...]) -> rows.AccountRow:
        return next(row for row in found if row.unit is self.unit)

    def _composed(self, connection: Connection, row: rows.AccountRow, *, plans: bool = False) -> float:
        name = self.population.name
        spends = composing.charged(connection, name) + (composing.planned(connection, name) if plans else [])
        return composing.epsilon(name, row.unit, row.budget.delta, rows.maxima(connection, name), spends)

    def _refuse_composed_below(self, connection: Connection, row: rows.AccountRow, budget: Budget) -> None:
        composing.check_kind(row.kind, budget)
        committed = self._composed(connection, replace(row, budget=budget), plans=True)
        if committed > budget.epsilon:
            raise BudgetConflict(
                f"The {self.unit} account of population {self.population.name!r} cannot be lowered to ε = "
                f"{budget.epsilon:g} at δ = {budget.delta:g}: what is spent and set aside by plans composes to ε = "
                f"{significant(committed, 6)} there. Close runs that are over, or keep a budget of at least that."
            )

    def _refuse_below(self, row: rows.AccountRow, budget: Budget) -> None:
        limit = budget.quanta
        if limit is None:
            return
        if row.unbounded:
            raise BudgetConflict(
                f"The {self.unit} account of population {self.population.name!r} has {row.unbounded} release(s) "
                "without noise: no finite budget is true of it any more."
            )
        committed = row.spent + row.reserved
        if limit < committed:
            measured = rows.AccountRow(row.unit, row.kind, budget, limit, row.spent, row.reserved, 0)
            raise BudgetConflict(
                f"The {self.unit} account of population {self.population.name!r} cannot be lowered to ε = "
                f"{budget.epsilon:g} at δ = {budget.delta:g}: {amount(measured, row.spent)} of that is spent and "
                f"{amount(measured, row.reserved)} is set aside by plans. Close runs that are over, or keep a budget "
                f"of at least ε = {significant(gdp.epsilon(upper_mu(committed), budget.delta), 6)}."
            )


def budget_cells(budget: Budget) -> dict[str, str | int]:
    """A budget as the tables keep it."""
    return {
        "epsilon": repr(float(budget.epsilon)),
        "delta": repr(float(budget.delta)),
        "non_private": int(budget.non_private),
        "budget": spend_text(budget.quanta),
    }


def record_claim(
    transaction: Transaction, population: str, unit: Unit, cells: dict[str, str | int], reason: str, sequence: int
) -> None:
    """Add a budget to the claims of an account, with the number of releases that had been charged before it."""
    claim, release = schema.claims.c, schema.releases.c
    connection = transaction.connection
    number = connection.execute(
        select(func.count()).where(claim.population == population, claim.unit == str(unit))
    ).scalar_one()
    releases = connection.execute(select(func.count()).where(release.population == population)).scalar_one()
    connection.execute(
        insert(schema.claims),
        {
            "population": population,
            "unit": str(unit),
            "number": number + 1,
            **{name: cells[name] for name in ("epsilon", "delta", "non_private")},
            "reason": reason,
            "releases": releases,
            "sequence": sequence,
        },
    )
