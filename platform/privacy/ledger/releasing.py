"""The charge: every account of the population pays for a release in one transaction, or none does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sqlalchemy import Connection, bindparam, insert, update

from dpray.platform.privacy.ledger import composing, rows, schema
from dpray.platform.privacy.ledger.chain import Transaction, canonical
from dpray.platform.privacy.ledger.charging import admit, factor
from dpray.platform.privacy.ledger.composing import Spend, refuse_sampled
from dpray.platform.privacy.ledger.errors import LedgerError
from dpray.platform.privacy.ledger.plan import Releasable, ReleaseKey, plain, sampling_of, spend_text
from dpray.platform.privacy.ledger.prepared import Prepared
from dpray.platform.privacy.ledger.rows import AccountRow, LineRow, RunRow
from dpray.platform.privacy.mechanisms import Unit

_A, _L = schema.accounts.c, schema.lines.c
_PAY = Prepared(
    update(schema.accounts)
    .where(_A.population == bindparam("p"), _A.unit == bindparam("u"))
    .values(spent=bindparam("spent"), reserved=bindparam("reserved"), unbounded=bindparam("unbounded"))
)
_CONSUME = Prepared(
    update(schema.lines)
    .where(
        _L.population == bindparam("p"),
        _L.run == bindparam("r"),
        _L.label == bindparam("l"),
        _L.mechanism == bindparam("m"),
        _L.unit == bindparam("u"),
    )
    .values(remaining=bindparam("remaining"), left=bindparam("left"))
)
_INSERT = Prepared(insert(schema.releases))


@dataclass(frozen=True)
class Ask:
    """A release that asks to be charged. `quanta` is μ² in the mechanism's own unit, unsampled; None: without noise."""

    key: ReleaseKey
    mechanism: Releasable
    quanta: int | None
    request: str
    trust: str
    stamps: tuple[str, ...]

    @property
    def sampling(self) -> float:
        """Sampling probability of the mechanism; 1 for those that do not sample."""
        return sampling_of(self.mechanism)


def charge(transaction: Transaction, population: str, name: str, run: RunRow, ask: Ask) -> int:
    """Charge a new key: the run's own reservation first, then what is free. Returns the number of the entry.

    Errors: BudgetExceeded if an account refuses, LedgerError without an account; nothing is written then.
    """
    connection, key, unit = transaction.connection, ask.key, Unit(ask.mechanism.unit)
    accounts = rows.accounts(connection, population)
    refuse_without_account(population, accounts)
    what = f"release {key} of run {name!r}"
    refuse_sampled(population, accounts, f"R{what[1:]}", ask.quanta, ask.sampling)
    line = rows.line(connection, population, name, key, unit) if run.plan is not None else None
    own = set_aside(line, ask)
    costs, payments = {}, []
    for account in accounts:
        each = factor(population, account.unit, unit, run.maxima)
        asked = None if ask.quanta is None else each * ask.quanta
        if account.kind == composing.PLD:
            _admit_event(connection, population, account, ask, line, what)
        else:
            admit(population, account, asked, each * own, what, holders(connection, population))
        costs[str(account.unit)] = spend_text(asked)
        payments.append(
            {
                "p": population,
                "u": str(account.unit),
                "spent": str(account.spent + (asked or 0)),
                "reserved": str(account.reserved - each * own),
                "unbounded": account.unbounded + (asked is None),
            }
        )
    _PAY.many(connection, payments)
    if own and line is not None:
        where = {"p": population, "r": name, "l": key.label, "m": key.mechanism, "u": str(unit)}
        after = _consumed(line, own)
        _CONSUME.run(connection, {**where, "remaining": spend_text(after.remaining), "left": after.left})
    kind = accounts[0].kind
    return _record(transaction, population, name, run, ask, own, costs, kind)


def set_aside(line: LineRow | None, ask: Ask) -> int:
    """Quanta of an ask that its run's plan has set aside for it."""
    if line is None or line.sampling != ask.sampling:
        return 0
    return min(line.remaining or 0, ask.quanta or 0)


def _consumed(line: LineRow, own: int) -> LineRow:
    return replace(line, remaining=(line.remaining or 0) - own, left=max(line.left - 1, 0))


def _admit_event(
    connection: Connection, population: str, account: AccountRow, ask: Ask, line: LineRow | None, what: str
) -> None:
    """What a plan set aside was composed then and is not composed again; the rest must fit beside everything else.

    Errors: BudgetExceeded; LedgerError for a release without noise, or one that has no price for this account.
    """
    if ask.quanta is None:
        raise LedgerError(
            f"Population {population!r}, {account.unit} account (pld): {what} has no noise, so that its ε is infinite. "
            "Nothing was charged."
        )
    own = set_aside(line, ask)
    if line is not None and own == ask.quanta and (ask.sampling == 1 or (line.left and own <= line.each)):
        return
    spends = [*composing.charged(connection, population), Spend(Unit(ask.mechanism.unit), ask.quanta, ask.sampling)]
    for other in rows.lines(connection, population):
        spends += composing.aside(_consumed(other, own) if own and other == line else other)
    composing.admit(connection, population, account, spends, what, holders(connection, population))


def _record(
    transaction: Transaction,
    population: str,
    name: str,
    run: RunRow,
    ask: Ask,
    own: int,
    costs: dict[str, str],
    kind: str,
) -> int:
    key = ask.key
    cells = {
        "population": population,
        "run": name,
        "label": key.label,
        "mechanism": key.mechanism,
        "step": key.step,
        "unit": str(Unit(ask.mechanism.unit)),
        "quanta": spend_text(ask.quanta),
        "sampling": repr(ask.sampling),
        "request": ask.request,
        "trust": ask.trust,
    }
    details = {
        "epoch": run.epoch,
        "parameters": plain(ask.mechanism.describe()),
        "stamps": list(ask.stamps),
        "costs": costs,
        "from_plan": str(own),
        "event": composing.recorded(kind, ask.quanta, ask.sampling),
    }
    sequence = transaction.append("charge", {**cells, **details}).sequence
    state = {"stamps": canonical(list(ask.stamps)), "state": "charged", "participants": None, "reason": None}
    _INSERT.run(transaction.connection, {"sequence": sequence, **cells, **state})
    return sequence


def refuse_without_account(population: str, accounts: tuple[AccountRow, ...]) -> None:
    """A release that charges nobody is no release."""
    if not accounts:
        raise LedgerError(
            f"Population {population!r} has no account, so nothing can be released on it. Open one first: "
            "population.account(unit, Budget(epsilon=…, delta=…))."
        )


def holders(connection: Connection, population: str) -> Callable[[], str]:
    """Says which runs have set something aside."""

    def words() -> str:
        names = sorted({line.run for line in rows.lines(connection, population) if line.remaining})
        return f" (runs {', '.join(map(repr, names))})" if names else ""

    return words
