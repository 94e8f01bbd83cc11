"""A population: a data set that lives on across experiments, with its accounts and its runs."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import insert, select, update

from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger import composing, rows, schema, storing
from dpray.platform.privacy.ledger.account import Account, budget_cells, record_claim
from dpray.platform.privacy.ledger.chain import Transaction
from dpray.platform.privacy.ledger.charging import admit, factor
from dpray.platform.privacy.ledger.declaring import Declared, check, text_of, used
from dpray.platform.privacy.ledger.errors import BudgetConflict, LedgerError, LedgerTampered
from dpray.platform.privacy.ledger.plan import checked_name
from dpray.platform.privacy.ledger.rows import AccountRow
from dpray.platform.privacy.ledger.run import Run
from dpray.platform.privacy.ledger.storage import Storage
from dpray.platform.privacy.ledger.values import ValueFiles
from dpray.platform.privacy.ledger.verify import problems
from dpray.platform.privacy.mechanisms import Unit

if TYPE_CHECKING:
    from sqlalchemy import Connection

_MOST_SHOWN = 3


class Population:
    """The people one data set is about. Every release on it charges every one of its accounts."""

    def __init__(self, name: str, storage: Storage, files: ValueFiles | None) -> None:
        self.name, self.storage, self.files = name, storage, files

    def __repr__(self) -> str:
        return f"Population({self.name!r})"

    @property
    def records_per_user(self) -> int | None:
        """Declared public maximum of records one user has; None: not declared."""
        return self.storage.read(lambda connection: rows.maxima(connection, self.name)).records_per_user

    @property
    def records_per_client(self) -> int | None:
        """Declared public maximum of records one client has; None: not declared."""
        return self.storage.read(lambda connection: rows.maxima(connection, self.name)).records_per_client

    @property
    def declaration(self) -> Mapping[str, Any] | None:
        """The public facts this name is bound to since its first use; None: nothing declared."""
        text = self._declared().declaration
        return None if text is None else dict(json.loads(text))

    def check(self, *, records_per_client: int | None = None, declaration: Mapping[str, Any] | None = None) -> None:
        """Refuse what `Ledger.population` would refuse to declare; writes nothing.

        Errors: LedgerError with what differs.
        """
        given = Declared(None, records_per_client, text_of(declaration))
        check(
            self.name, self._declared(), given, used=self.storage.read(lambda connection: used(connection, self.name))
        )

    def account(self, unit: Unit | str, budget: Budget | None = None, *, kind: str | None = None) -> Account:
        """Open the account of a unit, or create it with a budget.

        A new account is charged everything the population has released before, and sets aside what open runs planned.

        Args:
            unit: `record`, `user` or `client`.
            budget: lifetime budget; None opens what is there.
            kind: `gdp` (default): exact μ². `pld`: events composed by privacy loss distributions, which Poisson-sampled
                releases need. All accounts of a population are of one kind. None with no budget opens either.

        Errors: LedgerError where there is none and no budget was given, or for another kind than the population's;
        BudgetConflict on another budget than the one in force; BudgetExceeded where the past already exceeds a new
        account's budget.
        """
        unit = _unit(unit)
        if budget is None:
            there = self._rows()
            if kind is not None:
                self._refuse_other_kind(there, kind)
            if not any(row.unit is unit for row in there):
                raise LedgerError(
                    f"Population {self.name!r} has no {unit} account. Create it with a lifetime budget: "
                    f"population.account({str(unit)!r}, Budget(epsilon=…, delta=…))."
                )
            return Account(self, unit)
        given, wanted = budget, composing.GDP if kind is None else kind
        composing.check_kind(wanted, given)
        self.storage.write(lambda transaction: self._open(transaction, unit, given, wanted))
        return Account(self, unit)

    def accounts(self) -> tuple[Account, ...]:
        """Every account, by unit from fine to coarse."""
        order = list(Unit)
        return tuple(Account(self, row.unit) for row in sorted(self._rows(), key=lambda row: order.index(row.unit)))

    def runs(self) -> tuple[str, ...]:
        """Names of the runs ever opened, in alphabetical order."""
        run = schema.runs.c
        query = select(run.name).where(run.population == self.name).order_by(run.name)
        return tuple(self.storage.read(lambda connection: connection.execute(query).scalars().all()))

    def run(self, name: str, *, stamps: Sequence[str] = ()) -> Run:
        """Open a run, new or old, and take its lease: whoever held it before may not charge or commit any more.

        Args:
            name: unique within the population; the same name is the same run, resumed.
            stamps: facts a reader must know, such as "NOT PRIVATE (seeded noise)"; kept with every release.

        Errors: LedgerTampered if the ledger does not verify.
        """
        name = checked_name("run", name)
        kept = tuple(sorted({checked_name("stamp", stamp) for stamp in stamps}))
        found = self.storage.read(lambda connection: problems(connection, self.files, thorough=False))
        if found:
            shown = " ".join(found[:_MOST_SHOWN]) + (
                f" (and {len(found) - _MOST_SHOWN} more)" if found[_MOST_SHOWN:] else ""
            )
            raise LedgerTampered(f"The ledger does not verify, so run {name!r} is not opened: {shown}")
        epoch = self.storage.write(lambda transaction: self._lease(transaction, name))
        return Run(self, name, epoch, kept)

    def _lease(self, transaction: Transaction, name: str) -> int:
        connection, run = transaction.connection, schema.runs.c
        mine = (run.population == self.name) & (run.name == name)
        epoch = (connection.execute(select(run.epoch).where(mine)).scalar_one_or_none() or 0) + 1
        if epoch == 1:
            cells = {"population": self.name, "name": name, "epoch": 1, "state": "open", "plan": None}
            connection.execute(insert(schema.runs), cells)
        else:
            connection.execute(update(schema.runs).where(mine).values(epoch=epoch))
        nonce = uuid.uuid4().hex  # so that an old copy that went on differs from here, whatever it repeats
        transaction.append("lease", {"population": self.name, "run": name, "epoch": epoch, "nonce": nonce})
        storing.sweep(connection, self.files, self.name, name)
        return epoch

    def _open(self, transaction: Transaction, unit: Unit, budget: Budget, kind: str) -> None:
        connection = transaction.connection
        accounts = rows.accounts(connection, self.name)
        self._refuse_other_kind(accounts, kind)
        there = next((row for row in accounts if row.unit is unit), None)
        if there is not None:
            if there.budget != budget:
                raise BudgetConflict(
                    f"The {unit} account of population {self.name!r} has the budget {_words(there.budget)}; it was "
                    f"opened with {_words(budget)}. Open it with the first, or amend it: amend(budget, reason) records "
                    "a new claim."
                )
            return
        spent, reserved, unbounded = self._past(connection, unit)
        account = AccountRow(unit, kind, budget, budget.quanta, 0, 0, 0)
        what = "what the population has released and planned so far, which a new account is charged at once,"
        if kind == composing.PLD:
            past = composing.charged(connection, self.name) + composing.planned(connection, self.name)
            composing.admit(connection, self.name, account, past, what)
        else:
            admit(self.name, account, None if unbounded else spent + reserved, 0, what)
        cells = budget_cells(budget)
        amounts = {"spent": str(spent), "reserved": str(reserved), "unbounded": unbounded}
        name = {"population": self.name, "unit": str(unit), "kind": kind}
        connection.execute(insert(schema.accounts), {**name, **cells, **amounts})
        sequence = transaction.append("account", {**name, "budget": cells, **amounts}).sequence
        record_claim(transaction, self.name, unit, cells, "opened", sequence)

    def _refuse_other_kind(self, accounts: tuple[AccountRow, ...], kind: str) -> None:
        other = next((row for row in accounts if row.kind != kind), None)
        if other is not None:
            raise LedgerError(
                f"The accounts of population {self.name!r} are of kind {other.kind!r}, and {kind!r} was asked for: "
                "exact μ² and composed events do not mix on one population. Open it with "
                f"kind={other.kind!r}."
            )

    def _past(self, connection: Connection, unit: Unit) -> tuple[int, int, int]:
        """(spent, reserved, noiseless releases) of a new account: everything charged and planned before it."""
        maxima = rows.maxima(connection, self.name)
        spent = unbounded = reserved = 0
        for of, quanta, _, count in rows.spends(connection, self.name):
            if quanta is None:
                unbounded += count
            else:
                spent += factor(self.name, unit, of, maxima) * quanta * count
        for line in rows.lines(connection, self.name):
            if line.remaining:
                reserved += factor(self.name, unit, line.unit, maxima) * line.remaining
        return spent, reserved, unbounded

    def _declared(self) -> Declared:
        cells = [schema.populations.c[key] for key in schema.DECLARED]
        query = select(*cells).where(schema.populations.c.name == self.name)
        return Declared(*self.storage.read(lambda connection: tuple(connection.execute(query).one())))

    def _rows(self) -> tuple[AccountRow, ...]:
        return self.storage.read(lambda connection: rows.accounts(connection, self.name))


def _unit(unit: Unit | str) -> Unit:
    try:
        return Unit(unit)
    except ValueError:
        raise LedgerError(f"A unit is record, user or client; {unit!r} was given.") from None


def _words(budget: Budget) -> str:
    return f"ε = {budget.epsilon:g} at δ = {budget.delta:g}" + (" (NOT PRIVATE)" if budget.non_private else "")
