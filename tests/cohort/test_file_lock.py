"""The lock of a site's file: between processes, and between the threads and opens of one."""

import fcntl
import multiprocessing
import os
import signal
import threading
import time

from dpray.platform.cohort.file_lock import FileLock

FORK = multiprocessing.get_context("fork")
PATIENCE = 60.0
"""Seconds after which what should come at once counts as waiting for ever."""


def free_for_others(path):
    """Whether another process could have the lock now."""

    def attempt():
        file = os.open(path, os.O_RDWR)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os._exit(1)
        os._exit(0)

    other = FORK.Process(target=attempt)
    other.start()
    other.join(PATIENCE)
    return other.exitcode == 0


def test_one_process_at_a_time(tmp_path):
    lock = FileLock(tmp_path / "lock")
    assert free_for_others(tmp_path / "lock")
    with lock.held():
        assert not free_for_others(tmp_path / "lock")
    assert free_for_others(tmp_path / "lock")


def test_two_opens_of_one_process_exclude_each_other(tmp_path):
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    inside = threading.Event()

    def work():
        with second.held():
            inside.set()

    with first.held():
        thread = threading.Thread(target=work)
        thread.start()
        assert not inside.wait(0.2)
    thread.join(PATIENCE)
    assert inside.is_set()


def test_locks_on_two_files_do_not_wait_for_each_other(tmp_path):
    with FileLock(tmp_path / "one").held(), FileLock(tmp_path / "two").held():
        assert not free_for_others(tmp_path / "one")
        assert not free_for_others(tmp_path / "two")


def test_closing_one_open_does_not_drop_the_lock_of_another(tmp_path):
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    with first.held():
        closing = threading.Thread(target=second.close)
        closing.start()
        assert not free_for_others(tmp_path / "lock")
    closing.join(PATIENCE)
    assert not closing.is_alive()
    second.close()
    first.close()


def test_a_child_may_open_its_own_while_a_thread_of_the_parent_holds_it(tmp_path):
    lock, done = FileLock(tmp_path / "lock"), tmp_path / "done"

    def work():
        with FileLock(tmp_path / "lock").held():
            done.touch()

    with lock.held():
        child = FORK.Process(target=work)
        child.start()
        child.join(0.2)
        assert not done.exists()
    child.join(PATIENCE)
    assert done.exists()


def test_a_forked_child_that_outlives_a_killed_holder_keeps_nobody_waiting(tmp_path):
    """As a host does that is killed in a transaction after user code has forked."""
    left, path = tmp_path / "child", tmp_path / "lock"
    host = os.fork()  # not a Process: waiting for one ends when its children have, too
    if not host:
        try:
            _die_in_the_lock(path, left)
        finally:
            os._exit(1)
    _, status = os.waitpid(host, 0)
    child = int(left.read_text())
    try:
        assert os.WTERMSIG(status) == signal.SIGKILL
        os.kill(child, 0)  # it is still there
        assert free_for_others(path)
    finally:
        os.kill(child, signal.SIGKILL)


def _die_in_the_lock(path, left):
    lock = FileLock(path)
    child = os.fork()
    if not child:
        time.sleep(2 * PATIENCE)
        os._exit(0)
    with lock.held():
        left.write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)
