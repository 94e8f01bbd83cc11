"""The charge: every account of the population pays for a release in one transaction, or none does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, insert, update

from dpray.platform.privacy.ledger import rows, schema
from dpray.platform.privacy.ledger.chain import Transaction, canonical
from dpray.platform.privacy.ledger.charging import admit, factor
from dpray.platform.privacy.ledger.errors import LedgerError
from dpray.platform.privacy.ledger.plan import Releasable, ReleaseKey, plain, spend_text
from dpray.platform.privacy.ledger.prepared import Prepared
from dpray.platform.privacy.ledger.rows import AccountRow, RunRow
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
    .values(remaining=bindparam("remaining"))
)
_INSERT = Prepared(insert(schema.releases))


@dataclass(frozen=True)
class Ask:
    """A release that asks to be charged. `quanta` is μ² in the mechanism's own unit; None: without noise."""

    key: ReleaseKey
    mechanism: Releasable
    quanta: int | None
    request: str
    trust: str
    stamps: tuple[str, ...]


def charge(transaction: Transaction, population: str, name: str, run: RunRow, ask: Ask) -> int:
    """Charge a new key: the run's own reservation first, then what is free. Returns the number of the entry.

    Errors: BudgetExceeded if an account refuses, LedgerError without an account; nothing is written then.
    """
    connection, key, unit = transaction.connection, ask.key, Unit(ask.mechanism.unit)
    accounts = rows.accounts(connection, population)
    refuse_without_account(population, accounts)
    aside = rows.set_aside(connection, population, name, key, unit) if run.plan is not None else 0
    own = min(aside, ask.quanta or 0)
    costs, payments = {}, []
    for account in accounts:
        each = factor(population, account.unit, unit, run.maxima)
        asked = None if ask.quanta is None else each * ask.quanta
        admit(population, account, asked, each * own, f"release {key} of run {name!r}", holders(connection, population))
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
    if own:
        line = {"p": population, "r": name, "l": key.label, "m": key.mechanism, "u": str(unit)}
        _CONSUME.run(connection, {**line, "remaining": str(aside - own)})
    return _record(transaction, population, name, run, ask, own, costs)


def _record(
    transaction: Transaction, population: str, name: str, run: RunRow, ask: Ask, own: int, costs: dict[str, str]
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
        "request": ask.request,
        "trust": ask.trust,
    }
    details = {
        "epoch": run.epoch,
        "parameters": plain(ask.mechanism.describe()),
        "stamps": list(ask.stamps),
        "costs": costs,
        "from_plan": str(own),
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
