"""A resumed run is the same run of MLflow, and nothing in it is there twice."""

import logging
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from dpray.platform.tracking import Tracker, replay
from dpray.platform.tracking.spool import Spool

ROUNDS = [(step, float(step)) for step in range(6)]


def rounds(view, first, last):
    for step in range(first, last):
        view.public({"round/clients": step}, step)


def test_a_killed_run_is_continued_in_place(store, tmp_path):
    """SIGKILL after round 3, of which MLflow may know nothing; the resumed run logs rounds 2 to 5."""
    script = f"""
    import os, signal
    from pathlib import Path
    from dpray.platform.tracking import Tracker
    tracker = Tracker(Path({str(tmp_path)!r}), "killed", uri={store.uri!r}, interval=60)
    tracker.params({{"rounds": 6}})
    search = tracker.child("search")
    search.finish()
    training = tracker.child("training")
    training.public({{"round/clients": 0}}, 0)
    assert tracker.flush(60)
    for step in range(1, 4):
        training.public({{"round/clients": step}}, step)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    before = store.runs("killed")
    assert store.points(before["training"][0], "round/clients") == ROUNDS[:1]
    assert before["training"][2] == "RUNNING"
    with Tracker(tmp_path, "killed", uri=store.uri, resume=True) as tracker:
        tracker.params({"rounds": 6})
        tracker.child("search").finish()
        rounds(tracker.child("training"), 2, 6)
    after = store.runs("killed")
    assert {part: row[0] for part, row in after.items()} == {part: row[0] for part, row in before.items()}
    assert store.points(after["training"][0], "round/clients") == ROUNDS
    assert {row[2] for row in after.values()} == {"FINISHED"}


def test_a_finished_run_that_is_resumed_is_running_until_it_ends(store, tmp_path, tracker_of):
    with Tracker(tmp_path / "spool", "again", uri=store.uri) as tracker:
        tracker.child("training").finish()
    second = tracker_of("again", store.uri, resume=True)
    second.child("training")
    assert second.flush(30)
    assert {part: row[2] for part, row in store.runs("again").items()} == dict.fromkeys(
        ("experiment", "training"), "RUNNING"
    )
    assert second.finish()
    assert {row[2] for row in store.runs("again").values()} == {"FINISHED"}


def test_without_its_spool_a_resumed_run_is_found_by_its_name(store, tmp_path):
    with Tracker(tmp_path / "a", "lost spool", uri=store.uri) as tracker:
        rounds(tracker.child("training"), 0, 3)
    before = store.runs("lost spool")
    for _ in range(2):
        with Tracker(tmp_path / "b", "lost spool", uri=store.uri, resume=True) as tracker:
            rounds(tracker.child("training"), 3, 6)
    after = store.runs("lost spool")
    assert {part: row[0] for part, row in after.items()} == {part: row[0] for part, row in before.items()}
    assert store.points(after["training"][0], "round/clients") == ROUNDS


def test_another_run_of_the_same_name_is_another_run(store, tmp_path):
    for folder in ("a", "b"):
        with Tracker(tmp_path / folder, "namesake", uri=store.uri) as tracker:
            tracker.params({"folder": folder})
    assert len(store.rows("SELECT 1 FROM tags WHERE key = 'dpray.run' AND value = 'namesake'")) == 2
    assert sorted(store.rows("SELECT value FROM params WHERE key = 'folder'")) == [("a",), ("b",)]


def test_sending_everything_again_changes_nothing(store, tmp_path):
    with Tracker(tmp_path, "twice", uri=store.uri) as tracker:
        tracker.tags({"unit": "record"})
        tracker.params({"rounds": 6})
        tracker.artifact_text("a/b.txt", "text")
        rounds(tracker.child("training"), 0, 6)
    before = store.runs("twice")
    for _ in range(2):
        Spool(tmp_path).advance(0)
        assert replay(tmp_path, store.uri)
    assert store.runs("twice") == before
    assert store.points(before["training"][0], "round/clients") == ROUNDS
    assert store.pairs("tags", before["experiment"][0])["unit"] == "record"


def test_a_store_that_was_lost_is_filled_again(tmp_path, store_at):
    first, second = (f"sqlite:///{tmp_path}/{name}.db" for name in ("first", "second"))
    with Tracker(tmp_path / "spool", "moved", uri=first) as tracker:
        rounds(tracker.child("training"), 0, 3)
    with Tracker(tmp_path / "spool", "moved", uri=second, resume=True) as tracker:
        rounds(tracker.child("training"), 3, 6)
    store = store_at(tmp_path / "second.db")
    assert store.points(store.runs("moved")["training"][0], "round/clients") == ROUNDS


@pytest.mark.parametrize("deleted", ["experiment", "training"])
def test_a_run_deleted_meanwhile_is_made_again_with_all_it_had(store, tracker_of, deleted):
    from mlflow import MlflowClient

    name = f"deleted {deleted}"
    tracker = tracker_of(name, store.uri)
    training = tracker.child("training")
    rounds(training, 0, 3)
    assert tracker.flush(30)
    MlflowClient(store.uri).delete_run(store.runs(name)[deleted][0])
    rounds(training, 3, 6)
    assert tracker.finish()
    assert store.points(store.runs(name)["training"][0], "round/clients") == ROUNDS


def test_what_mlflow_refuses_is_named_and_does_not_stop_the_rest(store, tmp_path, caplog):
    """A parameter that is already there with another value, which only another spool can bring about."""
    with Tracker(tmp_path / "one", "conflict", uri=store.uri) as one:
        one.params({"rounds": 5, "clip": 1})
    other = Tracker(tmp_path / "other", "conflict", uri=store.uri, resume=True)
    with caplog.at_level(logging.WARNING, logger="dpray.tracking"):
        other.params({"clip": 1, "rounds": 987654, "clients": 20})
        rounds(other, 0, 6)
        assert other.finish()
    root = store.runs("conflict")["experiment"][0]
    assert store.pairs("params", root) == {"rounds": "5", "clip": "1", "clients": "20"}
    assert store.points(root, "round/clients") == ROUNDS
    [warning] = caplog.messages
    assert "rounds" in warning
    assert "987654" not in warning


def test_replay_needs_a_spool(tmp_path, store):
    assert replay(tmp_path / "nothing", store.uri) is False
    assert os.listdir(tmp_path) == []


def test_a_part_deleted_between_two_processes_is_made_again_with_all_it_had(store, tmp_path):
    from mlflow import MlflowClient

    with Tracker(tmp_path, "pruned", uri=store.uri) as tracker:
        rounds(tracker.child("training"), 0, 3)
        tracker.child("training").finish()
    MlflowClient(store.uri).delete_run(store.runs("pruned")["training"][0])
    with Tracker(tmp_path, "pruned", uri=store.uri, resume=True) as tracker:
        rounds(tracker.child("training"), 3, 6)
    runs = store.runs("pruned")
    assert store.points(runs["training"][0], "round/clients") == ROUNDS
    assert {row[2] for row in runs.values()} == {"FINISHED"}
