"""A store of MLflow for a module's tests, and a look into it that does not go through MLflow."""

import sqlite3
from pathlib import Path

import pytest

from dpray.platform.tracking import Tracker


class Store:
    """An sqlite store, read with plain SQL."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.uri = f"sqlite:///{self.path}"

    def rows(self, query, *values):
        connection = sqlite3.connect(self.path)
        try:
            return connection.execute(query, values).fetchall()
        finally:
            connection.close()

    def runs(self, run):
        """{part: (run id, name, status, parent's id)} of a run by its name."""
        found = self.rows(
            "SELECT part.value, r.run_uuid, r.name, r.status, parent.value FROM runs r"
            " JOIN tags named ON named.run_uuid = r.run_uuid AND named.key = 'dpray.run' AND named.value = ?"
            " JOIN tags part ON part.run_uuid = r.run_uuid AND part.key = 'dpray.part'"
            " LEFT JOIN tags parent ON parent.run_uuid = r.run_uuid AND parent.key = 'mlflow.parentRunId'"
            " WHERE r.lifecycle_stage = 'active'",
            run,
        )
        assert len({part for part, *_ in found}) == len(found), "a part has two runs"
        return {part: tuple(rest) for part, *rest in found}

    def metrics(self, run_id):
        """[(name, step, value)] with every row, duplicates included."""
        return self.rows("SELECT key, step, value FROM metrics WHERE run_uuid = ? ORDER BY key, step", run_id)

    def points(self, run_id, name):
        return [(step, value) for key, step, value in self.metrics(run_id) if key == name]

    def pairs(self, table, run_id):
        return dict(self.rows(f"SELECT key, value FROM {table} WHERE run_uuid = ?", run_id))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("store") / "mlflow.db")


@pytest.fixture
def store_at():
    """Look into any sqlite store."""
    return Store


@pytest.fixture
def tracker_of(tmp_path):
    """Make trackers that are finished at the end, whatever happens."""
    made = []

    def make(run, uri, folder=None, **settings):
        tracker = Tracker(folder or tmp_path / "spool", run, uri=uri, interval=0.2, **settings)
        made.append(tracker)
        return tracker

    yield make
    for tracker in made:
        tracker.finish("KILLED", timeout=5)
