"""MLflow away, hanging, locked or coming and going: one warning, no waiting, nothing lost, nothing twice."""

import logging
import socket
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from dpray.experiments.ui import running
from dpray.platform.tracking import Unreachable, anchors, replay

POINTS = [(step, float(step)) for step in range(20)]


def rounds(view, first, last):
    for step in range(first, last):
        view.public({"round/clients": step}, step)


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture
def closed_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def free_port(closed_port):
    return closed_port


def test_nobody_listens(closed_port, tracker_of, warnings):
    """The run warns once, is not held up, and keeps everything."""
    tracker = tracker_of("away", f"http://me:hunter2@127.0.0.1:{closed_port}")
    start = time.monotonic()
    for step in range(20):
        rounds(tracker, step, step + 1)
        assert not tracker.flush(30)
    assert time.monotonic() - start < 30  # of the 600 seconds that it might have waited
    assert not tracker.finish()
    [warning] = warnings()
    assert "cannot be used (Connection refused). The run goes on" in warning
    assert str(tracker.spool_path) in warning
    assert "hunter2" not in warning
    assert tracker.spool_path.read_text().count('"round/clients"') == 20


def test_a_round_does_not_wait_for_mlflow(closed_port, tracker_of):
    """Logging costs less than the 4 to 5 ms of one call of MLflow, whether it is there or not."""
    tracker = tracker_of("quick", f"http://127.0.0.1:{closed_port}")
    costs = []
    for step in range(300):
        start = time.perf_counter()
        tracker.released({"round/gradient_norm": 1.0, "evaluation/accuracy": 0.5}, step)
        costs.append(time.perf_counter() - start)
    assert sorted(costs)[len(costs) // 4] < 4e-3  # of the quiet quarter: machines are shared


def test_a_server_that_hangs_is_not_waited_for(tracker_of, warnings):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracker = tracker_of("hanging", f"http://127.0.0.1:{silent.getsockname()[1]}")
        rounds(tracker, 0, 20)
        start = time.monotonic()
        assert not tracker.flush(1)
        assert not tracker.finish(timeout=1)
        assert time.monotonic() - start < 30  # MLflow itself would wait for minutes
    [warning] = warnings()
    assert "did not answer within 1 s" in warning


def test_what_a_run_left_is_sent_later(closed_port, store, tmp_path, tracker_of):
    away = tracker_of("later", f"http://127.0.0.1:{closed_port}")
    rounds(away.child("training"), 0, 20)
    assert not away.finish(timeout=5)
    with pytest.raises(Unreachable):
        replay(tmp_path / "spool", f"http://127.0.0.1:{closed_port}")
    assert replay(tmp_path / "spool", store.uri)
    runs = store.runs("later")
    assert store.points(runs["training"][0], "round/clients") == POINTS
    assert {row[2] for row in runs.values()} == {"FINISHED"}


def test_anchors_of_a_store_that_is_away(closed_port):
    with pytest.raises(Unreachable, match="refused"):
        anchors(f"http://127.0.0.1:{closed_port}", "dpray", ["a"])


def test_a_locked_store_is_written_when_it_is_free(store, tracker_of, warnings):
    """A lock of a second is waited out by the courier without a word; a longer one is warned of, once."""
    tracker = tracker_of("locked", store.uri)
    assert tracker.flush(60)
    holder = sqlite3.connect(store.path, isolation_level=None, check_same_thread=False)
    holder.execute("BEGIN IMMEDIATE")
    release = threading.Timer(1.0, lambda: holder.execute("ROLLBACK"))
    release.start()
    rounds(tracker, 0, 10)
    assert tracker.flush(30)
    assert warnings() == []
    release.join()

    holder.execute("BEGIN IMMEDIATE")
    rounds(tracker, 10, 20)
    start = time.monotonic()
    assert not tracker.flush(60)
    assert time.monotonic() - start < 60  # it is told that the store is locked, and does not wait on
    assert not tracker.flush(60)
    assert [message for message in warnings() if "locked by another writer" in message] == warnings()
    assert len(warnings()) == 1
    holder.execute("ROLLBACK")
    holder.close()
    assert tracker.finish()
    assert "is back" in warnings()[-1]
    assert store.points(store.runs("locked")["experiment"][0], "round/clients") == POINTS


def test_writers_at_once_all_arrive(store, tmp_path):
    """Three processes on one sqlite store, each with its own run."""
    script = """
    import sys
    from pathlib import Path
    from dpray.platform.tracking import Tracker
    folder, name, uri = sys.argv[1:]
    tracker = Tracker(Path(folder) / name, name, uri=uri, interval=0.01, batch=3)
    for step in range(60):
        tracker.public({"round/clients": step}, step)
        if step % 5 == 0:
            tracker.flush(60)
    sys.exit(not tracker.finish(timeout=120))
    """
    names = [f"writer {n}" for n in range(3)]
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    writers = [subprocess.Popen([*command, name, store.uri]) for name in names]
    assert [writer.wait(200) for writer in writers] == [0, 0, 0]
    expected = [(step, float(step)) for step in range(60)]
    for name in names:
        assert store.points(store.runs(name)["experiment"][0], "round/clients") == expected


@pytest.mark.slow
def test_a_server_stopped_midway_and_started_again(store, tmp_path, free_port, tracker_of, warnings):
    assert tracker_of("before", store.uri, tmp_path / "before").finish()
    uri = f"http://127.0.0.1:{free_port}"
    with running(store.uri, port=free_port):
        tracker = tracker_of("midway", uri)
        training = tracker.child("training")
        rounds(training, 0, 5)
        tracker.artifact_text("privacy/statement.txt", "spent")
        assert tracker.flush(60)
        assert warnings() == []
    rounds(training, 5, 15)
    start = time.monotonic()
    assert not tracker.flush(60)
    assert not tracker.flush(60)
    assert time.monotonic() - start < 60
    assert len(warnings()) == 1
    with running(store.uri, port=free_port):
        rounds(training, 15, 20)
        assert tracker.finish(timeout=60)
    assert "is back" in warnings()[-1]
    assert len(warnings()) == 2
    runs = store.runs("midway")
    assert store.points(runs["training"][0], "round/clients") == POINTS
    assert {row[2] for row in runs.values()} == {"FINISHED"}
