"""Where a ledger lives: what is created, with which rights, and what is refused in a sentence without a trace."""

import os
import signal
import sqlite3
import stat
import threading
from types import SimpleNamespace

import pytest
import sqlalchemy

from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger import Ledger, LedgerError, LedgerTampered, schema, storage
from dpray.platform.privacy.ledger.storage import Storage
from tests.postgres import PostgresServer


def url(path):
    return f"sqlite:///{path}"


def test_the_file_and_its_logs_are_for_the_owner_only(tmp_path, releases):
    old = os.umask(0)
    try:
        with Ledger(url(tmp_path / "l.db")) as ledger:
            people = ledger.population("digits")
            people.account("record", Budget(6, 1e-5))
            releases.make(people.run("a"))
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
            assert modes == {"l.db": 0o600, "l.db-wal": 0o600, "l.db-shm": 0o600}
    finally:
        os.umask(old)


def test_wider_rights_of_an_existing_file_are_taken_back(tmp_path):
    Ledger(url(tmp_path / "l.db")).close()
    (tmp_path / "l.db").chmod(0o644)
    Ledger(url(tmp_path / "l.db"), create=False).close()
    assert stat.S_IMODE((tmp_path / "l.db").stat().st_mode) == 0o600


def test_commits_are_durable(tmp_path):
    with Ledger(url(tmp_path / "l.db")) as ledger:
        pragmas = ("journal_mode", "synchronous", "busy_timeout")
        values = ledger._storage.read(lambda c: [c.exec_driver_sql(f"PRAGMA {name}").scalar() for name in pragmas])
    assert values == ["wal", 2, 60000]


def test_looking_never_creates(tmp_path):
    with pytest.raises(LedgerError, match=r"There is no ledger at .*l\.db\. Create one"):
        Ledger(url(tmp_path / "l.db"), create=False)
    (tmp_path / "empty.db").touch()
    with pytest.raises(LedgerError, match="holds no ledger"):
        Ledger(url(tmp_path / "empty.db"), create=False)
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".db"] == ["empty.db"]


def test_looking_at_a_population_that_is_not_there_is_refused(place, ledger):
    looking = place.open(create=False)
    with pytest.raises(LedgerError, match="has no population 'digits'"):
        looking.population("digits")
    assert looking.populations() == ()
    ledger.population("digits").account("record", Budget(6, 1e-5))
    assert looking.population("digits").account("record").budget == Budget(6, 1e-5)
    assert [people.name for people in looking.populations()] == ["digits"]
    with pytest.raises(LedgerError, match="no run 'x'"):
        looking.population("digits").account("record").statement(run="x")


def test_an_empty_database_holds_no_ledger(place):
    with pytest.raises(LedgerError, match=r"(holds no ledger|There is no ledger)"):
        place.open(create=False)


def test_opening_again_finds_the_same_ledger(place, ledger):
    ledger.population("digits")
    again = place.open()
    assert again.head() == ledger.head()
    assert [people.name for people in again.populations()] == ["digits"]


def test_two_new_ledgers_differ_from_the_first_entry_on(new_place):
    first, second = new_place().open(), new_place().open()
    assert first.head().sequence == second.head().sequence == 1
    assert first.head().digest != second.head().digest


@pytest.mark.parametrize("bad", ["sqlite://", "sqlite:///:memory:", "sqlite:///file:x?mode=memory&uri=true"])
def test_a_ledger_in_memory_is_refused(bad):
    with pytest.raises(LedgerError, match="in memory forgets"):
        Ledger(bad)


