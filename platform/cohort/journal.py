"""The journal of a site: what its clients must remember whoever dies, and what they refuse because of it.

| table    | what a client remembers                                                                      |
|----------|----------------------------------------------------------------------------------------------|
| meta     | which ledger it belongs to, for ever, and the newest head of it (its *anchor*): another       |
|          | ledger, an older copy, and a copy that went on otherwise are refused; the smallest cap agreed |
|          | to, and the populations a site answers for (both below)                                       |
| epochs   | newest lease of every run: an older one (a zombie driver) is refused                          |
| clients  | μ² spent so far in quanta, against the site's own cap                                         |
| groups   | lists of clients that answered together, by digest                                            |
| messages | per key and group: prepared, revealed (with the message, byte for byte) or contributed        |

**The point of no return.** A message is seen by nobody until `reveal` has committed its row, synced to disk, with key,
participant set, noise and the message. From then on the key is answered with these bytes for this set, or refused.

| held for a committed key     | what its client does                                                                 |
|------------------------------|--------------------------------------------------------------------------------------|
| a revealed message           | repeats it, for the same participants and request only                               |
| `prepared`, nothing revealed | has shown nothing, the row comes before the message: draws one for the committed set |
| nothing                      | not the journal that took part: refuses (lost); joins new keys only                  |

So preparing leaves a durable row, and its noise share: a cohort that counts on another number of clients now cannot mix
old shares with new ones. What the rule cannot see is a journal restored from a copy made between preparing and
revealing; that needs the site to be untrue to itself.

**The cap** comes from the recipe that asks, and is the site's from then on: the smallest one that a host was ever
started with holds, and a later recipe with a larger one, or with none, does not lift it. To lift it is an act of the
site: with no host running, `sqlite3 journal.db "DELETE FROM meta WHERE name = 'cap'"`.

**One site, one count.** A site's records are of the same people under whatever name of a population they are asked for.
So a site has one journal, whatever the population is called, and with it one count and one cap, and it answers for the
first population that it was asked for only: the same people as `Patients`, who were `patients` before, would have their
budget a second time in the ledger. That a site really holds other people under another name, only its operator can say,
where the journal is; count and cap stay one:
`sqlite3 journal.db "UPDATE meta SET value = json_insert(value, '$[#]', 'staff') WHERE name = 'populations'"`.
A pool's clients are simulated, and populations of one simulation may share a journal.
This is so under one `state_dir` and one name of the site: whoever writes the driver's code chooses both, and with
others the site's records have another journal. A site that does not trust that code keeps it from its machine.

Hosts of one node share the file; every method is one transaction (see `site_file`).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import numpy as np

from dpray.platform.cohort.client import IntArray
from dpray.platform.cohort.site_file import SiteFile
from dpray.platform.cohort.ticket import JournalRefused, LedgerEnd, Stored, Ticket, members_digest
from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.figures import significant
from dpray.platform.privacy.ledger import Head

KEPT_STEPS = 2
"""Messages of so many steps of a series are kept; of older ones, whose values the ledger has, only the row is."""


class SiteJournal(SiteFile):
    """The journal in `path`; made, with mode 0600, if it is not there.

    Args:
        path: the file; its folder is made with mode 0700.
        cap: what each client of this site spends at most over its life, counted per release at μ² of one record
            (the finest unit: a client-level vote counts in full); None: none but what was agreed to before. The
            smallest one ever given holds.
        site: whether it is a real site's, which answers for one population.
    """

    def __init__(self, path: Path, cap: Budget | None = None, *, site: bool = False) -> None:
        super().__init__(path)
        self._site, self._cap = site, cap
        with self._transaction() as database:
            if not site or _populations(database) is None:
                self._agree(database)
        self._groups: dict[str, tuple[str, ...]] = {}

    def spent(self, client: str) -> int | None:
        """μ² in quanta this client has spent by its own count; None: infinitely much."""
        row = self._database.execute("SELECT spent FROM clients WHERE client = ?", (client,)).fetchone()
        return 0 if row is None else _quanta(row[0])

    def anchor(self) -> Head | None:
        """Newest ledger head these clients have seen."""
        row = self._database.execute("SELECT value FROM meta WHERE name = 'anchor'").fetchone()
        return None if row is None else Head(*json.loads(row[0]))

    def advance(self, end: LedgerEnd) -> None:
        """Remember that the ledger has come this far: a copy that has not is refused from now on. Synced to disk.

        Raises:
            JournalRefused: head, ledger.
        """
        with self._transaction() as database:
            self._advance(database, end)

    # sums

    def prepare(self, ticket: Ticket, members: Sequence[str]) -> tuple[str, ...]:
        """Note that `members` take part; returns those who have revealed nothing yet and need a message drawn.

        The note is synced with the next transaction: a machine that loses power before that has lost a release at
        worst, which it then refuses to repeat.

        Raises:
            JournalRefused: stale, head, cap, conflict, or lost (a committed key of which this journal knows nothing).
        """
        with self._transaction(synced=False) as database:
            self._lease(database, ticket, bind=False)
            self._advance(database, ticket)
            open_members, evidence = list(members), set[str]()
            if not ticket.committed:  # then no earlier preparation has come to anything
                database.execute(
                    "DELETE FROM messages WHERE series = ? AND step = ? AND state = 'prepared' AND request != ?",
                    (ticket.series, ticket.step, ticket.request),
                )
            for row in self._rows(database, ticket, members):
                same_request(ticket, row)
                evidence.update(row.members)
                if row.state == "revealed":
                    gone = set(row.members)
                    open_members = [client for client in open_members if client not in gone]
            if ticket.committed and not evidence.issuperset(open_members):
                raise JournalRefused(
                    "lost",
                    f"{ticket.words} was committed, and a client's journal knows nothing of it: it is new, or another "
                    "one. The client joins new releases only.",
                )
            if open_members:
                self._within_cap(database, ticket, open_members)
                self._note(database, ticket, open_members, "prepared")
        return tuple(open_members)

    def reveal(self, ticket: Ticket, participants: str, members: Sequence[str], message: IntArray) -> None:
        """Write down a message that is about to be seen: durable on return, charged to its clients, never changed.

        Args:
            participants: digest of the committed set (`members_digest`).
            members: the clients whose messages `message` adds up; empty: nothing new to write.
            message: (d,) int64.

        Raises:
            JournalRefused: stale, head, cap, conflict; `again` if one of the members has revealed meanwhile.
        """
        with self._transaction() as database:
            self._lease(database, ticket)
            self._advance(database, ticket)
            taken = set[str]()
            for row in self._rows(database, ticket, members):
                if row.state == "prepared":
                    continue
                same_request(ticket, row)
                same_participants(ticket, row, participants)
                taken.update(row.members)
            if not members:
                return
            if not taken.isdisjoint(members):
                raise JournalRefused("again", f"{ticket.words} was revealed meanwhile: prepare it again.")
            self._spend(database, ticket, members)
            data = np.ascontiguousarray(message, dtype="<i8").tobytes()
            self._note(database, ticket, members, "revealed", participants, data)
            database.execute(
                "UPDATE messages SET message = NULL WHERE series = ? AND step <= ? AND message IS NOT NULL",
                (ticket.series, ticket.step - KEPT_STEPS),
            )

    def revealed(self, ticket: Ticket, participants: str, of: Sequence[str]) -> tuple[Stored, ...]:
        """The messages revealed under this key whose first member (by name) is among `of`.

        Several hosts share a journal and may be laid out anew after a restart; by this rule each message is sent once.

        Raises:
            JournalRefused: conflict (another set or request), lost (the message was dropped long ago).
        """
        mine, found = set(of), list[Stored]()
        for row in self._rows(self._database, ticket, of):
            if row.state != "revealed" or min(row.members) not in mine:
                continue
            same_request(ticket, row)
            same_participants(ticket, row, participants)
            where = (ticket.series, ticket.step, members_digest(row.members))
            data = self._database.execute(
                "SELECT message FROM messages WHERE series = ? AND step = ? AND members = ?", where
            ).fetchone()[0]
            if data is None:
                raise JournalRefused("lost", f"{ticket.words} was revealed too long ago to be repeated.")
            found.append(Stored(row.members, np.frombuffer(data, dtype="<i8").astype(np.int64)))
        return tuple(found)

    def contribute(self, ticket: Ticket, members: Sequence[str]) -> None:
        """Note an un-noised contribution to a trusted server, charged once per key and client.

        Raises:
            JournalRefused: stale, head, cap, conflict.
        """
        with self._transaction() as database:
            self._lease(database, ticket)
            self._advance(database, ticket)
            paid = set[str]()
            for row in self._rows(database, ticket, members):
                if row.state == "prepared":
                    continue
                same_request(ticket, row)
                paid.update(row.members)
            new = [client for client in members if client not in paid]
            if new:
                self._spend(database, ticket, new)
                self._note(database, ticket, members, "contributed")

    def cap(self) -> Budget | None:
        """The smallest cap ever agreed to."""
        return _agreed(self._database)

    def _agree(self, database: sqlite3.Connection) -> None:
        cap, before = self._cap, _agreed(database)
        if cap is None or cap.quanta is None:
            return
        if before is None or before.quanta is None or cap.quanta < before.quanta:
            text = json.dumps([cap.epsilon, cap.delta])
            database.execute("INSERT OR REPLACE INTO meta VALUES ('cap', ?)", (text,))

    # inside a transaction

    def _lease(self, database: sqlite3.Connection, ticket: Ticket, *, bind: bool = True) -> None:
        """Follow the newest lease of a run, of a population that these clients answer for.

        Without `bind` a site that has answered for nobody is left so: another one may refuse yet, and nothing was seen.
        """
        if self._site and (bind or _populations(database) is not None):  # what is refused agrees to nothing
            _answers_for(database, ticket.population)
            self._agree(database)
        row = database.execute("SELECT epoch FROM epochs WHERE run = ?", (ticket.lease,)).fetchone()
        if row is not None and ticket.epoch < row[0]:
            raise JournalRefused(
                "stale",
                f"Run {ticket.run!r} was asked under lease {ticket.epoch}, and its clients have seen lease {row[0]}: "
                "another process has opened the run since. End this one.",
            )
        if row is None or row[0] != ticket.epoch:
            database.execute("INSERT OR REPLACE INTO epochs VALUES (?, ?)", (ticket.lease, ticket.epoch))

    def _advance(self, database: sqlite3.Connection, ticket: Ticket | LedgerEnd) -> None:
        """Go on with the ledger the clients know: the first one they met, and a continuation of what they have seen."""
        meta = dict(database.execute("SELECT name, value FROM meta WHERE name IN ('ledger', 'anchor')"))
        if meta.get("ledger", ticket.ledger) != ticket.ledger:
            raise JournalRefused(
                "ledger",
                "This is another ledger than the one these clients belong to, which counts what they have spent. Use "
                "that one, or a state folder that belongs to this ledger.",
            )
        head, seen = ticket.head, Head(*json.loads(meta["anchor"])) if "anchor" in meta else None
        if seen is not None:
            self._descends(ticket, seen)
        if "ledger" not in meta:
            database.execute("INSERT INTO meta VALUES ('ledger', ?)", (ticket.ledger,))
        if head != seen:
            text = json.dumps([head.sequence, head.digest])
            database.execute("INSERT OR REPLACE INTO meta VALUES ('anchor', ?)", (text,))

    def _descends(self, ticket: Ticket | LedgerEnd, seen: Head) -> None:
        head = ticket.head
        if head.sequence < seen.sequence:
            raise JournalRefused(
                "head",
                f"The ledger ends at entry {head.sequence}, and these clients have seen entry {seen.sequence}: it is "
                "an older copy. Use the newest one.",
                seen.sequence,
            )
        there = head.digest if head.sequence == seen.sequence else ticket.lineage.get(seen.sequence)
        if there is None:
            raise JournalRefused(
                "head",
                f"These clients have seen entry {seen.sequence} of the ledger last, and were not told what it is now: "
                "without that a copy that went on otherwise could not be told from the ledger.",
                seen.sequence,
            )
        if there != seen.digest:
            raise JournalRefused(
                "ledger",
                f"Entry {seen.sequence} of the ledger is not the one these clients have seen: it was rewritten, or "
                "restored from an older copy that went on otherwise. What they have released since is missing in it. "
                "Use the right one.",
            )

    def _within_cap(self, database: sqlite3.Connection, ticket: Ticket, members: Sequence[str]) -> None:
        cap = _agreed(database)
        if cap is not None:
            for spent in _spent(database, members).values():
                _afford(ticket, spent, cap)

    def _spend(self, database: sqlite3.Connection, ticket: Ticket, members: Sequence[str]) -> None:
        # Most clients of a group have spent the same: each amount is added up and compared once.
        spent, totals, cap = _spent(database, members), dict[str, str](), _agreed(database)
        for amount in set(spent.values()):
            totals[amount] = _afford(ticket, amount, cap)
        rows = [(totals[spent[client]], client) for client in members]
        database.executemany("UPDATE clients SET spent = ? WHERE client = ?", rows)

    def _note(
        self,
        database: sqlite3.Connection,
        ticket: Ticket,
        members: Sequence[str],
        state: str,
        participants: str | None = None,
        message: bytes | None = None,
    ) -> None:
        digest = members_digest(tuple(members))
        database.execute("INSERT OR IGNORE INTO groups VALUES (?, ?)", (digest, json.dumps(list(members))))
        quanta = "inf" if ticket.quanta is None else str(ticket.quanta)
        database.execute(
            "INSERT OR REPLACE INTO messages VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (ticket.series, ticket.step, digest, state, ticket.request, ticket.share, quanta, participants, message),
        )

    def _rows(self, database: sqlite3.Connection, ticket: Ticket, members: Sequence[str]) -> list[Row]:
        """Rows of a key. The members of the group that asks need not be looked up."""
        self._groups.setdefault(members_digest(tuple(members)), tuple(members))
        query = "SELECT members, state, request, participants FROM messages WHERE series = ? AND step = ?"
        found = []
        for digest, *cells in database.execute(query, (ticket.series, ticket.step)).fetchall():
            if digest not in self._groups:
                row = database.execute("SELECT members FROM groups WHERE digest = ?", (digest,)).fetchone()
                self._groups[digest] = tuple(json.loads(row[0]))
            found.append(Row(self._groups[digest], *cells))
        return found


@dataclass(frozen=True)
class Row:
    """What a group of clients has under a key, without the message."""

    members: tuple[str, ...]
    state: str
    request: str
    participants: str | None


def same_request(ticket: Ticket, row: Row) -> None:
    """Refuse a key that was answered for another request."""
    if row.request != ticket.request:
        raise JournalRefused(
            "lost" if ticket.committed else "conflict",
            f"{ticket.words} was answered for another request (query, noise, number of clients counted on): a key is "
            "used for one request only.",
        )


def same_participants(ticket: Ticket, row: Row, participants: str) -> None:
    """Refuse a key that was revealed for another set (digests)."""
    if row.participants != participants:
        raise JournalRefused(
            "conflict",
            f"{ticket.words} was revealed for one set of participants and asked for another: it is repeated over the "
            "first set, byte for byte, or not at all.",
        )


def _answers_for(database: sqlite3.Connection, population: str) -> None:
    """Refuse another population than the first, or than those the site's operator has added."""
    known = _populations(database)
    if known is None:
        database.execute("INSERT INTO meta VALUES ('populations', ?)", (json.dumps([population]),))
    elif population not in known:
        raise JournalRefused(
            "population",
            f"A site that answers for the population {known[0]!r} was asked for {population!r}: its records are of the "
            "same people under any name, and their budget would be spent a second time. Use the first name; or, if "
            "the site holds other people under the second, have its operator allow it (see `dpray.platform.cohort."
            "journal`).",
        )


