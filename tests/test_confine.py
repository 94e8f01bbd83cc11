"""User code on private data: an ordinary answer comes out and nothing else."""

import logging
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from dpray.platform.confine import (
    EVERYONE,
    PATIENCE,
    RESTART,
    Confinement,
    Marker,
    brief,
    deaths_at_most,
    hushed,
    slowest,
)

CANARY = "canary-7141"


class UnreadError(Exception):
    """An exception that notices when somebody reads it."""

    read = 0

    def __str__(self):
        UnreadError.read += 1
        return CANARY

    __repr__ = __str__


def raising(error):
    def call():
        raise error

    return call


ERRORS = [ValueError(CANARY), SystemExit(CANARY), KeyboardInterrupt(), MemoryError(), UnreadError()]


@pytest.mark.parametrize("error", ERRORS)
def test_whatever_is_raised_is_no_answer_and_is_not_read(error):
    assert Confinement("key").run("a", raising(error)) is None
    assert UnreadError.read == 0


def test_endless_recursion_is_no_answer():
    def call():
        return call()

    assert Confinement("key").run("a", call) is None


def test_a_result_is_handed_through():
    assert Confinement("key").run("a", lambda: 3.5) == 3.5


def test_the_marker_names_the_client_while_its_code_runs_and_nobody_afterwards(tmp_path):
    marker, seen = Marker(tmp_path / "running"), []
    confinement = Confinement("key", marker)
    confinement.run("a", lambda: seen.append(marker.left()))
    confinement.run("b", raising(ValueError()))
    assert seen == [("key", "a")]
    assert marker.left() is None
    assert stat.S_IMODE((tmp_path / "running").stat().st_mode) == 0o600


def test_a_marker_outlives_its_process(tmp_path):
    code = f"""
import os
from pathlib import Path
from dpray.platform.confine import Confinement, Marker
Confinement("key", Marker(Path({str(tmp_path / "running")!r}))).run("a", lambda: os._exit(3))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 3
    assert Marker(tmp_path / "running").left() == ("key", "a")


def test_code_that_killed_the_process_twice_is_not_run_again():
    ran = []
    Confinement("key", deaths={"a": 1}).run("a", lambda: ran.append(1))
    Confinement("key", deaths={"a": 2}).run("a", lambda: ran.append(2))
    assert ran == [1]


def test_one_death_ends_passes_over_everyone():
    assert Confinement("key", deaths={EVERYONE: 1}).run(EVERYONE, lambda: 1) is None
    assert Confinement("key", deaths={EVERYONE: 1}).run("a", lambda: 1) == 1


def test_other_clients_deaths_silence_nobody():
    deaths = {f"c{index}": 9 for index in range(50)}
    assert Confinement("key", deaths=deaths).run("another", lambda: 1) == 1


@pytest.mark.parametrize(
    ("change", "read"),
    [
        (lambda: np.seterr(all="raise"), np.geterr),
        (lambda: np.random.seed(1), lambda: list(np.random.get_state()[1])),  # noqa: NPY002
        (lambda: random.seed(1), random.getstate),
        (lambda: warnings.simplefilter("error"), lambda: list(warnings.filters)),
        (lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN), lambda: signal.getsignal(signal.SIGTERM)),
        (lambda: os.environ.update(CANARY="1"), lambda: dict(os.environ)),
        (lambda: os.chdir("/"), os.getcwd),
    ],
)
def test_what_a_call_changes_in_its_process_is_put_back(change, read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = read()
    Confinement("key").run("a", change)
    assert read() == before


def test_the_time_limits_leave_room_for_all_that_user_code_can_do():
    assert deaths_at_most(3) == 1 + 3 * PATIENCE
    assert slowest(3, 2.0) == (1 + deaths_at_most(3)) * (3 * 2.0 + RESTART)


def test_code_that_never_returns_ends_its_process_at_the_limit():
    code = """
from dpray.platform.confine import Confinement
confinement = Confinement("key", limit=0.2)
assert confinement.run("a", lambda: 1) == 1
def forever():
    while True:
        pass
confinement.run("b", forever)
"""
    start = time.monotonic()
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGALRM
    assert time.monotonic() - start < 30


def test_a_limit_that_was_not_reached_has_no_effect_later():
    confinement = Confinement("key", limit=20.0)  # an alarm that rang would end this process
    confinement.run("a", lambda: 1)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


@pytest.mark.parametrize(("silenced", "heard"), [("silence()", False), ("", True)])
def test_a_silenced_process_says_nothing_on_any_channel(silenced, heard):
    code = f"""
