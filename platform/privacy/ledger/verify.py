"""Is the ledger what it wrote? The chain link by link, every table cell by cell, every value byte for byte.

Finds: an edited, deleted, inserted or reordered entry; an edited, deleted or inserted row of any other table; a
changed or missing stored value or value file; and, given an anchor (a `Head` kept elsewhere), a chain that was cut,
rewritten as a whole, or restored from an old copy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from sqlalchemy import Connection, select

from dpray.platform.privacy.ledger import schema, storing
from dpray.platform.privacy.ledger.chain import ROOT, Head, entry_digest
from dpray.platform.privacy.ledger.errors import LedgerError, LedgerTampered
from dpray.platform.privacy.ledger.replay import UNCOMPARED, Replay, primary_key
from dpray.platform.privacy.ledger.values import PRUNED, ValueFiles, in_file, value_digest


def problems(
    connection: Connection, files: ValueFiles | None, *, anchors: Iterable[Head] = (), thorough: bool = True
) -> tuple[str, ...]:
    """What is wrong with a ledger, in sentences; nothing if it is whole.

    Args:
        anchors: heads of this ledger kept elsewhere (clients' journals, a tracking server).
        thorough: hash the value files too; otherwise only their presence and size are looked at.
    """
    replay, found, digests = Replay(), list[str](), dict[int, str]()
    found.extend(_chain(connection, replay, digests))
    found.extend(_composed(replay))
    found.extend(replay.problems)
    found.extend(_tables(connection, replay))
    found.extend(_values(connection, files, replay, thorough))
    found.extend(_anchored(anchors, digests))
    return tuple(found)


def _chain(connection: Connection, replay: Replay, digests: dict[int, str]) -> Iterator[str]:
    previous, last = ROOT, 0
    columns = schema.entries.c
    query = select(*columns).order_by(columns.sequence)
    for sequence, at, kind, body, before, digest in connection.execute(query):
        if sequence != last + 1:
            yield (
                f"Entries {last + 1} to {sequence - 1} are missing."
                if sequence > last
                else f"Entry {sequence} is out of place."
            )
        if before != previous:
            yield f"Entry {sequence} does not follow the entry before it: one of them was changed, inserted or moved."
        if entry_digest(sequence, at, kind, body, before) != digest:
            yield f"Entry {sequence} ({kind}) was changed after it was written."
        previous, last = digest, sequence
        digests[sequence] = digest
        try:
            replay.apply(sequence, kind, json.loads(body))
        except (KeyError, ValueError, TypeError, AttributeError, LedgerError) as error:
            yield f"Entry {sequence} ({kind}) does not fit the entries before it ({type(error).__name__}: {error})."
    heads = [(row.id, row.sequence, row.digest) for row in connection.execute(select(schema.head))]
    if heads != [(1, last, previous)]:
        named = ", ".join(str(sequence) for _, sequence, _ in heads) or "nothing"
        yield (
            f"The head names entry {named}; the chain ends at entry {last}: entries were removed or added, "
            "or the head was changed."
        )


def _composed(replay: Replay) -> Iterator[str]:
    try:
        replay.finish()
    except (KeyError, ValueError, TypeError, LedgerError) as error:
        yield f"Accounts of kind 'pld' cannot be composed from the entries ({type(error).__name__}: {error})."


def _tables(connection: Connection, replay: Replay) -> Iterator[str]:
    for table in schema.PROJECTIONS:
        expected, keys = replay.rows[table.name], primary_key(table)
        skipped = UNCOMPARED.get(table.name, frozenset())
        compared = [column for column in table.columns if column.name not in skipped]
        names = [column.name for column in compared]
        seen = set()
        for row in connection.execute(select(*compared)):
            cells = dict(zip(names, row, strict=True))
            key = tuple(cells[name] for name in keys)
            seen.add(key)
            should = expected.get(key)
            if should is None:
                yield f"Table {table.name} has a row {key} that no entry explains."
                continue
            for name in names:
                if cells[name] != should[name]:
                    yield (
                        f"Table {table.name}, row {key}: {name} is {cells[name]!r}, and the entries say "
                        f"{should[name]!r}."
                    )
        for key in expected.keys() - seen:
            yield f"Table {table.name} has lost the row {key}."


def _values(connection: Connection, files: ValueFiles | None, replay: Replay, thorough: bool) -> Iterator[str]:
    release = schema.releases.c
    query = select(release.sequence, release.participants)
    for sequence, participants in connection.execute(query):
        digest = None if participants is None else storing.text_digest(participants)
        if digest != replay.participants.get(sequence):
            yield f"Table releases, row {(sequence,)}: participants are not the set the release was committed to."
    for row in connection.execute(select(schema.released_values).order_by(schema.released_values.c.release)):
        yield from _value(row, files, thorough)


def _value(row: Any, files: ValueFiles | None, thorough: bool) -> Iterator[str]:
    words = f"release {row.release}"
    name = in_file(row.place)
    if (name is not None or row.place == PRUNED) and row.data is not None:
        yield f"Table released_values, row {(row.release,)}: data are there that belong to {row.place}."
    if row.place == PRUNED:
        return
    if name is not None and files is not None and not thorough:
        size = files.size(name)
        if size is None:
            yield f"The value file of {words} is gone: {files.folder / name}."
        elif size != row.size:
            yield f"The value file of {words} has {size} bytes instead of {row.size}: {files.folder / name}."
        return
    try:
        data = storing.content(files, row.place, row.data, words)
    except LedgerTampered as error:
        yield str(error)
        return
    if value_digest(row.dtype, row.shape, data) != row.digest:
        yield f"The stored value of {words} was changed: its bytes do not have the digest that was recorded."


def _anchored(anchors: Iterable[Head], digests: dict[int, str]) -> Iterator[str]:
    last = max(digests, default=0)
    for anchor in anchors:
        if anchor.sequence > last:
            yield (
                f"An anchor names entry {anchor.sequence}, and the ledger ends at entry {last}: it was cut, or an old "
                "copy was restored."
            )
        elif digests.get(anchor.sequence) != anchor.digest:
            yield (
                f"Entry {anchor.sequence} is not the one an anchor was taken of: the ledger was rewritten, or went on "
                "from an old copy, or is another one."
            )
