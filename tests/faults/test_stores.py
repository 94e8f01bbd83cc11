"""Where things are kept goes away in the middle of a run: PostgreSQL, MLflow's server, room on the disk."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from dpray.platform.privacy.ledger import Ledger
from tests.postgres import PostgresServer

from .conftest import FEDERATED, ROUNDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def postgres():
    """A server for this test alone."""
    pytest.importorskip("psycopg", reason="the PostgreSQL driver is not installed: pip install 'dpray[postgres]'")
    server = PostgresServer.installed()
    if server is None:
        pytest.skip("no PostgreSQL here (Debian: postgresql): no initdb found, or nobody it agrees to run as")
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.mark.fault("PostgreSQL stopped and started")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["in order", "as a crash"])
def test_the_ledgers_server_may_go_and_come_back(watch, row, dice, postgres, how):
    """A short absence is waited for; a long one stops the run with a sentence, and the next command goes on."""
    Ledger(postgres.url).close()  # on a server a ledger is made first
    watched = watch(ledger=postgres.url)
    process = watched.begin()
    for absence in (dice.uniform(0.2, 3), None):
        target = max(watched.entries, 8) + dice.randint(1, 8)
        assert watched.reach(process, lambda target=target: watched.entries >= target)
        postgres.stop(how)
        row.faults += 1
        if absence is None:
            break
        time.sleep(absence)
        postgres.start()
    stopped = watched.ended(process)
    postgres.start()
    assert stopped.code == 3, stopped.stderr
    assert "did not answer" in stopped.stderr
    assert "`dpray resume small` goes on" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    watched.settle()


@contextlib.contextmanager
def small_disk(size: str):
    """A file system of so many bytes, mounted for this test."""
    folder = Path(tempfile.mkdtemp(prefix="dpray-full-", dir="/tmp"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        folder.rmdir()
        pytest.skip("a file system that can run full is mounted for this test, which is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        folder.rmdir()


def fill(folder: Path) -> Path:
    """Take all the room there is."""
    filler = folder / "filler"
    with filler.open("wb") as file:
        while True:
            try:
                os.write(file.fileno(), b"\0" * 4096)
            except OSError:
                return filler


@pytest.mark.fault("disk full: the ledger's")
def test_the_ledgers_disk_may_run_full(watch, row, dice):
    with small_disk("2m") as disk:
        watched = watch(ledger=f"sqlite:///{disk / 'ledger.db'}")
        process, after = watched.begin(), dice.randint(1, 6)
        assert watched.reach(process, lambda: watched.stored >= after)
        filler = fill(disk)
        row.faults += 1
        stopped = watched.ended(process)
        assert stopped.code == 3, stopped.stderr
        assert "full" in stopped.stderr
        assert "`dpray resume small` goes on" in stopped.stderr
        assert "Traceback" not in stopped.stderr
        filler.unlink()
        watched.settle()
        watched.close()


@pytest.mark.fault("disk full: the clients' and the run's")
def test_every_disk_of_a_run_may_run_full(watch, row, dice):
    """Ledger, journals, checkpoints and the spool of MLflow's metrics, all in one workspace without room."""
    with small_disk("8m") as disk:
        watched = watch({**FEDERATED, "tracking": {"uri": "sqlite:///mlflow.db"}}, folder=disk)
        process, after = watched.begin(), dice.randint(2, 8)
        assert watched.reach(process, lambda: watched.stored >= after)
        filler = fill(disk)
        row.faults += 1
        stopped = watched.ended(process)
        assert stopped.code == 3, stopped.stderr
        assert "`dpray resume small` goes on" in stopped.stderr
        assert "Traceback" not in stopped.stderr
        filler.unlink()
        watched.settle()
        watched.close()


class Mlflow:
    """MLflow's server on a port of its own, over one store."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._process = folder, None
        folder.mkdir()
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port = listener.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        store = ["--backend-store-uri", f"sqlite:///{self.folder / 'mlflow.db'}"]
        files = ["--artifacts-destination", self.folder / "files"]
        where = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        command = [sys.executable, "-m", "mlflow", "server", *store, *files, *where]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 120
        while socket.socket().connect_ex(("127.0.0.1", self.port)):
            assert self._process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)

    def kill(self) -> None:
        """SIGKILL for the server and its workers."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)
            self._process = None


@pytest.fixture
def mlflow(tmp_path):
    server = Mlflow(tmp_path / "mlflow")
    server.start()
    yield server
    server.kill()
    shutil.rmtree(server.folder, ignore_errors=True)


@pytest.mark.fault("MLflow's server killed, back later")
def test_mlflow_may_be_away_for_the_middle_of_a_run(watch, row, dice, mlflow):
    """The run does not wait; what MLflow has missed it has after its return, every round of it."""
    watched = watch({**FEDERATED, "tracking": {"uri": mlflow.uri}})
    process, after = watched.begin(), dice.randint(0, 6)
    assert watched.reach(process, lambda: watched.stored >= after and watched.entries > 4)
    mlflow.kill()
    row.faults += 1
    ended = watched.ended(process)
    assert ended.code == 0, ended.stderr
    mlflow.start()
    watched.settle()
    assert rounds_shown(mlflow.uri) == dict.fromkeys(range(1, ROUNDS + 1), 1)


def rounds_shown(uri):
    """How many values of ε each round of the training has in MLflow."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    runs = client.search_runs([client.get_experiment_by_name("dpray").experiment_id])
    assert {run.info.status for run in runs} == {"FINISHED"}
    (training,) = [run for run in runs if run.data.tags["dpray.part"] == "training"]
    steps = [metric.step for metric in client.get_metric_history(training.info.run_id, "privacy/epsilon")]
    return {step: steps.count(step) for step in sorted(set(steps))}
