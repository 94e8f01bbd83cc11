"""A new store appears whole: killed makers, hurried readers and other makers never meet a half-made one."""

import os
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from dpray.platform.tracking.new_store import ensure_store

MAKE = """
import sys
from pathlib import Path
from dpray.platform.tracking.new_store import ensure_store
import mlflow.store.tracking.sqlalchemy_store
print("ready", flush=True)
sys.stdin.readline()
ensure_store(Path(sys.argv[1]))
"""


def maker(path):
    command = [sys.executable, "-c", MAKE, str(path)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


def go(process):
    process.stdin.write("go\n")
    process.stdin.flush()


def tables(path):
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
        return {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def experiments(path):
    from mlflow import MlflowClient

    return [each.name for each in MlflowClient(f"sqlite:///{path}").search_experiments()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "mlflow.db"


def test_a_new_store_is_whole_and_leaves_nothing_beside_it(path):
    ensure_store(path)
    assert [each.name for each in path.parent.iterdir()] == ["mlflow.db"]
    assert experiments(path) == ["Default"]


def test_it_is_made_again_by_the_same_process_if_it_was_removed(path):
    ensure_store(path)
    whole = tables(path)
    path.unlink()
    ensure_store(path)
    assert tables(path) == whole


def test_a_file_that_is_there_is_left_as_it_is(path):
    path.parent.mkdir()
    path.write_bytes(b"somebody's")
    ensure_store(path)
    assert path.read_bytes() == b"somebody's"


def test_killed_while_it_makes_the_tables_it_leaves_no_store_and_the_next_one_is_whole(path):
    path.parent.mkdir()
    process = maker(path)
    partial = path.parent / ".mlflow.db.new"
    go(process)
    deadline = time.monotonic() + 60
    while not (partial.exists() and partial.stat().st_size > 0):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(30)
    assert partial.exists()  # it was killed on the way
    assert not path.exists()
    ensure_store(path)
    assert [each.name for each in path.parent.iterdir()] == ["mlflow.db"]
    assert experiments(path) == ["Default"]


def test_makers_at_once_make_one_store_and_a_reader_never_sees_a_part(path):
    path.parent.mkdir()
    makers = [maker(path) for _ in range(2)]
    for process in makers:
        go(process)
    seen = []
    while any(process.poll() is None for process in makers):
        if path.exists():
            seen.append((path.stat().st_ino, frozenset(tables(path))))
        time.sleep(0.002)
    assert [process.returncode for process in makers] == [0, 0]
    assert set(seen) <= {(path.stat().st_ino, frozenset(tables(path)))}
    assert {"experiments", "runs", "alembic_version"} <= tables(path)
    assert experiments(path) == ["Default"]


def test_a_folder_that_cannot_be_written_is_said(path):
    path.parent.write_text("in the way")
    with pytest.raises(OSError, match="exists"):
        ensure_store(path)
