"""Reading the tables: typed rows, and the few statements a charge needs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Select, bindparam, func, select

from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger import schema
from dpray.platform.privacy.ledger.errors import LedgerError
from dpray.platform.privacy.ledger.plan import ReleaseKey, spend_of
from dpray.platform.privacy.ledger.prepared import Prepared
from dpray.platform.privacy.mechanisms import Unit


@dataclass(frozen=True)
class Maxima:
    """Declared public maxima of a population; None where not declared."""

    records_per_user: int | None
    records_per_client: int | None


@dataclass(frozen=True)
class AccountRow:
    """An account as it stands, in quanta. `limit` None: non-private. `unbounded`: number of releases without noise."""

    unit: Unit
    kind: str
    budget: Budget
    limit: int | None
    spent: int
    reserved: int
    unbounded: int


@dataclass(frozen=True)
class RunRow:
    """A run as it stands, with the maxima of its population."""

    epoch: int
    closed: bool
    plan: str | None
    maxima: Maxima


@dataclass(frozen=True)
class LineRow:
    """A planned release: what is still set aside for it, in its own quanta (None: without noise), and for how many.

    `each`: what one step may spend at most, ⌈quanta/steps⌉, where it is a sampled one.
    """

    run: str
    label: str
    mechanism: str
    unit: Unit
    remaining: int | None
    each: int
    sampling: float
    left: int


@dataclass(frozen=True)
class ReleaseRow:
    """A release as it stands. `state`: charged, committed, stored or lost. `members`: its participants, as kept."""

    sequence: int
    unit: Unit
    quanta: int | None
    sampling: float
    request: str
    trust: str
    state: str
    members: str | None
    reason: str | None
    stamps: tuple[str, ...]

    @property
    def participants(self) -> frozenset[str] | None:
        """The set the release was committed to; None: to none."""
        return None if self.members is None else frozenset(json.loads(self.members))


_A, _R, _L = schema.accounts.c, schema.runs.c, schema.lines.c
_P, _S = schema.populations.c, schema.releases.c


def _prepared(query: Select[Any]) -> Prepared:
    return Prepared(query, *(column.name for column in query.selected_columns))


_ACCOUNTS = _prepared(select(schema.accounts).where(_A.population == bindparam("p")).order_by(_A.unit))
_RUN = _prepared(
    select(_R.epoch, _R.state, _R.plan, _P.records_per_user, _P.records_per_client)
    .join_from(schema.runs, schema.populations, _P.name == _R.population)
    .where(_R.population == bindparam("p"), _R.name == bindparam("r"))
)
_LINES = select(schema.lines).where(_L.population == bindparam("p")).order_by(_L.run, _L.label, _L.mechanism, _L.unit)
_LINE = _prepared(
    select(schema.lines)
    .where(_L.population == bindparam("p"), _L.run == bindparam("r"), _L.label == bindparam("l"))
    .where(_L.mechanism == bindparam("m"), _L.unit == bindparam("u"))
)
_RELEASE = _prepared(
    select(_S.sequence, _S.unit, _S.quanta, _S.sampling, _S.request, _S.trust, _S.state)
    .add_columns(_S.participants, _S.reason, _S.stamps)
    .where(_S.population == bindparam("p"), _S.run == bindparam("r"), _S.label == bindparam("l"))
    .where(_S.mechanism == bindparam("m"), _S.step == bindparam("s"))
)
_SPENT = (_S.unit, _S.quanta, _S.sampling)
_SPENDS = select(*_SPENT, func.count()).where(_S.population == bindparam("p")).group_by(*_SPENT)


def account(row: Any) -> AccountRow:
    """Typed row of `accounts`."""
    return AccountRow(
        Unit(row.unit),
        row.kind,
        budget(row),
        spend_of(row.budget),
        int(row.spent),
        int(row.reserved),
        row.unbounded,
    )


def budget(row: Any) -> Budget:
    """The budget of a row of `accounts` or `claims`."""
    return _budget(float(row.epsilon), float(row.delta), bool(row.non_private))


@lru_cache(maxsize=256)
def _budget(epsilon: float, delta: float, non_private: bool) -> Budget:
    """A budget, calibrated once: inverting ε(μ) takes longer than everything else in a charge."""
    return Budget(epsilon=epsilon, delta=delta, non_private=non_private)


def accounts(connection: Connection, population: str) -> tuple[AccountRow, ...]:
    """Every account of a population, by unit."""
    return tuple(account(row) for row in _ACCOUNTS.all(connection, {"p": population}))


def maxima(connection: Connection, population: str) -> Maxima:
    """The declared maxima of a population."""
    row = connection.execute(select(_P.records_per_user, _P.records_per_client).where(_P.name == population)).one()
    return Maxima(row.records_per_user, row.records_per_client)


def run(connection: Connection, population: str, name: str) -> RunRow:
    """A run that has been opened."""
    row = _RUN.one(connection, {"p": population, "r": name})
    if row is None:
        raise LedgerError(f"Population {population!r} has no run {name!r}.")
    return RunRow(row.epoch, row.state == "closed", row.plan, Maxima(row.records_per_user, row.records_per_client))


def lines(connection: Connection, population: str) -> tuple[LineRow, ...]:
    """Every planned release of a population's runs."""
    rows = connection.execute(_LINES, {"p": population})
    return tuple(_line(row) for row in rows)


def line(connection: Connection, population: str, run: str, key: ReleaseKey, unit: Unit) -> LineRow | None:
    """The line of the run's plan for this label, mechanism and unit, or None."""
    parameters = {"p": population, "r": run, "l": key.label, "m": key.mechanism, "u": str(unit)}
    row = _LINE.one(connection, parameters)
    return None if row is None else _line(row)


def _line(row: Any) -> LineRow:
    each = -(-(spend_of(row.quanta) or 0) // row.steps)
    return LineRow(
        row.run,
        row.label,
        row.mechanism,
        Unit(row.unit),
        spend_of(row.remaining),
        each,
        float(row.sampling),
        row.left,
    )


def release(connection: Connection, population: str, run: str, key: ReleaseKey) -> ReleaseRow | None:
    """The release under this key, or None."""
    parameters = {"p": population, "r": run, "l": key.label, "m": key.mechanism, "s": key.step}
    row = _RELEASE.one(connection, parameters)
    if row is None:
        return None
    return ReleaseRow(
        row.sequence,
        Unit(row.unit),
        spend_of(row.quanta),
        float(row.sampling),
        row.request,
        row.trust,
        row.state,
        row.participants,
        row.reason,
        tuple(json.loads(row.stamps)),
    )


def spends(connection: Connection, population: str) -> Sequence[tuple[Unit, int | None, float, int]]:
    """(unit, quanta, sampling probability, how many releases) over everything ever charged on a population."""
    rows = connection.execute(_SPENDS, {"p": population})
    return [(Unit(unit), spend_of(quanta), float(sampling), count) for unit, quanta, sampling, count in rows]
