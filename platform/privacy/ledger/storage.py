"""Where a ledger lives: SQLite or PostgreSQL, opened so that a commit is on disk when it returns.

| | SQLite | PostgreSQL |
|---|---|---|
| durable commit | WAL, `synchronous=FULL` | `synchronous_commit=on`; a server with `fsync=off` is refused |
| one writer at a time | `BEGIN IMMEDIATE` | row lock on the head of the chain |
| readers | their own snapshot, no lock | `REPEATABLE READ` |
| who may read it | file, `-wal` and `-shm` 0600 | the server's business |

All writers of a ledger queue up for its head row, whatever their population: the chain has one end. A write that failed
for a passing reason (deadlock, lost connection, a server that restarts) is run again, for a bounded time; every write
of the ledger finds its own earlier success and returns it, so that running it again never charges twice.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, func, insert, inspect, make_url, select
from sqlalchemy.exc import ArgumentError, DBAPIError

from dpray.platform.privacy.ledger import schema
from dpray.platform.privacy.ledger.chain import ROOT, Transaction, canonical, entry_digest
from dpray.platform.privacy.ledger.errors import LedgerError, LedgerMissing, LedgerTampered

T = TypeVar("T")
_PATIENCE = 20.0
"""Seconds for which what failed for a passing reason is run again: time for a server to restart."""
_TRANSIENT = frozenset({"40001", "40P01", "57P01", "57P02", "57P03"})
_CREATION_LOCK = 0x64707261


class Storage:
    """An open database with the ledger's tables.

    Args:
        url: SQLAlchemy URL, `sqlite:///path` or `postgresql://…` (psycopg 3).
        create: make the database's tables, and the SQLite file, if they are not there.
        wait: seconds to wait for another writer before giving up.

    Errors: LedgerError in a sentence for what is not there, not a ledger, in memory, or of another kind.
    """

    def __init__(self, url: str, *, create: bool, wait: float = 60.0) -> None:
        self._wait, self._answered = wait, False
        address = _address(url)
        self.shown = address.render_as_string(hide_password=True)
        self.sqlite = address.get_backend_name() == "sqlite"
        self.path: Path | None = None
        if self.sqlite:
            self.path = Path(str(address.database)).expanduser().absolute()
            address = address.set(database=str(self.path))
            _prepare_file(self.path, create)
        self._engine = self._open(address)
        self._reading = (
            self._engine if self.sqlite else self._engine.execution_options(isolation_level="REPEATABLE READ")
        )
        self._writing = self._engine.execution_options(ledger_writes=True)
        try:
            self._guarded(lambda: self._prepare_tables(create))
        except BaseException:
            self.close()
            raise
        self._answered = True

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work` on one snapshot of the ledger."""

        def once() -> T:
            with self._reading.connect() as connection, connection.begin():
                return work(connection)

        return self._guarded(once)

    def write(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` alone on the checked head of the chain and commit: all of it is durable, or nothing happened."""

        def once() -> T:
            with self._writing.connect() as connection, connection.begin():
                transaction = Transaction(connection)
                result = work(transaction)
                transaction.finish()
                return result

        return self._guarded(once)

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    def integrity(self) -> tuple[str, ...]:
        """What SQLite itself finds wrong with the file (damaged pages, indexes); nothing on PostgreSQL."""
        if not self.sqlite:
            return ()
        found = self.read(lambda connection: connection.exec_driver_sql("PRAGMA integrity_check").scalars().all())
        return tuple(f"The database file is damaged: {text}." for text in found if text != "ok")

    def _guarded(self, work: Callable[[], T]) -> T:
        deadline, pause = time.monotonic() + _PATIENCE, 0.01
        while True:
            try:
                return work()
            except (DBAPIError, self._engine.dialect.loaded_dbapi.Error) as error:
                if time.monotonic() + pause > deadline or not self._passing(error):
                    raise self._sentence(error) from error
            time.sleep(pause)
            pause = min(1.0, 2 * pause)

    def _passing(self, error: Exception) -> bool:
        """Whether the same write may succeed if it is run again: a deadlock, a restarted server, a lost connection."""
        if isinstance(error, DBAPIError) and error.connection_invalidated:
            return True
        cause = _cause(error)
        state = getattr(cause, "sqlstate", None)
        unreachable = state is None and isinstance(cause, self._engine.dialect.loaded_dbapi.OperationalError)
        # A server that has never answered is a wrong address, which is said at once.
        return state in _TRANSIENT or (unreachable and self._answered and not self.sqlite)

    def _sentence(self, error: Exception) -> LedgerError:
        cause = " ".join(str(_cause(error)).split())
        if "locked" in cause or getattr(_cause(error), "sqlstate", None) == "55P03":
            return LedgerError(
                f"Another process has held the ledger {self.shown} for more than {self._wait:g} s. Nothing was "
                "charged; end the process that hangs, then try again."
            )
        if "malformed" in cause or "not a database" in cause:
            return LedgerTampered(
                f"{self.shown} is not a readable ledger ({cause}). Nothing was charged; restore a copy that verifies."
            )
        if "full" in cause or "readonly" in cause:
            return LedgerError(f"The ledger {self.shown} cannot be written ({cause}): make room on its disk.")
        return LedgerError(f"The ledger {self.shown} did not answer: {cause}.")

    def _open(self, address: URL) -> Engine:
        try:
            arguments = {} if self.sqlite else {"connect_args": {"options": _session(address, self._wait)}}
            engine = create_engine(address, pool_pre_ping=not self.sqlite, **arguments)
        except ModuleNotFoundError as error:
            raise LedgerError(
                f"The ledger {self.shown} needs the PostgreSQL driver: pip install 'dpray[postgres]'."
            ) from error
        if self.sqlite:
            wait = self._wait

            @event.listens_for(engine, "connect")
            def _connect(connection: sqlite3.Connection, _: object) -> None:
                connection.isolation_level = None
                _durable(connection, wait)

            @event.listens_for(engine, "begin")
            def _begin(connection: Connection) -> None:
                writes = connection.get_execution_options().get("ledger_writes")
                connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

        return engine

    def _prepare_tables(self, create: bool) -> None:
        with self._reading.connect() as connection, connection.begin():
            if not self.sqlite and connection.exec_driver_sql("SHOW fsync").scalar_one() == "off":
                raise LedgerError(
                    f"The server of {self.shown} runs with fsync=off: a power cut could forget what was charged. "
                    "Turn it on, or use another server."
                )
            there = self._there(connection)
        if not there and not create:
            raise LedgerMissing(
                f"{self.shown} holds no ledger. Create one with `dpray ledger create`, or name another."
            )
        if not there:
            with self._writing.connect() as connection, connection.begin():
                self._create(connection)

    def _create(self, connection: Connection) -> None:
        if not self.sqlite:
            connection.execute(select(func.pg_advisory_xact_lock(_CREATION_LOCK)))
        if self._there(connection):  # another process was faster
            return
        schema.metadata.create_all(connection)
        at, body = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()), _genesis()
        digest = entry_digest(1, at, "ledger", body, ROOT)
        connection.execute(
            insert(schema.entries),
            {"sequence": 1, "at": at, "kind": "ledger", "body": body, "previous": ROOT, "digest": digest},
        )
        connection.execute(insert(schema.head), {"id": 1, "sequence": 1, "digest": digest})

    def _refuse_other_format(self, connection: Connection) -> None:
        first = select(schema.entries.c.body).where(schema.entries.c.sequence == 1)
        body = connection.execute(first).scalar_one_or_none()
        with suppress(ValueError, TypeError, KeyError):  # a damaged first entry is for `verify` to find
            written = json.loads(body or "")["format"]
            if written != schema.FORMAT:
                raise LedgerError(
                    f"{self.shown} is a ledger of format {written}, and this version of dpray reads {schema.FORMAT}: "
                    "use the version that wrote it."
                )

    def _there(self, connection: Connection) -> bool:
        present = set(inspect(connection).get_table_names())
        ours = set(schema.metadata.tables)
        if ours <= present:
            self._refuse_other_format(connection)
            return True
        foreign = present if self.sqlite else present & ours
        if foreign:
            raise LedgerError(
                f"{self.shown} holds tables that are not a ledger's ({', '.join(sorted(foreign)[:5])}): give the "
                "ledger a database of its own."
            )
        return False


def _genesis() -> str:
    return canonical({"format": schema.FORMAT, "relation": "replace-one", "id": uuid.uuid4().hex})


def _cause(error: Exception) -> Exception:
    original = error.orig if isinstance(error, DBAPIError) else error
    return original if isinstance(original, Exception) else error


def _address(url: str) -> URL:
    try:
        address = make_url(url)
    except ArgumentError as error:
        raise LedgerError(
            f"A ledger is at a URL such as sqlite:///dpray-ledger.db or postgresql://host/name; {url!r} is not one."
        ) from error
    backend = address.get_backend_name()
    if backend == "postgresql":
        return address.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise LedgerError(f"A ledger lives in SQLite or PostgreSQL; {backend!r} is neither.")
    if address.database in {None, "", ":memory:"} or address.query:
        raise LedgerError("A ledger in memory forgets what was spent: name a file, such as sqlite:///dpray-ledger.db.")
    return address


def _session(address: URL, wait: float) -> str:
    given = address.query.get("options", "")
    given = given if isinstance(given, str) else " ".join(given)
    return f"{given} -c synchronous_commit=on -c lock_timeout={int(wait * 1000)}".strip()


def _prepare_file(path: Path, create: bool) -> None:
    """Make the file with mode 0600 before SQLite opens it; `-wal` and `-shm` take over the mode of the file."""
    if not path.parent.is_dir():
        raise LedgerError(f"The folder of the ledger, {path.parent}, does not exist: create it, or name another.")
    if path.is_dir():
        raise LedgerError(f"{path} is a folder; a ledger is a file: name one in it.")
    if not path.exists():
        if not create:
            raise LedgerMissing(
                f"There is no ledger at {path}. Create one with `dpray ledger create`, or name another."
            )
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        sync_folder(path.parent)
    for suffix in ("", "-wal", "-shm"):
        with suppress(FileNotFoundError, PermissionError):
            path.with_name(path.name + suffix).chmod(0o600)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _durable(connection: sqlite3.Connection, wait: float) -> None:
    connection.execute(f"PRAGMA busy_timeout={int(wait * 1000)}")
    deadline = time.monotonic() + wait
    while (mode := _write_ahead(connection)) is None:
        if time.monotonic() > deadline:
            raise sqlite3.OperationalError("database is locked")
        time.sleep(0.01)
    if mode != "wal":
        raise LedgerError(
            "SQLite cannot keep a write-ahead log beside this ledger (a network folder?): put it on a local "
            "disk, or use PostgreSQL."
        )
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA fullfsync=ON")


def _write_ahead(connection: sqlite3.Connection) -> str | None:
    """The journal mode after asking for WAL; None while another process switches it (SQLite does not wait there)."""
    try:
        return str(connection.execute("PRAGMA journal_mode=WAL").fetchone()[0])
    except sqlite3.OperationalError as error:
        if "locked" not in str(error):
            raise
        return None
