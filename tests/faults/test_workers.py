"""Processes and nodes of the cluster that die: clients' hosts, trials, the curator, a whole worker node."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from .conftest import CENTRAL, FEDERATED, workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def changed(section, **settings):
    """The small recipe with some settings of one section changed."""
    return {**FEDERATED, section: {**FEDERATED[section], **settings}}


def end(row, pids):
    """SIGKILL."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            row.faults += 1


def some(dice, pids):
    """At least one of them."""
    return dice.sample(pids, dice.randint(1, len(pids))) if pids else []


@pytest.mark.fault("client actors killed")
@pytest.mark.parametrize(
    "document",
    [
        pytest.param(changed("cohort", secure_sum="masked"), id="masked"),
        pytest.param(changed("training", regime="local"), id="local"),
        pytest.param(changed("training", regime="central"), id="central"),
    ],
)
def test_hosts_of_clients_may_die(watch, row, dice, document):
    """One death in the search, four in training at random entries of the ledger; the driver never notices."""
    watched = watch(document)
    process = watched.begin()
    assert watched.reach(process, lambda: watched.entries >= 5 and workers(process, "ClientHost"))
    time.sleep(dice.uniform(0, 2))
    end(row, some(dice, workers(process, "ClientHost")))
    for _ in range(4):
        target = max(watched.entries, 8) + dice.randint(1, 5)
        if not watched.reach(process, lambda target=target: watched.entries >= target):
            break
        time.sleep(dice.uniform(0, 0.02))
        end(row, some(dice, workers(process, "ClientHost")))
    ended = watched.ended(process)
    assert ended.code == 0, ended.stderr
    assert row.faults >= 3
    watched.settle()


@pytest.mark.fault("curator killed")
def test_the_curator_may_die(watch, row, dice):
    """Its losses die with it: they are evaluated again, and no release is charged twice."""
    watched = watch(CENTRAL)
    process = watched.begin()
    for _ in range(3):
        target = max(watched.entries, 5) + dice.randint(1, 4)
        if not watched.reach(process, lambda target=target: watched.entries >= target):
            break
        time.sleep(dice.uniform(0, 0.5))
        end(row, workers(process, "CuratorActor"))
    ended = watched.ended(process)
    assert ended.code == 0, ended.stderr
    assert row.faults >= 2
    watched.settle()


@pytest.mark.fault("worker node killed, another one added")
def test_a_worker_node_may_die_in_a_round(watch, row, dice, cluster):
    """Raylet and workers at once, within a round; its hosts are made anew on the next node, from their journal."""
    node = cluster.grow()
    watched = watch(**cluster.run(changed("cohort", actors=4, clients=8), "people"))
    process, after = watched.begin(), dice.randint(9, 30)
    assert watched.reach(process, lambda: watched.entries >= after)
    end(row, family(node))
    cluster.ray.remove_node(node, allow_graceful=False)
    time.sleep(dice.uniform(0, 3))
    assert process.poll() is None, "a round went on without half of its clients"
    cluster.grow()
    ended = watched.ended(process)
    assert ended.code == 0, ended.stderr
    row.faults = 1
    watched.settle()


def family(node) -> list[int]:
    """The raylet of a node and its descendants."""
    pids = [info.process.pid for info in node.all_processes["raylet"]]
    parents = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
    for pid in pids:
        pids += [child for child, parent in parents.items() if parent == pid and child not in pids]
    return pids
