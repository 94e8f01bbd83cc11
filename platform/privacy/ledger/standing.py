"""Where a charged release and its ledger stand: what whoever computes a release asks for right before, in one read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import Connection, bindparam, select

from dpray.platform.privacy.ledger import rows, schema
from dpray.platform.privacy.ledger.chain import Head, current_head
from dpray.platform.privacy.ledger.errors import KeyConflict, LedgerError, LedgerTampered
from dpray.platform.privacy.ledger.prepared import Prepared

if TYPE_CHECKING:
    from dpray.platform.privacy.ledger.attempt import Attempt

_DIGEST = Prepared(select(schema.entries.c.digest).where(schema.entries.c.sequence == bindparam("sequence")), "digest")


@dataclass(frozen=True)
class Standing:
    """One snapshot.

    Attributes:
        state: of the release: charged, committed, stored or lost.
        reason: why it is lost, if it is.
        stamps: recorded with it so far.
        records_per_client: declared public maximum m of the population; None: not declared.
        head: end of the chain.
        ledger: digest of its first entry, which names the ledger for ever: it holds a random number.
        lineage: digests of the entries asked for, by number, as *this* ledger has them; entries it lacks are left out.
    """

    state: str
    reason: str | None
    stamps: tuple[str, ...]
    records_per_client: int | None
    head: Head
    ledger: str
    lineage: Mapping[int, str]


def read(connection: Connection, attempt: Attempt, passed: Iterable[int]) -> Standing:
    """Read it. Errors: LedgerError where the attempt was not charged, KeyConflict where it was charged otherwise."""
    run = attempt.run
    name, population = run.name, run.population.name
    found = rows.release(connection, population, name, attempt.key)
    words = f"Release {attempt.key} of run {name!r}, population {population!r},"
    if found is None or found.sequence != attempt.release:
        raise LedgerError(f"{words} was not charged for this attempt: charge it first.")
    if (found.unit, found.quanta, found.trust) != (attempt.unit, attempt.quanta, attempt.trust):
        raise KeyConflict(f"{words} was charged for another unit, spend or trust mode than this attempt says.")
    return Standing(
        found.state,
        found.reason,
        found.stamps,
        rows.run(connection, population, name).maxima.records_per_client,
        current_head(connection),
        *descent(connection, passed),
    )


def descent(connection: Connection, passed: Iterable[int]) -> tuple[str, dict[int, str]]:
    """(digest of the first entry, digests of some entries by number): what tells this ledger from any other."""
    first = _DIGEST.one(connection, {"sequence": 1})
    if first is None:
        raise LedgerTampered("The ledger has lost its first entry: nothing is released on it.")
    found = {sequence: _DIGEST.one(connection, {"sequence": sequence}) for sequence in sorted(set(passed))}
    return first.digest, {sequence: row.digest for sequence, row in found.items() if row is not None}
