"""Several processes on one ledger, and processes that are killed: the total is exact, and never over the budget."""

import subprocess
import sys

import pytest

from dpray.platform.privacy.budget import Budget

CHARGER = """
import sys
import numpy as np
from dpray.platform.privacy.ledger import BudgetExceeded, Ledger, ReleaseKey
from dpray.platform.privacy.mechanisms import ClippedSum, Unit
url, name, steps, quanta = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
mechanism = ClippedSum(1.0, Unit.RECORD, 2, 10)
run = Ledger(url).population("digits").run(name)
print("ready", flush=True)
sys.stdin.readline()
charged = 0
for step in range(steps):
    try:
        key = ReleaseKey("training", "clipped sum", step)
        release = run.release(key, {"step": step}, mechanism, quanta, lambda attempt: np.zeros(2))
        charged += release.first
    except BudgetExceeded:
        pass
print(charged, flush=True)
"""

KILLED = """
import os, signal, sys
import numpy as np
from dpray.platform.privacy.ledger import Ledger, ReleaseKey
from dpray.platform.privacy.mechanisms import ClippedSum, Unit
url, where = sys.argv[1], sys.argv[2]
mechanism = ClippedSum(1.0, Unit.RECORD, 2, 10)
run = Ledger(url).population("digits").run("killed")
key = ReleaseKey("training", "clipped sum", 0)
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
if where == "inside the charge":
    from dpray.platform.privacy.ledger import releasing
    record = releasing._record
    releasing._record = lambda *arguments: (record(*arguments), die())
attempt = run.charge(key, {}, mechanism, 1000)
if where == "before the value":
    die()
if where == "after the commitment":
    attempt.commit({"a", "b"})
    die()
if where == "inside the store":
    from dpray.platform.privacy.ledger import storing
    record = storing.record
    storing.record = lambda *arguments: (record(*arguments), die())
run.store(attempt, np.array([1.0, 2.0]))
die()
"""


def start(script, *arguments):
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def charge_together(place, processes, steps, quanta):
    children = [start(CHARGER, place.url, f"run-{number}", steps, quanta) for number in range(processes)]
    try:
        for child in children:
            assert child.stdout.readline() == "ready\n"
        for child in children:
            child.stdin.write("\n")
            child.stdin.flush()
        return [int(child.stdout.readline()) for child in children]
    finally:
        for child in children:
            child.stdin.close()
            child.stdout.close()
            child.wait(60)


@pytest.mark.timeout(120)
def test_processes_charge_one_population_to_an_exact_total(place, ledger, population, account):
    client = population.account("client", Budget(60, 1e-5))
    charged = charge_together(place, 5, 20, 7)
    assert charged == [20] * 5
    assert (account.spent, client.spent) == (5 * 20 * 7, 100 * 5 * 20 * 7)
    assert ledger.verify([ledger.head()]) == ()


@pytest.mark.timeout(120)
def test_processes_that_race_for_the_last_of_a_budget_never_exceed_it(place, ledger, account):
    quanta = account.budget.quanta // 33
    charged = charge_together(place, 4, 20, quanta)
    assert sum(charged) == 33
    assert account.spent == 33 * quanta <= account.budget.quanta
    assert ledger.verify() == ()


@pytest.mark.parametrize(
    ("where", "charged", "stored"),
    [
        ("inside the charge", False, False),
        ("before the value", True, False),
        ("after the commitment", True, False),
        ("inside the store", True, False),
        ("after the store", True, True),
    ],
)
def test_a_killed_process_has_charged_at_least_what_it_revealed_and_is_resumed_exactly(
    place, ledger, population, account, where, charged, stored
):
    import numpy as np

    from dpray.platform.privacy.ledger import ReleaseKey
    from dpray.platform.privacy.mechanisms import ClippedSum, Unit

    child = start(KILLED, place.url, where)
    child.stdin.close()
    child.stdout.close()
    assert child.wait(60) == -9
    key, calls = ReleaseKey("training", "clipped sum", 0), []
    assert account.spent == (1000 if charged else 0)
    resumed = population.run("killed")
    assert resumed.epoch == 2
    assert (resumed.stored(key) is not None) == stored

    def compute(attempt):
        calls.append(attempt.participants)
        return np.array([3.0, 4.0])

    release = resumed.release(key, {}, ClippedSum(1.0, Unit.RECORD, 2, 10), 1000, compute)
    assert release.value.tolist() == ([1.0, 2.0] if stored else [3.0, 4.0])
    assert release.first == (not stored)
    assert calls == ([] if stored else [frozenset({"a", "b"}) if where == "after the commitment" else None])
    assert account.spent == 1000
    assert [entry.kind for entry in account.history()].count("charge") == 1
    assert ledger.verify() == ()