def test_other_urls_are_refused(tmp_path):
    with pytest.raises(LedgerError, match="SQLite or PostgreSQL; 'mysql' is neither"):
        Ledger("mysql://host/name")
    with pytest.raises(LedgerError, match="is not one"):
        Ledger("ledger.db")
    with pytest.raises(LedgerError, match="does not exist"):
        Ledger(url(tmp_path / "missing" / "l.db"))
    with pytest.raises(LedgerError, match="is a folder"):
        Ledger(url(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_something_else_is_refused_and_left_alone(tmp_path):
    text = tmp_path / "text.db"
    text.write_text("not a database, but long enough to be looked at as one" * 99)
    before = text.read_bytes()
    with pytest.raises(LedgerTampered, match="not a readable ledger"):
        Ledger(url(text))
    assert text.read_bytes() == before


def test_a_database_that_is_something_else_is_refused_and_left_alone(place):
    engine = sqlalchemy.create_engine(place.url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE runs (id INTEGER)")
    for create in (True, False):
        with pytest.raises(LedgerError, match=r"not a ledger's \(runs\): give the ledger a database of its own"):
            place.open(create=create)
    assert sqlalchemy.inspect(engine).get_table_names() == ["runs"]
    engine.dispose()


def test_the_default_is_a_file_in_the_working_folder_and_stays_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Ledger() as ledger:
        monkeypatch.chdir("/")
        ledger.population("digits")
        assert repr(ledger) == "Ledger('sqlite:///dpray-ledger.db')"
    assert (tmp_path / "dpray-ledger.db").exists()


def test_passwords_are_not_shown():
    with pytest.raises(LedgerError, match="did not answer") as caught:
        Ledger("postgresql://me:secret@127.0.0.1:1/name?connect_timeout=1")
    assert "secret" not in str(caught.value)


def test_a_writer_that_hangs_is_waited_for_and_then_named(place, ledger):
    ledger.population("digits")
    impatient = place.open(wait=0.2)
    engine = sqlalchemy.create_engine(place.url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.connect() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if place.sqlite else "SELECT * FROM head FOR UPDATE")
        with pytest.raises(LedgerError, match=r"Another process has held the ledger .* for more than 0\.2 s"):
            impatient.population("other")
        assert [people.name for people in impatient.populations()] == ["digits"]  # readers do not wait
        connection.rollback()
    engine.dispose()
    impatient.population("other")


def test_processes_that_create_the_same_ledger_at_once_make_one(place):
    heads, errors, gate = [], [], threading.Barrier(4)

    def work():
        gate.wait(20)
        try:
            heads.append(place.open().head())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(heads) == 4
    assert len(set(heads)) == 1


def test_a_write_that_failed_for_a_passing_reason_is_run_again_for_some_seconds(ledger, monkeypatch):
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr("dpray.platform.privacy.ledger.storage.time", clock)
    opened: Storage = ledger._storage
    driver = opened._engine.dialect.loaded_dbapi
    passing = type("Passing", (driver.OperationalError,), {"sqlstate": "40P01"})
    calls = []

    def work(transaction):
        calls.append(transaction.head)
        if len(calls) < 3:
            raise passing("deadlock detected")
        return "done"

    assert opened.write(work) == "done"
    assert len(calls) == 3

    def never(transaction):
        calls.append(transaction.head)
        raise passing("deadlock detected")

    calls.clear()
    with pytest.raises(LedgerError, match="deadlock detected"):
        opened.write(never)
    assert 10 < now[0] < 30
    assert len(calls) < 40
    error = sqlalchemy.exc.DBAPIError("COMMIT", {}, driver.OperationalError("gone"), connection_invalidated=True)
    assert opened._passing(error)
    assert not opened._passing(driver.IntegrityError("a bug is not passing"))


def test_what_a_failed_write_has_done_is_undone(ledger):
    head = ledger.head()

    def work(transaction):
        transaction.append("gift", {})
        raise KeyError

    with pytest.raises(KeyError):
        ledger._storage.write(work)
    assert ledger.head() == head
    assert ledger.verify() == ()


@pytest.mark.parametrize("new_place", ["postgresql"], indirect=True)
def test_a_server_that_forgets_is_refused(place, ledger, monkeypatch):
    ledger.close()
    real = sqlalchemy.engine.Connection.exec_driver_sql

    def off(self, statement, *arguments, **options):
        return real(self, "SELECT 'off'" if statement == "SHOW fsync" else statement, *arguments, **options)

    monkeypatch.setattr(sqlalchemy.engine.Connection, "exec_driver_sql", off)
    with pytest.raises(LedgerError, match="fsync=off"):
        place.open()


def test_a_folder_without_write_ahead_log_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("dpray.platform.privacy.ledger.storage._write_ahead", lambda _: "delete")
    with pytest.raises(LedgerError, match="put it on a local disk, or use PostgreSQL"):
        Ledger(url(tmp_path / "l.db"))


def test_switching_the_log_while_others_do_is_waited_for(tmp_path, monkeypatch):
    class Busy:
        def __init__(self, message):
            self.message = message

        def execute(self, _):
            raise sqlite3.OperationalError(self.message)

    assert storage._write_ahead(Busy("database is locked")) is None
    with pytest.raises(sqlite3.OperationalError, match="disk I/O"):
        storage._write_ahead(Busy("disk I/O error"))
    answers = iter([None, "wal"])
    monkeypatch.setattr(storage, "_write_ahead", lambda _: next(answers))
    Ledger(url(tmp_path / "l.db")).close()
    assert list(answers) == []
    monkeypatch.setattr(storage, "_write_ahead", lambda _: None)
    with pytest.raises(LedgerError, match="Another process has held"):
        Ledger(url(tmp_path / "l.db"), wait=0.05)


def test_a_ledger_of_another_format_is_left_to_the_version_that_wrote_it(place, ledger):
    later = schema.FORMAT + 1
    place.sql(f"UPDATE entries SET body = '{{\"format\":{later}}}' WHERE sequence = 1")
    with pytest.raises(LedgerError, match=f"of format {later}, and this version of dpray reads {schema.FORMAT}"):
        place.open()
    place.sql("UPDATE entries SET body = 'x' WHERE sequence = 1")
    assert any("Entry 1" in problem for problem in place.open().verify())


def test_a_dropped_table_is_a_problem_not_a_traceback(place, ledger):
    place.sql("DROP TABLE claims")
    assert any("claims" in problem for problem in ledger.verify())


@pytest.mark.parametrize("new_place", ["postgresql"], indirect=True)
def test_a_lost_connection_to_the_server_is_replaced(place, ledger):
    ledger.population("before")
    place.sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE pid <> pg_backend_pid() AND datname = current_database()"
    )
    ledger.population("after")
    assert [people.name for people in ledger.populations()] == ["after", "before"]
    assert ledger.verify() == ()


def test_a_server_that_restarts_is_waited_for_and_nothing_is_charged_twice(tmp_path, releases):
    pytest.importorskip("psycopg", reason="the PostgreSQL driver is not installed: pip install 'dpray[postgres]'")
    server = PostgresServer.installed()
    if server is None:
        pytest.skip("no PostgreSQL here: no initdb found")
    try:
        server.start()
        with Ledger(server.url, values_dir=tmp_path) as ledger:
            people = ledger.population("digits")
            account, run = people.account("record", Budget(6, 1e-5)), people.run("first")
            for step, how in enumerate((signal.SIGINT, signal.SIGQUIT)):
                attempt = releases.charge(run, 1000, step)
                server.stop(how)
                back = threading.Timer(0.5, server.start)
                back.start()
                assert run.store(attempt, releases.value).first
                back.join()
            assert account.spent == 2000
            assert ledger.verify() == ()
    finally:
        server.close()


def test_without_the_driver_the_way_to_install_it_is_named(monkeypatch):
    def missing(*_, **__):
        raise ModuleNotFoundError("No module named 'psycopg'")

    monkeypatch.setattr("dpray.platform.privacy.ledger.storage.create_engine", missing)
    with pytest.raises(LedgerError, match=r"pip install 'dpray\[postgres\]'"):
        Ledger("postgresql://host/name")
