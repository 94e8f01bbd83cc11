"""What is declared of a population, once and for all: public maxima, and the data, public part and clients of its name.

A *declaration* is a flat mapping of public facts under readable names, such as `data.evaluation.fraction`: which data
set, which part of it is public, how records are dealt to clients. The first one is recorded; another one is refused.
Under another public part, records that the accounts protect would be scored without noise; under another partition,
a client's name, account, site and cap would belong to other people. Both are bound whatever the unit: an account of
unit `client` may be opened at any time and is charged the past.

| declared                     | how                                                       |
|------------------------------|-----------------------------------------------------------|
| m, records per user, client  | `records_per_user`, `records_per_client`                  |
| everything else              | `declaration`, kept as canonical JSON text                |
| records of the largest client| `declaration[LARGEST_CLIENT]`; never above m              |
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select, update

from dpray.platform.privacy.ledger import schema
from dpray.platform.privacy.ledger.chain import Transaction, canonical
from dpray.platform.privacy.ledger.errors import LedgerError

LARGEST_CLIENT = "cohort.largest_client"
"""Name, in a declaration, of the number of records the largest client holds."""


@dataclass(frozen=True)
class Declared:
    """What is declared of a population; None where nothing is. `declaration`: canonical JSON text."""

    records_per_user: int | None = None
    records_per_client: int | None = None
    declaration: str | None = None

    def cells(self) -> dict[str, Any]:
        """As the table `populations` and the entries keep it."""
        return {key: getattr(self, key) for key in schema.DECLARED}


def text_of(declaration: Mapping[str, Any] | None) -> str | None:
    """The one text of a declaration.

    Errors: LedgerError for anything but plain values under names.
    """
    if declaration is None:
        return None
    for key, value in declaration.items():
        plain = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
        if not isinstance(key, str) or not plain:
            raise LedgerError(
                f"A declaration is a flat mapping of names to texts, finite numbers, true, false or nothing; {key!r} "
                "is not one of these."
            )
    return canonical(dict(declaration))


def declare(transaction: Transaction, name: str, given: Declared, *, create: bool) -> None:
    """Create a population, or check and complete what is declared of it."""
    connection, population = transaction.connection, schema.populations.c
    row = connection.execute(select(schema.populations).where(population.name == name)).one_or_none()
    if row is None:
        if not create:
            raise LedgerError(f"The ledger has no population {name!r}.")
        check(name, Declared(), given)
        connection.execute(insert(schema.populations), {"name": name, **given.cells()})
        transaction.append("population", {"population": name, **given.cells()})
        return
    there = Declared(*(getattr(row, key) for key in schema.DECLARED))
    check(name, there, given, used=used(connection, name))
    new = {k: v for k, v in given.cells().items() if v is not None and v != getattr(there, k)}
    if new:
        connection.execute(update(schema.populations).where(population.name == name).values(new))
        transaction.append("declare", {"population": name, **new})


def used(connection: Connection, name: str) -> bool:
    """Whether anything was ever charged to a population."""
    released = schema.releases.c
    return connection.execute(select(released.sequence).where(released.population == name).limit(1)).first() is not None


def check(name: str, there: Declared, given: Declared, *, used: bool = False) -> None:
    """Refuse what contradicts what is declared already, and a first declaration of data that was `used` without one.

    Errors: LedgerError with both values and what to do.
    """
    for key in ("records_per_user", "records_per_client"):
        declared, value = getattr(there, key), getattr(given, key)
        if value is not None and declared is not None and value != declared:
            raise LedgerError(
                f"Population {name!r} was declared with {key} = {declared}, and {value} was given now: past charges "
                f"were made with the first. Open it with {declared}, or without the number."
            )
    before, now = _facts(there), _facts(given)
    if used and before is None and now is not None:
        raise LedgerError(
            f"Population {name!r} was used before anything was declared of it, so that all its data is protected: a "
            "declaration that comes later could call a part of it public. Go on without one, as before, or use another "
            "population name for other people."
        )
    if before is not None and now is not None and before != now:
        raise LedgerError(
            f"Population {name!r} is bound to what was declared at its first use, and this is another declaration: "
            f"{_differences(before, now)}. Under another public part, records that its accounts protect would be "
            "scored without noise; under another partition, a client's name and account would be other people's. "
            "Declare the same again; or, if these are other people, none of whom is in it, use another population name."
        )
    facts = before if before is not None else now
    largest = None if facts is None else facts.get(LARGEST_CLIENT)
    most = there.records_per_client if there.records_per_client is not None else given.records_per_client
    if most is not None and isinstance(largest, int) and largest > most:
        raise LedgerError(
            f"Population {name!r} has records_per_client = {most} as its declared maximum, and its largest client "
            f"holds {largest} records: an account of unit client would be charged too little. Declare at least "
            f"{largest}, or, once {most} is on record, split the data so that no client holds more."
        )


def _facts(declared: Declared) -> dict[str, Any] | None:
    return None if declared.declaration is None else dict(json.loads(declared.declaration))


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    keys = [*before, *(key for key in now if key not in before)]
    differing = [key for key in keys if before.get(key) != now.get(key) or (key in before) != (key in now)]
    return ", ".join(f"{key} was {_said(before, key)} and is {_said(now, key)}" for key in differing)


def _said(facts: Mapping[str, Any], key: str) -> str:
    return repr(facts[key]) if key in facts else "not declared"
