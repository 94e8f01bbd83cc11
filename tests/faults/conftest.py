"""Runs that are watched from outside while something is done to them, and the table of what came of it."""

import contextlib
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dpray.experiments.reading import write_yaml
from dpray.platform.privacy.budget import Budget
from tests.experiments.conftest import Ended, Workspace, members

ROUNDS = 12
FEDERATED = {
    "name": "small",
    "population": {"name": "people"},
    "budget": {"epsilon": 6, "delta": 1e-5},
    "shares": {"search": 0.3, "training": 0.7},
    "data": {"dataset": "digits", "evaluation": {"public": True, "fraction": 0.3}},
    "cohort": {"clients": 6, "partition": {"kind": "iid"}, "actors": 2},
    "search": {"votes": 1, "folds": 2, "space": {"learning_rate": {"grid": [0.25, 1.0, 4.0]}}},
    "training": {"algorithm": "dp_fedsofim", "rounds": ROUNDS, "clip": 1.0},
    "tracking": {"uri": None},
}
CENTRAL = {
    "name": "small",
    "population": {"name": "people", "unit": "user"},
    "budget": {"epsilon": 5, "delta": 1e-5},
    "objective": {"name": "paraboloid", "dimension": 3, "public": True},
    "search": {"algorithm": "dp_gibo", "iterations": 8, "clip": 1.0},
    "tracking": {"uri": None},
}


@dataclass
class Row:
    """What came of one kind of fault."""

    fault: str
    faults: int = 0
    runs: int = 0
    completed: int = 0
    overspent: int = 0
    lost_charges: int = 0
    lost_rounds: int = 0
    looks: int = 0
    notes: list[str] = field(default_factory=list)


TABLE: list[Row] = []


def pytest_terminal_summary(terminalreporter) -> None:
    """The table: at its end the suite says what it did, whether it passed or not."""
    if not TABLE:
        return
    heads = ("fault", "faults", "runs", "completed", "overspent", "lost charges", "lost rounds", "looks from outside")
    lines = [heads, *([str(getattr(row, head.split(" from")[0].replace(" ", "_"))) for head in heads] for row in TABLE)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    for line in lines:
        cells = [text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True)]
        terminalreporter.write_line("  ".join([line[0].ljust(widths[0]), *cells]))
    for row in TABLE:
        for note in row.notes:
            terminalreporter.write_line(f"{row.fault}: {note}")


@pytest.fixture
def row(request):
    """The table's row of this test, named by its marker `fault`."""
    made = Row(request.node.get_closest_marker("fault").args[0])
    TABLE.append(made)
    return made


@pytest.fixture
def dice():
    """Random moments. The seed is printed, so that a failure can be looked at again (`DPRAY_TEST_SEED`)."""
    seed = int(os.environ.get("DPRAY_TEST_SEED") or random.SystemRandom().randrange(2**32))
    print(f"seed of the faults' moments: {seed}")
    return random.Random(seed)