import logging, os, sys, warnings
from dpray.platform.confine import silence
{silenced}
print("{CANARY}")
print("{CANARY}", file=sys.stderr)
os.write(1, b"{CANARY}"); os.write(2, b"{CANARY}")
os.system("echo {CANARY}")
warnings.warn("{CANARY}")
logging.getLogger("x").error("{CANARY}")
raise SystemExit("{CANARY}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (CANARY in done.stdout + done.stderr) is heard


HUSHED = f"""
import atexit, ctypes, logging, os, sys, threading, warnings
from dpray.platform.confine import Confinement, hushed
libc, handler = ctypes.CDLL(None), logging.StreamHandler()
logging.getLogger("kept").addHandler(handler)
before = sys.stdout, sys.stderr
def call():
    print("{CANARY}")
    before[0].write("{CANARY}"); before[1].write("{CANARY}")
    libc.puts(b"{CANARY}")
    os.write(1, b"{CANARY}"); os.write(2, b"{CANARY}")
    os.system("echo {CANARY}")
    warnings.warn("{CANARY}")
    logging.getLogger("kept").error("{CANARY}")
    raise SystemExit("{CANARY}")
"""


@pytest.mark.parametrize(("block", "heard"), [("hushed()", False), ("nullcontext()", True)])
def test_a_hushed_block_says_nothing_and_the_process_speaks_again_after_it(block, heard):
    code = f"""{HUSHED}
from contextlib import nullcontext
with {block}:
    Confinement("key").run("a", call)
assert (sys.stdout, sys.stderr) == before
print("out", flush=True)
logging.getLogger("kept").error("err")
libc.puts(b"c")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (CANARY in done.stdout + done.stderr) is heard
    assert "out" in done.stdout  # C's buffer may be written at the end only, after what Python says
    assert done.stdout.endswith("c\n")
    assert done.stderr.split()[-1] == "err"


def test_a_hushed_block_ends_as_it_began_when_something_is_raised():
    before, disabled = (sys.stdout, sys.stderr), logging.root.manager.disable
    with pytest.raises(ZeroDivisionError), hushed():
        raise ZeroDivisionError
    assert (sys.stdout, sys.stderr) == before
    assert logging.root.manager.disable == disabled


def test_code_is_confined_outside_the_main_thread_too():
    found = []
    thread = threading.Thread(target=lambda: found.append(Confinement("key").run("a", lambda: 3.5)))
    thread.start()
    thread.join()
    assert found == [3.5]


def test_a_working_folder_that_is_gone_does_not_raise_after_the_call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def moves_and_raises():
        folder = tmp_path / "gone"
        folder.mkdir()
        os.chdir(folder)
        folder.rmdir()
        raise RuntimeError("a private value")

    assert Confinement("key").run("client", moves_and_raises) is None
    assert Path.cwd() == tmp_path


def test_a_generator_that_was_replaced_is_put_back():
    before = np.random.get_bit_generator()
    state = np.random.get_state()[1].copy()  # noqa: NPY002

    def replaces():
        np.random.set_bit_generator(np.random.PCG64(1))
        np.random.random()  # noqa: NPY002
        return 1

    assert Confinement("key").run("client", replaces) == 1
    assert np.random.get_bit_generator() is before
    np.testing.assert_array_equal(np.random.get_state()[1], state)  # noqa: NPY002


def test_torchs_random_state_and_type_are_put_back():
    torch = pytest.importorskip("torch")
    before, kind = torch.get_rng_state(), torch.get_default_dtype()

    def draws():
        torch.rand(7)
        torch.set_default_dtype(torch.float64)
        os.umask(0o777)

    Confinement("key").run("client", draws)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() is kind
    mask = os.umask(0o022)
    os.umask(mask)
    assert mask != 0o777


def test_torchs_switches_are_put_back():
    import torch

    def call():
        torch.set_grad_enabled(False)
        torch.set_num_threads(1 + torch.get_num_threads())
        torch.autograd.set_detect_anomaly(True)
        torch.use_deterministic_algorithms(True)
        raise ValueError(CANARY)

    def switches():
        return (
            torch.is_grad_enabled(),
            torch.get_num_threads(),
            torch.is_anomaly_enabled(),
            torch.are_deterministic_algorithms_enabled(),
        )

    before = switches()
    assert Confinement("key").run("a", call) is None
    assert switches() == before


def test_a_death_is_counted_however_long_its_key_is(tmp_path):
    marker, key, client = Marker(tmp_path / "running"), "ключ" * 2000, "й" * 200
    seen = []
    Confinement(brief(key), marker).run(client, lambda: seen.append(marker.left()))
    assert seen == [(brief(key), client)]
    assert brief("short") == "short"
    assert brief(key) != brief(key + "1")
