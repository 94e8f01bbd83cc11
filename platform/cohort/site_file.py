"""A site's file: one SQLite database of mode 0600 that outlives every process, shared by the hosts of a node.

| table    | what a client remembers                                                                      |
|----------|----------------------------------------------------------------------------------------------|
| clients  | private seed, and μ² spent so far in quanta (see `journal`)                                   |
| scores   | local scores of searches under way, by population; they never leave                           |
| deaths   | clients whose code killed the process, by key (see `confine`)                                 |
| meta, epochs, groups, messages | what `journal` guards                                                   |

Every method is one transaction (BEGIN IMMEDIATE, write-ahead log, synchronous=FULL: on disk when it returns, but for
`prepare`, which says so).
"""

from __future__ import annotations

import math
import os
import secrets
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from dpray.platform.cohort.file_lock import FileLock

_WAIT = 60.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS epochs (run TEXT PRIMARY KEY, epoch INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS clients (client TEXT PRIMARY KEY, seed BLOB NOT NULL, spent TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (digest TEXT PRIMARY KEY, members TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS messages (
    series TEXT NOT NULL, step INTEGER NOT NULL, members TEXT NOT NULL, state TEXT NOT NULL, request TEXT NOT NULL,
    share REAL NOT NULL, quanta TEXT NOT NULL, participants TEXT, message BLOB,
    PRIMARY KEY (series, step, members));
CREATE INDEX IF NOT EXISTS kept ON messages (series, step) WHERE message IS NOT NULL;
CREATE TABLE IF NOT EXISTS scores (
    population TEXT NOT NULL, run TEXT NOT NULL, candidate INTEGER NOT NULL, client TEXT NOT NULL,
    config TEXT NOT NULL, score REAL, PRIMARY KEY (population, run, candidate, client)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS deaths (key TEXT NOT NULL, client TEXT NOT NULL, deaths INTEGER NOT NULL,
    PRIMARY KEY (key, client)) WITHOUT ROWID;
"""


class SiteFile:
    """The file at `path`; made, with mode 0600 in a folder of mode 0700, if it is not there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._lock = FileLock(path.with_name(f".{path.name}.lock"))
        self._database = sqlite3.connect(path, timeout=_WAIT, isolation_level=None, check_same_thread=False)
        with self._lock.held():
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=FULL")
            if "population" not in _columns(self._database, "scores"):  # a file of before: scores can be made again
                self._database.execute("DROP TABLE IF EXISTS scores")
            self._database.executescript(_SCHEMA)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def close(self) -> None:
        """Close the file; again changes nothing."""
        self._database.close()
        self._lock.close()

    @contextmanager
    def _transaction(self, *, synced: bool = True) -> Iterator[sqlite3.Connection]:
        """All or nothing; on disk afterwards, or, unless `synced`, with the next transaction that is.

        What is not synced survives the death of every process, and not that of the machine.

        One host at a time, woken when its turn comes: SQLite does not wait for a file that is turning to write-ahead
        logging, and for a writer it waits by sleeping, which made the hosts of a node lose several milliseconds a
        round to each other.
        """
        with self._lock.held():
            self._database.execute(f"PRAGMA synchronous={'FULL' if synced else 'NORMAL'}")
            with self._begun():
                yield self._database

    @contextmanager
    def _begun(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:  # SQLite has ended it itself where a disk was full, or has not
                self._database.execute("ROLLBACK")
            raise

    # who the clients are

    def enrol(self, clients: Sequence[str]) -> dict[str, bytes]:
        """Private 32-byte seeds by client, drawn from the operating system on first sight."""
        with self._transaction() as database:
            rows = [(client, secrets.token_bytes(32), "0") for client in clients]
            database.executemany("INSERT OR IGNORE INTO clients VALUES (?, ?, ?)", rows)
            found = dict(database.execute("SELECT client, seed FROM clients"))
        return {client: found[client] for client in clients}

    # local scores

    def scores(self, run: tuple[str, str], candidate: int, config: str) -> dict[str, float]:
        """Scores by client for one candidate of a run (population, search), of this configuration (a digest) only."""
        query = "SELECT client, score FROM scores WHERE population = ? AND run = ? AND candidate = ? AND config = ?"
        return {
            client: float("nan") if score is None else score
            for client, score in self._database.execute(query, (*run, candidate, config))
        }

    def all_scores(self, run: tuple[str, str]) -> Iterator[tuple[int, str, float]]:
        """(candidate, client, score) of a run; NaN is the worst."""
        for candidate, client, score in self._database.execute(
            "SELECT candidate, client, score FROM scores WHERE population = ? AND run = ?", run
        ):
            yield candidate, client, float("nan") if score is None else score

    def keep_scores(
        self, run: tuple[str, str], configs: Mapping[int, str], scores: Mapping[str, Mapping[int, float]]
    ) -> None:
        """Keep scores of several candidates (`configs`: their digests) by client, in one transaction."""
        rows = [
            (*run, candidate, client, configs[candidate], None if math.isnan(score) else score)
            for client, each in scores.items()
            for candidate, score in each.items()
        ]
        with self._transaction() as database:
            database.executemany("INSERT OR REPLACE INTO scores VALUES (?, ?, ?, ?, ?, ?)", rows)

    def forget_scores(self, run: tuple[str, str]) -> None:
        """Drop the scores of a search that has ended."""
        with self._transaction() as database:
            database.execute("DELETE FROM scores WHERE population = ? AND run = ?", run)

    # deaths

    def note_death(self, key: str, client: str) -> None:
        """Count a death of the process in this client's code."""
        with self._transaction() as database:
            database.execute(
                "INSERT INTO deaths VALUES (?, ?, 1) ON CONFLICT (key, client) DO UPDATE SET deaths = deaths + 1",
                (key, client),
            )

    def deaths(self, key: str) -> dict[str, int]:
        """Deaths on this key by client."""
        return dict(self._database.execute("SELECT client, deaths FROM deaths WHERE key = ?", (key,)))


def _columns(database: sqlite3.Connection, table: str) -> set[str]:
    return {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
