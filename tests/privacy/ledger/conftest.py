"""Every test of the ledger runs on SQLite and, where a server can be had, on PostgreSQL."""

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy

from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger import Ledger, ReleaseKey
from dpray.platform.privacy.mechanisms import Unit
from tests.postgres import PostgresServer

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Constants:
    """A mechanism as the ledger sees it: a unit, and public constants."""

    unit: Unit
    clip: float = 1.0

    def describe(self):
        return {"mechanism": "sum", "clip": self.clip}


RECORD, USER, CLIENT = Constants(Unit.RECORD), Constants(Unit.USER), Constants(Unit.CLIENT)


class Place:
    """Where one test's ledger lives: opens it, opens it again, and reaches behind its back."""

    def __init__(self, url, folder):
        self.url, self.folder = url, folder
        self.sqlite = url.startswith("sqlite")
        self._opened = []

    def open(self, **options):
        if not self.sqlite:
            options.setdefault("values_dir", self.folder / "values")
        ledger = Ledger(self.url, **options)
        self._opened.append(ledger)
        return ledger

    def sql(self, *statements):
        """Run statements as somebody who can write to the database, but is not the ledger."""
        engine = sqlalchemy.create_engine(self.url.replace("postgresql://", "postgresql+psycopg://"))
        try:
            with engine.begin() as connection:
                return [connection.exec_driver_sql(text) for text in statements][-1].rowcount
        finally:
            engine.dispose()

    def scalar(self, query):
        engine = sqlalchemy.create_engine(self.url.replace("postgresql://", "postgresql+psycopg://"))
        try:
            with engine.begin() as connection:
                return connection.exec_driver_sql(query).scalar()
        finally:
            engine.dispose()

    @property
    def values(self):
        return Path(f"{self.folder}/ledger.db.values") if self.sqlite else self.folder / "values"

    def close(self):
        for ledger in self._opened:
            ledger.close()


@pytest.fixture(scope="session")
def postgres():
    """URL of a PostgreSQL server for this session: DPRAY_TEST_POSTGRES_URL, or one started from its binaries."""
    given = os.environ.get("DPRAY_TEST_POSTGRES_URL")
    if given:
        yield given
        return
    pytest.importorskip("psycopg", reason="the PostgreSQL driver is not installed: pip install 'dpray[postgres]'")
    server = PostgresServer.installed()
    if server is None:
        pytest.skip("no PostgreSQL here: no initdb found and DPRAY_TEST_POSTGRES_URL is not set")
    try:
        server.start()
        yield server.url
    finally:
        server.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def new_place(request, tmp_path):
    """A function that gives a fresh, empty place for a ledger."""
    places = []
    if request.param == "postgresql":
        server = request.getfixturevalue("postgres")

    def make():
        number = next(_NUMBERS)
        folder = tmp_path / str(number)
        folder.mkdir()
        if request.param == "sqlite":
            place = Place(f"sqlite:///{folder}/ledger.db", folder)
        else:
            schema = f"t{os.getpid()}_{number}"
            Place(server, folder).sql(f"CREATE SCHEMA {schema}")
            joint = "&" if "?" in server else "?"
            place = Place(f"{server}{joint}options=-csearch_path%3D{schema}", folder)
            place.schema = schema
        places.append(place)
        return place

    yield make
    for place in places:
        place.close()
        if not place.sqlite:
            Place(server, place.folder).sql(f"DROP SCHEMA {place.schema} CASCADE")


@pytest.fixture
def place(new_place):
    return new_place()


@pytest.fixture
def ledger(place):
    return place.open()


@pytest.fixture
def population(ledger):
    """Records in clients of at most 10, with a record-level account of ε = 6 at δ = 1e-5."""
    people = ledger.population("digits", records_per_client=10)
    people.account("record", Budget(6, 1e-5))
    return people


@pytest.fixture
def account(population):
    return population.account("record")


@pytest.fixture
def run(population):
    return population.run("first")


class Releases:
    """Short forms: keys, and releases of a fixed value."""

    record, user, client = RECORD, USER, CLIENT
    value = np.arange(4.0)

    @staticmethod
    def key(step=0, label="training", mechanism="sum"):
        return ReleaseKey(label, mechanism, step)

    def make(
        self, run, quanta=1000, step=0, *, mechanism=RECORD, label="training", value=None, query=None, trust="central"
    ):
        given = self.value if value is None else value
        return run.release(
            self.key(step, label), query or {"step": step}, mechanism, quanta, lambda attempt: given, trust=trust
        )

    def charge(self, run, quanta=1000, step=0, *, mechanism=RECORD, label="training"):
        return run.charge(self.key(step, label), {"step": step}, mechanism, quanta)


@pytest.fixture
def releases():
    return Releases()