def _populations(database: sqlite3.Connection) -> list[str] | None:
    row = database.execute("SELECT value FROM meta WHERE name = 'populations'").fetchone()
    return None if row is None else list(json.loads(row[0]))


def _spent(database: sqlite3.Connection, members: Sequence[str]) -> dict[str, str]:
    if len(members) == 1:
        found = dict(database.execute("SELECT client, spent FROM clients WHERE client = ?", tuple(members)))
    else:
        found = dict(database.execute("SELECT client, spent FROM clients"))
    return {client: found[client] for client in members}


def _agreed(database: sqlite3.Connection) -> Budget | None:
    row = database.execute("SELECT value FROM meta WHERE name = 'cap'").fetchone()
    return None if row is None else _budget(row[0])


@lru_cache(maxsize=8)
def _budget(text: str) -> Budget:
    return Budget(*json.loads(text))


def _afford(ticket: Ticket, spent: str, cap: Budget | None) -> str:
    """What a client has spent afterwards; refused beyond its cap."""
    total = None if ticket.quanta is None or spent == "inf" else int(spent) + ticket.quanta
    limit = None if cap is None else cap.quanta
    if limit is not None and (total is None or total > limit):
        asked = "all of it and more" if ticket.quanta is None else f"{_part(ticket.quanta, limit)} of it"
        before = "everything" if spent == "inf" else _part(int(spent), limit)
        raise JournalRefused(
            "cap",
            f"{ticket.words} asks a client for more than its own cap ({cap}): {before} of its μ² is spent, and {asked} "
            "was asked.",
        )
    return "inf" if total is None else str(total)


def _part(quanta: int, limit: int) -> str:
    return significant(Fraction(quanta, limit), 3)


def _quanta(text: str) -> int | None:
    return None if text == "inf" else int(text)
