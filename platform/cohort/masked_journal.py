"""The journal of clients that mask: each has a row of its own for a key, and its message before anybody can open it.

| row of a client         | written, and synced, before             | what it means after a crash                      |
|-------------------------|-----------------------------------------|--------------------------------------------------|
| prepared, no message    | (not synced) its keys are sent          | it has sent nothing made of a message            |
| prepared, with message  | its masked message is sent: others'     | for a committed set it repeats this one, else it |
|                         | shares can open it from then on         | may draw another; what it costs is counted       |
| revealed, with the set  | its shares are sent: point of no return | it repeats this message, for that set            |

Rows and refusals are those of `journal`. A client counts what a key costs it once, with the first masked message: lost
after that, its message may be opened, in a sum, without its help. If it never is, the client has counted too much.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from dpray.platform.cohort.client import IntArray
from dpray.platform.cohort.journal import KEPT_STEPS, Row, SiteJournal, same_participants, same_request
from dpray.platform.cohort.ticket import JournalRefused, Ticket, members_digest


class MaskedJournal(SiteJournal):
    """A site's journal, asked one client at a time but in one transaction."""

    def enter(self, ticket: Ticket, clients: Sequence[str], participants: str) -> dict[str, IntArray]:
        """Note that `clients` take part, each on its own; returns the messages of those that must repeat theirs.

        Args:
            participants: digest of the committed set; of the empty set, if none is.

        Raises:
            JournalRefused: stale, head, cap, conflict (another set or request), or lost (a committed key that this
                journal does not know, or whose message it has dropped).
        """
        wanted, known, own, kept = set(clients), set[str](), set[str](), dict[str, IntArray]()
        with self._transaction(synced=False) as database:
            self._lease(database, ticket, bind=False)
            self._advance(database, ticket)
            if not ticket.committed:
                database.execute(
                    "DELETE FROM messages WHERE series = ? AND step = ? AND state = 'prepared' AND request != ?",
                    (ticket.series, ticket.step, ticket.request),
                )
            for row in self._rows(database, ticket, clients):
                same_request(ticket, row)
                known.update(row.members)
                if wanted.isdisjoint(row.members):
                    continue
                if len(row.members) == 1:
                    own.update(row.members)
                if row.state == "revealed":
                    same_participants(ticket, row, participants)
                    kept[row.members[0]] = self._repeated(database, ticket, row.members)
                elif ticket.committed and (message := _message(database, ticket, row.members)) is not None:
                    kept[row.members[0]] = message
            if ticket.committed and not known.issuperset(clients):
                raise JournalRefused(
                    "lost",
                    f"{ticket.words} was committed, and a client's journal knows nothing of it: it is new, or another "
                    "one. The client joins new releases only.",
                )
            fresh = [client for client in clients if client not in kept and client not in own]
            if fresh:
                self._within_cap(database, ticket, fresh)
            for client in fresh:
                self._note(database, ticket, [client], "prepared")
        return kept

    def keep(self, ticket: Ticket, messages: Mapping[str, IntArray]) -> None:
        """Write messages down, and charge them, before they are sent under their masks; on disk when this returns.

        Raises:
            JournalRefused: stale, cap.
        """
        with self._transaction() as database:
            self._lease(database, ticket)
            rows = self._own_rows(database, ticket, messages)
            paid = {client for client, row in rows.items() if _message(database, ticket, row.members) is not None}
            revealed = {client for client, row in rows.items() if row.state == "revealed"}
            new = [client for client in messages if client not in paid | revealed]
            if new:
                self._spend(database, ticket, new)
            for client, message in messages.items():
                if client not in revealed:
                    self._note(database, ticket, [client], "prepared", None, _bytes(message))

    def open(self, ticket: Ticket, participants: str, messages: Mapping[str, IntArray]) -> None:
        """Write down, for ever, that the messages that were kept are opened in the sum over `participants`.

        Raises:
            JournalRefused: stale, head, conflict (another set or request), again (a message that was not kept).
        """
        with self._transaction() as database:
            self._lease(database, ticket)
            self._advance(database, ticket)
            rows = self._own_rows(database, ticket, messages)
            for client, message in messages.items():
                row = rows.get(client)
                if row is not None and row.state == "revealed":
                    same_request(ticket, row)
                    same_participants(ticket, row, participants)
                    continue
                kept = None if row is None else _message(database, ticket, row.members)
                if kept is None or not np.array_equal(kept, message):
                    raise JournalRefused("again", f"{ticket.words} was made anew meanwhile: prepare it again.")
                self._note(database, ticket, [client], "revealed", participants, _bytes(message))
            database.execute(
                "UPDATE messages SET message = NULL WHERE series = ? AND step <= ? AND message IS NOT NULL",
                (ticket.series, ticket.step - KEPT_STEPS),
            )

    def _own_rows(self, database: sqlite3.Connection, ticket: Ticket, clients: Iterable[str]) -> dict[str, Row]:
        """Rows of single clients under a key."""
        wanted = tuple(clients)
        found = {row.members[0]: row for row in self._rows(database, ticket, wanted) if len(row.members) == 1}
        return {client: found[client] for client in wanted if client in found}

    def _repeated(self, database: sqlite3.Connection, ticket: Ticket, members: tuple[str, ...]) -> IntArray:
        message = _message(database, ticket, members)
        if message is None:
            raise JournalRefused(
                "lost", f"{ticket.words} was revealed too long ago to be repeated, or by its host for several clients."
            )
        return message


def _message(database: sqlite3.Connection, ticket: Ticket, members: tuple[str, ...]) -> IntArray | None:
    """The message of a client's own row; None where there is none, or the row is that of several clients."""
    where = (ticket.series, ticket.step, members_digest(members))
    found = database.execute("SELECT message FROM messages WHERE series = ? AND step = ? AND members = ?", where)
    data = found.fetchone()[0]
    return None if data is None or len(members) > 1 else np.frombuffer(data, dtype="<i8").astype(np.int64)


def _bytes(message: IntArray) -> bytes:
    return np.ascontiguousarray(message, dtype="<i8").tobytes()