class Watched:
    """A run of one recipe in a workspace whose ledger and journals another process reads all the time.

    Args:
        workspace: where it runs.
        row: of the table.
        document: the recipe.
        ledger: URL of a ledger that is elsewhere.
        options: further arguments of `dpray run`.
        sites: folders of the clients' journals, if they are not in the workspace.
    """

    def __init__(self, workspace, row: Row, document=FEDERATED, *, ledger=None, options=(), sites=()) -> None:
        self.workspace, self.row, self.options = workspace, row, options
        self.url = ledger or f"sqlite:///{workspace.folder / 'dpray-ledger.db'}"
        # A cluster refuses a ledger whose path is relative.
        self.document = {**document, **({"ledger": self.url} if ledger or "--address" in options else {})}
        self.recipe = workspace.folder.with_suffix(".yaml")
        self.recipe.write_text(write_yaml(self.document))
        place = self.url.removeprefix("sqlite:///")
        journals = sites or [workspace.folder / "dpray-sites"]
        command = [sys.executable, Path(__file__).with_name("observer.py"), place, *journals]
        self._observer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        row.runs += 1

    @property
    def planned(self) -> int:
        """Quanta that the finished run has spent, to the last one."""
        given = self.document["budget"]
        quanta = Budget(given["epsilon"], given["delta"]).quanta
        shares = self.document.get("shares", {"search": 1.0})
        return sum(quanta * round(10 * share) // 10 for share in shares.values())

    @property
    def releases(self) -> int:
        """How many a finished run has made or lost."""
        search, training = self.document["search"], self.document.get("training")
        return search["iterations"] if training is None else training["rounds"] + 1

    # the run

    def begin(self) -> subprocess.Popen:
        """Run the recipe, or go on with it."""
        return self.workspace.begin("run", self.recipe, *self.options)

    def ended(self, process, timeout=180) -> Ended:
        """What a command said, once it has ended."""
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.workspace.kill(process)
            raise
        return Ended(process.returncode, stdout, stderr)

    def kill(self, process, patience=0.0) -> None:
        """SIGKILL for the driver."""
        self.workspace.kill(process, patience)
        self.row.faults += 1

    # what can be seen from outside

    def query(self, text):
        """Rows of the ledger, as anybody can read them; none while there is nothing to read."""
        if not self.url.startswith("sqlite"):
            import psycopg

            with contextlib.suppress(psycopg.Error), psycopg.connect(self.url, connect_timeout=2) as connection:
                return connection.execute(text).fetchall()
            return []
        place = self.url.removeprefix("sqlite:///")
        with (
            contextlib.suppress(sqlite3.OperationalError),
            contextlib.closing(sqlite3.connect(f"file:{place}?mode=rw", uri=True, timeout=5)) as database,
        ):
            database.execute("PRAGMA query_only=ON")
            return database.execute(text).fetchall()
        return []

    @property
    def entries(self) -> int:
        """Length of the ledger's chain."""
        found = self.query("SELECT max(sequence) FROM entries")
        return (found[0][0] or 0) if found else 0

    @property
    def stored(self) -> int:
        """Releases that have been made."""
        found = self.query("SELECT count(*) FROM releases WHERE state = 'stored'")
        return found[0][0] if found else 0

    def newest(self) -> str:
        """State of the newest release; `none` without any."""
        found = self.query("SELECT state FROM releases ORDER BY sequence DESC LIMIT 1")
        return found[0][0] if found else "none"

    def reach(self, process, condition, seconds=120.0) -> bool:
        """Wait until something holds; False if the run has ended before."""
        deadline = time.monotonic() + seconds
        while not condition():
            if process.poll() is not None:
                return False
            assert time.monotonic() < deadline, "what was waited for did not happen"
            time.sleep(0.001)
        return process.poll() is None

    # the end

    def settle(self) -> None:
        """Finish the run if it has not, and hold it to its plan, its ledger to its chain, and the observer's notes."""
        ended = self.ended(self.begin())
        assert ended.code == 0, ended.stdout + ended.stderr
        seen = json.loads(self._observer.communicate("")[0])
        ((spent, reserved),) = self.query("SELECT spent, reserved FROM accounts")
        states = [state for (state,) in self.query("SELECT state FROM releases")]
        row, problems = self.row, seen["problems"]
        row.completed += self.workspace.path().joinpath("outcome.json").is_file()
        row.overspent += int(spent) > self.planned or any(text.startswith("overspent") for text in problems)
        row.lost_charges += int(spent) < self.planned or any(text.startswith("lost charge") for text in problems)
        row.lost_rounds += states.count("lost")
        row.looks += seen["looks"]
        assert problems == []
        assert (int(spent), int(reserved)) == (self.planned, 0)
        assert len(states) == self.releases
        assert set(states) <= {"stored", "lost"}
        verified = self.workspace.run("ledger", "verify", "--ledger", self.url)
        assert verified.code == 0, verified.stderr
        assert seen["looks"] > 10

    def close(self) -> None:
        """End whatever is left."""
        if self._observer.poll() is None:
            self._observer.communicate("")
        for process in self.workspace.begun:
            self.workspace.kill(process, patience=0)


@pytest.fixture
def watch(make_workspace, tmp_path, row):
    """Begin to watch a workspace of its own."""
    made = []

    def begin(document=FEDERATED, *, folder=tmp_path, **settings) -> Watched:
        workspace = make_workspace(folder / f"w{len(made)}")
        made.append(Watched(workspace, row, document, **settings))
        return made[-1]

    yield begin
    for watched in made:
        watched.close()


@pytest.fixture(scope="session")
def make_workspace():
    """Make a workspace in a new folder."""
    return Workspace


class RayCluster:
    """Raylets of this machine as children of this process: a head, and nodes that are added.

    Attributes:
        ray: Ray's own test cluster.
        address: for `dpray run --address`.
        home: of everything on it, where clients keep their journals.
    """

    def __init__(self, folder, cpus: int) -> None:
        from ray.cluster_utils import Cluster

        self._node = {"num_cpus": cpus, "object_store_memory": 128 * 1024**2}
        head = {**self._node, "include_dashboard": False, "temp_dir": folder}
        self.ray = Cluster(initialize_head=True, head_node_args=head)
        self.address, self.home = self.ray.address, Path(folder) / "home"

    def run(self, document, population: str) -> dict[str, Any]:
        """How to watch a run of this document on it; of a population of its own, since its journals are."""
        return {
            "document": {**document, "population": {"name": population}},
            "options": ("--address", self.address),
            "sites": [self.home / "dpray-sites" / population],
        }

    def grow(self):
        """Add a node; a machine that is busy may need a second try."""
        for last in (False, False, True):
            try:
                return self.ray.add_node(**self._node)
            except Exception:
                if last:
                    raise
        raise AssertionError


@pytest.fixture
def cluster(request, monkeypatch):
    """A head with so many CPUs (2, if the test does not say)."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    folder = tempfile.mkdtemp(prefix="dpr", dir="/tmp")
    monkeypatch.setenv("HOME", f"{folder}/home")
    made = RayCluster(folder, getattr(request, "param", 2))
    yield made
    made.ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def workers(process, kind: str) -> list[int]:
    """Process ids of a command's Ray actors of one class."""
    found = []
    for pid in members(process.pid):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(f"ray::{kind}".encode()):
                found.append(pid)
    return found
