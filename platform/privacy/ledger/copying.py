"""Copies of a ledger: a backup is an SQLite ledger of its own, whatever the ledger lives in.

| from | to | how |
|---|---|---|
| SQLite, PostgreSQL | a new file | every row of one snapshot; files of large values beside it |
| a backup | SQLite, or an empty PostgreSQL database | the same, the other way round |

A ledger may be copied while others write to it: the copy is that of one moment. It verifies as the ledger does, entry
by entry, and has its identity.

*What a backup cannot do.* Whatever was released after it was made is known to others and missing from it. A restored
older copy would let those releases be paid a second time, so anchors (heads of the chain that clients' journals and
MLflow keep) refuse it: see `verify`.

*The window that remains.* Clients see the head when they are asked for a release, after its charge; they see that its
value was stored with the next request, or when `Cohort.anchor` is called, which `dpray run` does after the search and
after the training. A copy made between the charge and the store of the last release is refused once that was done, by
every client that was reached. Code of one's own that does not call it, or whose process ends between store and call,
leaves that one release open to a restored copy: its noise would be drawn again, for a charge made once.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path

from sqlalchemy import Connection, delete, func, insert, select

from dpray.platform.privacy.ledger import schema
from dpray.platform.privacy.ledger.chain import Head, Transaction
from dpray.platform.privacy.ledger.errors import LedgerError, LedgerTampered
from dpray.platform.privacy.ledger.ledger import Ledger
from dpray.platform.privacy.ledger.storage import Storage, sync_folder
from dpray.platform.privacy.ledger.values import in_file

_SQLITE, _MANY = "sqlite:///", 500


def back_up(url: str, place: Path) -> Head:
    """Copy the ledger at `url` into the new file `place` (0600, durable); returns the end of its chain.

    Errors: LedgerError for a file that is there, or no ledger; LedgerTampered for a ledger that does not verify.
    """
    with closing(Ledger(url, create=False)) as ledger:
        _whole(ledger, "Nothing was copied: a backup of it would replace a good one.")
    return _to_file(url, place)


def restore(backup: Path, url: str, anchors: Iterable[Head] = ()) -> Head:
    """Make the ledger at `url` of a backup; returns the end of its chain.

    Args:
        backup: file of `back_up`; it stays as it is.
        url: where no ledger with anything in it may be.
        anchors: heads kept elsewhere: an older copy than they have seen is refused.

    Errors: LedgerError for a place that is taken, or value files that PostgreSQL has no folder for; LedgerTampered for
    a backup that does not verify or is older than an anchor. Nothing is changed then.
    """
    given = _SQLITE + str(backup.expanduser().absolute())
    heads = tuple(anchors)
    with closing(Ledger(given, create=False)) as ledger:
        _whole(ledger, "It was not restored.")
        problems = ledger.verify(heads) if heads else ()
        if problems:
            raise LedgerTampered(
                f"{' '.join(problems)} The backup {backup} is not up to what its anchors have seen, and was not "
                "restored: budgets that were spent since would be spent again. Restore a newer one. If there is "
                "none, what is left of these budgets cannot be known: release nothing more on these people."
            )
    if url.startswith(_SQLITE):
        return _to_file(given, Path(url.removeprefix(_SQLITE)))
    with closing(Storage(given, create=False)) as source:
        if source.read(_has_files):
            raise LedgerError(
                f"The backup {backup} has values in files, which a ledger in PostgreSQL has no folder for: restore it "
                "to SQLite."
            )
        with closing(Storage(url, create=True)) as target:
            _copy(source, target)
            return _head(target)


def _to_file(url: str, place: Path) -> Head:
    """A new SQLite ledger under its final name only when it is whole and on disk."""
    place = place.expanduser().absolute()
    if place.exists():
        raise LedgerError(
            f"{place} is there already, and a ledger is never written over: name a new file, or move that one away."
        )
    if not place.parent.is_dir():
        raise LedgerError(f"The folder {place.parent} does not exist: create it, or name another.")
    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    values, kept = Path(f"{partial}.values"), Path(f"{place}.values")
    if kept.exists():
        raise LedgerError(f"{kept} is there already, the value files of another ledger: move it away.")
    try:
        with closing(Storage(url, create=False)) as source:
            with closing(Storage(_SQLITE + str(partial), create=True)) as target:
                _copy(source, target)
                head = _head(target)
            if source.path is not None and (folder := Path(f"{source.path}.values")).is_dir():
                shutil.copytree(folder, values)
                _synced(values)
        if values.is_dir():
            values.rename(kept)
        os.link(partial, place)  # fails if somebody else has made it meanwhile
    finally:
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                partial.with_name(partial.name + suffix).unlink()
        shutil.rmtree(values, ignore_errors=True)
    sync_folder(place.parent)
    return head


def _copy(source: Storage, target: Storage) -> None:
    """Every row of one snapshot of `source` into `target`, which holds its first entry only; all of it or nothing."""

    def fill(transaction: Transaction) -> None:
        connection = transaction.connection
        if connection.execute(select(func.count()).select_from(schema.entries)).scalar_one() != 1:
            raise LedgerError(f"{target.shown} holds a ledger already, and it is never written over: name another.")
        for table in (schema.entries, schema.head):
            connection.execute(delete(table))
        source.read(lambda rows: _rows(rows, connection))

    target.write(fill)


def _rows(source: Connection, target: Connection) -> None:
    for table in schema.metadata.sorted_tables:
        found = source.execution_options(yield_per=_MANY).execute(select(table)).mappings()
        for part in found.partitions(_MANY):
            target.execute(insert(table), [dict(row) for row in part])


def _has_files(connection: Connection) -> bool:
    places = connection.execute(select(schema.released_values.c.place)).scalars()
    return any(in_file(place) is not None for place in places)


def _head(storage: Storage) -> Head:
    row = storage.read(lambda connection: connection.execute(select(schema.head)).one())
    return Head(row.sequence, row.digest)


def _whole(ledger: Ledger, consequence: str) -> None:
    problems = ledger.verify()
    if problems:
        raise LedgerTampered(f"The ledger {ledger.url} does not verify: {' '.join(problems[:3])} {consequence}")


def _synced(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)
