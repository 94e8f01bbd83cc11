"""What owns the ledger on the head is killed: a job's driver, the actor that Ray has look after it, the whole machine.

A run's driver, on the head, is the only process that has its ledger open. The run is watched as in `tests/faults`; the
same `dpray submit` again goes on with it.
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import servers
from watching import FromLaptop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

DRIVER, SUPERVISOR = "-m dpray.experiments run", "ray::JobSupervisor"


def test_whoever_owns_the_ledger_on_the_head_may_be_killed(sites, watch, dice):
    """First the driver, then the actor above it, then the head; each time the next submission goes on."""
    watched, head = watch("the ledger's owner killed: driver, its actor, the head", FromLaptop), sites["head"]
    for pattern in (DRIVER, SUPERVISOR):
        process = submitted(watched, dice)
        for pid in running(head, pattern):
            os.kill(pid, signal.SIGKILL)
        watched.row.faults += 1
        sentence(watched.ended(process))
        servers.wait(lambda: not running(head, DRIVER), "the driver's end", 60)
    process = submitted(watched, dice)
    head.power_off()
    watched.row.faults += 1
    sentence(watched.ended(process, 300))
    restarted(sites)
    watched.settle()


def sentence(stopped):
    """How a submission ends whose run cannot say so itself."""
    assert stopped.code == 3, stopped
    assert "nothing is charged twice: the same recipe submitted under the same name goes on" in stopped.stderr
    assert "Traceback" not in stopped.stderr


def submitted(watched, dice):
    """A submission whose run has made some more entries, and a moment more."""
    process = watched.begin()
    target = max(watched.entries, 6) + dice.randint(1, 6)
    there = watched.reach(process, lambda: watched.entries >= target)
    assert there, process.communicate()
    time.sleep(dice.uniform(0, 0.02))
    return process


def running(host, pattern):
    """Process ids, here, of what runs on a host under such a command line."""
    found = []
    for pid in host.processes():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if pattern in command and not command.startswith(("sh ", "/bin/sh ", "/bin/bash ")):
            found.append(pid)
    return found


def restarted(network):
    """The whole cluster, as `ray up` would start it again: nodes do not outlive their head."""
    sites = [host for name, host in network.hosts.items() if name.startswith("site-")]
    for site in sites:
        site.power_off()
    head, *again = [network.add(name) for name in ("head", *(site.name for site in sites))]
    servers.start_head(head)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda site: servers.start_worker(site, head), again))
