"""Watches a run from outside: a process of its own that reads the ledger and the clients' journals, again and again.

    python observer.py LEDGER SITES ...

LEDGER is an SQLite file or a PostgreSQL URL, SITES the folders with the journals. It looks until its standard input
ends, and then prints what it saw as JSON. It knows the tables, and nothing of the package under test.

Journals are read before the ledger: what a client has revealed by then must be charged in what is read after it.
"""

import contextlib
import hashlib
import json
import select
import sqlite3
import sys
from pathlib import Path

PAUSE = 0.02
RELEASES = "SELECT population, run, label, mechanism, step, sequence, quanta, request, state FROM releases"
ACCOUNTS = "SELECT population, unit, budget, spent, reserved FROM accounts"
VALUES = "SELECT release, digest FROM released_values"
MESSAGES = "SELECT series, step, members, state, request, quanta, participants, message FROM messages"


class Observer:
    """What must hold at every moment, and everything that ever did not."""

    def __init__(self, ledger: str, *sites: Path) -> None:
        self.ledger, self.sites = ledger, sites
        self.looks, self.problems = 0, dict[str, None]()
        self._first, self._spent = dict[tuple, object](), dict[tuple, int]()

    def look(self) -> None:
        revealed = self._revealed()
        found = self._ledger()
        if found is None:
            return
        self.looks += 1
        releases, accounts, values = found
        by_key = {row[:5]: row[5:] for row in releases}
        self._charged(revealed, by_key)
        self._within(accounts, by_key)
        for key, (sequence, quanta, request, _) in by_key.items():
            self._once("charged twice", ("release", *key), (sequence, quanta, request))
        for release, digest in values:
            self._once("stored two values", ("value", release), digest)
        gone = [key for kind, *key in self._first if kind == "release" and tuple(key) not in by_key]
        for key in gone:
            self._tell(f"lost charge: release {key} was in the ledger and is not any more")

    def _charged(self, revealed, by_key) -> None:
        """Charged ≥ revealed: every message a client has written down to be seen has its charge in the ledger."""
        for journal, series, step, members, state, request, quanta, participants, message in revealed:
            key = (*json.loads(series), step)
            if state == "prepared":
                continue
            if key not in by_key:
                self._tell(f"lost charge: a client has {state} {key}, and the ledger has no charge of it")
                continue
            if int(quanta) > int(by_key[key][1]):
                self._tell(f"lost charge: a client counts {quanta} for {key}, and the ledger {by_key[key][1]}")
            if state == "revealed" and by_key[key][3] == "charged":
                self._tell(f"revealed before it was committed: {key}")
            where = ("message", journal, series, step, members)
            self._once("asked for another request or set", (*where, "request"), (request, participants))
            if message is not None:
                self._once("revealed with two values", (*where, "bytes"), hashlib.sha256(message).hexdigest())

    def _within(self, accounts, by_key) -> None:
        """Spent is the sum of what was charged, never sinks, and stays below the budget with what is set aside."""
        for population, unit, budget, spent, reserved in accounts:
            total = sum(int(row[1]) for key, row in by_key.items() if key[0] == population)
            if int(spent) != total:
                self._tell(f"lost charge: the {unit} account says {spent}, its releases add up to {total}")
            if int(spent) + int(reserved) > int(budget):
                self._tell(f"overspent: {spent} + {reserved} of {budget}")
            if int(spent) < self._spent.get((population, unit), 0):
                self._tell(f"lost charge: {unit} account went down to {spent}")
            self._spent[population, unit] = int(spent)

    def _once(self, what, key, value) -> None:
        if self._first.setdefault(key, value) != value:
            self._tell(f"{what}: {key}")

    def _tell(self, problem: str) -> None:
        self.problems.setdefault(problem)

    def _revealed(self):
        found = []
        for path in (path for folder in self.sites for path in folder.rglob("journal.db")):
            with contextlib.suppress(sqlite3.OperationalError), contextlib.closing(_opened(path)) as database:
                found += [(str(path), *row) for row in database.execute(MESSAGES)]
        return found

    def _ledger(self):
        """Releases, accounts and values in one snapshot; None while there is nothing to read."""
        if self.ledger.startswith("postgresql://"):
            return self._server()
        if not Path(self.ledger).exists():
            return None
        with contextlib.suppress(sqlite3.OperationalError), contextlib.closing(_opened(Path(self.ledger))) as database:
            database.execute("BEGIN")
            return [database.execute(query).fetchall() for query in (RELEASES, ACCOUNTS, VALUES)]
        return None

    def _server(self):
        import psycopg

        with contextlib.suppress(psycopg.Error), psycopg.connect(self.ledger, connect_timeout=2) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            return [connection.execute(query).fetchall() for query in (RELEASES, ACCOUNTS, VALUES)]
        return None


def _opened(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=5, isolation_level=None)
    database.execute("PRAGMA query_only=ON")
    return database


def main(ledger: str, *sites: str) -> None:
    observer = Observer(ledger, *map(Path, sites))
    while not select.select([sys.stdin], [], [], PAUSE)[0]:
        observer.look()
    observer.look()
    print(json.dumps({"looks": observer.looks, "problems": list(observer.problems)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
