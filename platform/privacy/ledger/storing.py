"""Stored values in the tables: the row a value gets, reading it back with its hash checked, dropping it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray
from sqlalchemy import Connection, insert, select, update

from dpray.platform.privacy.ledger import schema
from dpray.platform.privacy.ledger.chain import Transaction
from dpray.platform.privacy.ledger.errors import LedgerTampered, ValuePruned
from dpray.platform.privacy.ledger.plan import ReleaseKey
from dpray.platform.privacy.ledger.prepared import Prepared
from dpray.platform.privacy.ledger.values import (
    LARGE,
    PRUNED,
    ROW,
    Encoded,
    ValueFiles,
    decode,
    encode,
    in_file,
    value_digest,
)

if TYPE_CHECKING:
    from dpray.platform.privacy.ledger.attempt import Attempt

__all__ = [
    "decode",
    "encode",
    "load",
    "on_disk",
    "place",
    "prefix",
    "prune",
    "record",
    "remove",
    "sweep",
    "text_digest",
]

_V, _S = schema.released_values.c, schema.releases.c
_INSERT = Prepared(insert(schema.released_values))


def text_digest(text: str) -> str:
    """SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def prefix(population: str, run: str) -> str:
    """How the names of a run's value files begin."""
    return text_digest(f"{len(population)}:{population}{run}")[:16] + "-"


def place(files: ValueFiles | None, begin: str, attempt: Attempt, value: Encoded) -> str:
    """Where a value goes. A large one is written and synced now, under a name that only this computation uses."""
    if files is None or not value.large:
        return ROW
    return files.write(f"{begin}{attempt.release}-{attempt.epoch}-{value.digest[:16]}.bin", value.data)


def on_disk(files: ValueFiles | None, where: str) -> bool:
    """Whether the file of a place is there; a new lease removes unfinished ones of older leases."""
    name = in_file(where)
    return name is None or (files is not None and files.there(name))


def record(transaction: Transaction, release: int, value: Encoded, where: str) -> None:
    """Insert the row of a value."""
    _INSERT.run(
        transaction.connection,
        {
            "release": release,
            "dtype": value.dtype,
            "shape": value.shape,
            "size": len(value.data),
            "digest": value.digest,
            "place": where,
            "data": value.data if where == ROW else None,
        },
    )


def load(
    connection: Connection, files: ValueFiles | None, population: str, run: str, key: ReleaseKey
) -> NDArray[Any] | None:
    """The value stored under a key, its hash checked; None if there is none."""
    query = (
        select(schema.released_values)
        .join_from(schema.released_values, schema.releases, _S.sequence == _V.release)
        .where(_S.population == population, _S.run == run)
        .where(_S.label == key.label, _S.mechanism == key.mechanism, _S.step == key.step)
    )
    row = connection.execute(query).one_or_none()
    if row is None:
        return None
    words = f"release {key} of run {run!r}, population {population!r}"
    if row.place == PRUNED:
        raise ValuePruned(f"The value of {words} was dropped for a checkpoint; resume from the checkpoint.")
    data = content(files, row.place, row.data, words)
    if value_digest(row.dtype, row.shape, data) != row.digest:
        raise LedgerTampered(
            f"The stored value of {words} was changed: its bytes no longer have the digest of its row."
        )
    return decode(row.dtype, row.shape, data)


def content(files: ValueFiles | None, where: str, data: bytes | None, words: str) -> bytes:
    """The bytes of a stored value, from row or file; LedgerTampered if they are gone."""
    name = in_file(where)
    if name is None:
        if data is None:
            raise LedgerTampered(f"The stored value of {words} is gone from its row.")
        return bytes(data)
    if files is None:
        raise LedgerTampered(f"The value of {words} is in file {name}, and this ledger was opened without values_dir.")
    return files.read(name)


def prune(
    transaction: Transaction, population: str, run: str, label: str, mechanism: str, before: int
) -> tuple[str, ...]:
    """Drop large values of steps before `before`; returns the places they had, whose files are removed afterwards."""
    connection = transaction.connection
    query = (
        select(_V.release, _V.place)
        .join_from(schema.released_values, schema.releases, _S.sequence == _V.release)
        .where(_S.population == population, _S.run == run, _S.label == label, _S.mechanism == mechanism)
        .where(_S.step < before, _V.size > LARGE, _V.place != PRUNED)
        .order_by(_V.release)
    )
    found = connection.execute(query).all()
    if found:
        numbers = [row.release for row in found]
        connection.execute(
            update(schema.released_values).where(_V.release.in_(numbers)).values(place=PRUNED, data=None)
        )
        transaction.append("prune", {"population": population, "run": run, "releases": numbers})
    return tuple(row.place for row in found)


def remove(files: ValueFiles | None, where: str) -> None:
    """Delete the file of a place, if it has one."""
    name = in_file(where)
    if name is not None and files is not None:
        files.remove(name)


def sweep(connection: Connection, files: ValueFiles | None, population: str, run: str) -> None:
    """Remove a run's files that no row names: values of computations that ended before they were stored.

    A second draw of a noise must not lie about. Called under a new lease, inside its transaction: an older computation
    that is about to store finds its file gone, and stores nothing.
    """
    if files is None:
        return
    begin = prefix(population, run)
    query = select(_V.place).join_from(schema.released_values, schema.releases, _S.sequence == _V.release)
    named = set(connection.execute(query.where(_S.population == population, _S.run == run)).scalars())
    for name in files.starting_with(begin):
        if f"file:{name}" not in named:
            files.remove(name)
