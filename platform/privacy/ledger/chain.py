"""The hash chain: what an entry is, and how the next one is bound to all before it.

Notation
    sequence   1, 2, 3, … without gaps
    previous   digest of the entry before; 64 zeros for the first
    digest     SHA-256 of the JSON list [sequence, at, kind, body, previous]
    Head       (sequence, digest) of the last entry: whoever keeps one elsewhere (an *anchor*) can tell a ledger that
               went on from one that was cut, rewritten or restored from an old copy

Guarantee: an edited, deleted, inserted or reordered entry changes a digest or leaves a gap. A writer who can recompute
the whole chain is found only by an anchor kept where that writer cannot write.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, bindparam, func, insert, select, update

from dpray.platform.privacy.ledger import schema
from dpray.platform.privacy.ledger.errors import LedgerTampered
from dpray.platform.privacy.ledger.prepared import Prepared

ROOT = "0" * 64


@dataclass(frozen=True)
class Head:
    """The last entry of a ledger at some moment: its number and its digest (64 hexadecimal digits)."""

    sequence: int
    digest: str


@dataclass(frozen=True)
class Entry:
    """One thing that happened, as it stands in the chain. `at` is UTC, ISO 8601, in seconds."""

    sequence: int
    at: str
    kind: str
    body: Mapping[str, Any]
    digest: str


def canonical(value: object) -> str:
    """The one JSON text of a value: sorted keys, no spaces, ASCII; NaN and infinities are refused (ValueError)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def entry_digest(sequence: int, at: str, kind: str, body: str, previous: str) -> str:
    """SHA-256 of an entry, bound to the one before, in hexadecimal."""
    return hashlib.sha256(json.dumps([sequence, at, kind, body, previous]).encode()).hexdigest()


_COLUMNS = ("sequence", "at", "kind", "body", "previous", "digest")
_LOCKED_HEAD = Prepared(select(schema.head.c.sequence, schema.head.c.digest).with_for_update(), "sequence", "digest")
_HEAD = Prepared(select(schema.head.c.sequence, schema.head.c.digest), "sequence", "digest")
_LAST = Prepared(
    select(schema.entries).where(
        schema.entries.c.sequence == select(func.max(schema.entries.c.sequence)).scalar_subquery()
    ),
    *_COLUMNS,
)
_INSERT = Prepared(insert(schema.entries))
_MOVE = Prepared(update(schema.head).values(sequence=bindparam("sequence"), digest=bindparam("digest")))


def current_head(connection: Connection) -> Head:
    """The head row as this transaction sees it, unlocked."""
    row = _HEAD.one(connection, {})
    if row is None:
        raise LedgerTampered(
            "The ledger's head row is gone. Run `dpray ledger verify` and restore a copy that verifies."
        )
    return Head(row.sequence, row.digest)


class Transaction:
    """One write to the ledger: the head locked and checked against the last entry, entries appended behind it.

    Errors: LedgerTampered if the last entry is not the one the head names, or its digest is not that of its content.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.head = self._start = self._checked()

    def _checked(self) -> Head:
        row = _LOCKED_HEAD.one(self.connection, {})
        last = _LAST.one(self.connection, {})
        if row is None or last is None:
            raise LedgerTampered("The ledger has lost its head or its entries: nothing is charged on it.")
        if (row.sequence, row.digest) != (last.sequence, last.digest):
            raise LedgerTampered(
                f"The ledger's head names entry {row.sequence}, its last entry is {last.sequence} with another digest: "
                "nothing is charged on a damaged ledger. Run `dpray ledger verify`."
            )
        if entry_digest(last.sequence, last.at, last.kind, last.body, last.previous) != last.digest:
            raise LedgerTampered(
                f"Entry {last.sequence} of the ledger was changed after it was written: nothing is charged on a "
                "tampered ledger. Run `dpray ledger verify`."
            )
        return Head(row.sequence, row.digest)

    def append(self, kind: str, body: Mapping[str, Any]) -> Head:
        """Add one entry; the head row moves when the transaction ends."""
        sequence, at, text = self.head.sequence + 1, datetime.now(UTC).isoformat(timespec="seconds"), canonical(body)
        digest = entry_digest(sequence, at, kind, text, self.head.digest)
        _INSERT.run(
            self.connection,
            dict(zip(_COLUMNS, (sequence, at, kind, text, self.head.digest, digest), strict=True)),
        )
        self.head = Head(sequence, digest)
        return self.head

    def finish(self) -> None:
        """Point the head row at the last entry appended; called once, before the commit."""
        if self.head != self._start:
            _MOVE.run(self.connection, {"sequence": self.head.sequence, "digest": self.head.digest})
