"""Drivers that die, that are stopped and come back, and whose clock is set back."""

import collections
import contextlib
import os
import signal
import sqlite3
import sys
import time

import pytest

from .conftest import FEDERATED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

KILLS = int(os.environ.get("DPRAY_TEST_KILLS", "40"))
"""How many times the driver is killed."""


@pytest.mark.fault("driver killed, search and training")
@pytest.mark.parametrize("cluster", [8], indirect=True)
def test_a_driver_may_die_at_any_moment(watch, row, dice, cluster):
    """Two kills of three follow an entry of the ledger within 20 ms; the others come at any time after its lease.

    On a cluster that goes on, so that a try takes less long; a dead driver's clients may still be busy when it is
    followed by the next one.
    """
    moments = collections.Counter()
    while row.faults < KILLS:
        watched = watch(**cluster.run(FEDERATED, f"people-{row.runs}"))
        while row.faults < KILLS:
            process, before = watched.begin(), watched.entries
            alive = watched.reach(process, lambda before=before, watched=watched: watched.entries > before)
            if dice.random() < 2 / 3:
                target = watched.entries + dice.randint(0, 9)
                alive = watched.reach(process, lambda target=target, watched=watched: watched.entries >= target)
                time.sleep(dice.uniform(0, 0.02))
            else:
                moment = time.monotonic() + dice.uniform(0, 8)
                alive = watched.reach(process, lambda moment=moment: time.monotonic() >= moment)
            if not alive:
                break
            watched.kill(process)
            moments[watched.newest()] += 1
        watched.settle()
    found = ", ".join(f"{state} {number}" for state, number in sorted(moments.items()))
    row.notes.append(f"state of the newest release at the kills: {found}")
    assert len(moments) > 1, "all kills came at the same kind of moment"


@pytest.mark.fault("driver stopped, replaced and woken")
def test_a_driver_that_wakes_after_it_was_replaced_ends_itself(watch, row, dice):
    """Its lease is old: neither ledger nor clients take anything from it, and it says so."""
    watched = watch()
    zombie, after = watched.begin(), dice.randint(2, 9)
    assert watched.reach(zombie, lambda: watched.stored >= after)
    stop_outside_a_transaction(watched, zombie)
    row.faults += 1
    successor = watched.ended(watched.begin())
    assert successor.code == 0, successor.stderr
    os.kill(zombie.pid, signal.SIGCONT)
    woken = watched.ended(zombie)
    assert woken.code == 3, woken.stderr
    assert "opened" in woken.stderr
    assert "Traceback" not in woken.stderr
    watched.settle()


def stop_outside_a_transaction(watched, process):
    """SIGSTOP; a process that holds the ledger's write lock is woken for a moment: nobody else could go on."""
    place = watched.url.removeprefix("sqlite:///")
    while True:
        os.kill(process.pid, signal.SIGSTOP)
        with contextlib.closing(sqlite3.connect(place, timeout=0.2, isolation_level=None)) as database:
            try:
                database.execute("BEGIN IMMEDIATE")
                database.execute("ROLLBACK")
                return
            except sqlite3.OperationalError:
                os.kill(process.pid, signal.SIGCONT)
                time.sleep(0.003)


CLOCK = """
import os, sys, time
from datetime import datetime, timedelta

BACK, FLAG = 400 * 86400, os.environ["DPRAY_TEST_CLOCK"]
now = time.time


def back():
    return BACK if os.path.exists(FLAG) else 0


class Clock(datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.now(tz) - timedelta(seconds=back())


time.time = lambda: now() - back()
import dpray.platform.privacy.ledger.chain as chain

chain.datetime = Clock
from dpray.experiments.cli import main

main()
"""


@pytest.mark.fault("clock set back by 400 days")
def test_a_clock_that_is_set_back_changes_nothing(watch, row, dice, monkeypatch):
    """In the driver, during training; the ledger's entries then say so, and their order is that of the chain."""
    watched = watch()
    flag = watched.workspace.folder / "back"
    monkeypatch.setenv("DPRAY_TEST_CLOCK", str(flag))
    watched.workspace.program = [sys.executable, "-c", CLOCK]
    process, after = watched.begin(), dice.randint(1, 9)
    assert watched.reach(process, lambda: watched.stored >= after)
    flag.touch()
    row.faults += 1
    ended = watched.ended(process)
    assert ended.code == 0, ended.stderr
    times = [at for (at,) in watched.query("SELECT at FROM entries ORDER BY sequence")]
    assert times[-1] < times[0]
    watched.settle()
