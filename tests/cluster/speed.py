"""What a cluster costs, on three hosts of one machine: `pytest -s tests/cluster/speed.py`, on a machine that is quiet.

Each figure by itself: `-k rounds`, `-k submission`. No part of the test suite, since what else runs adds to it. The
figures that need one host only: `python -m dpray.experiments.benchmarks.cluster ledger` and `… recovery`.
"""

import json

import pytest
import servers
from hosts import PYTHON

pytestmark = pytest.mark.timeout(600)

BENCHMARK = (PYTHON, "-m", "dpray.experiments.benchmarks.cluster")
PAIRS = 3


def measured(host, *arguments, **options):
    return json.loads(host.run(*BENCHMARK, *arguments, **options).stdout.splitlines()[-1])


def test_rounds_over_three_hosts_take_at_most_twice_those_on_one(network, row):
    """In turns, and the smallest burst of each: so that what else runs falls on both."""
    servers.by_hand(network)
    three, one = [], []
    for _ in range(PAIRS):
        three.append(measured(network["head"], "rounds", "--address", "auto")["smallest"])
        one.append(measured(network["laptop"], "rounds", environment={"RAY_AUTH_MODE": "disabled"})["smallest"])
    ratio = min(three) / min(one)
    row("by hand", "a round over three hosts / on one, d = 10⁵", f"{ratio:.2f}")
    row("by hand", "milliseconds of both", f"{1e3 * min(three):.1f}, {1e3 * min(one):.1f}")
    assert ratio <= 2


def test_submission_to_the_first_trial_takes_at_most_20_seconds(network, row):
    """The first submission, for which every node unpacks the package, and the next."""
    head = servers.by_hand(network)
    servers.start_mlflow(head, f"sqlite:///{head.environment['HOME']}/mlflow.db")
    asked = ("submission", "--address", f"http://{head.address}:{servers.DASHBOARD}")
    places = ("--ledger", f"sqlite:///{head.home}/ledger.db", "--tracking", f"http://127.0.0.1:{servers.MLFLOW}")
    found = [measured(network["laptop"], *asked, *places) for _ in range(2)]
    for which, marks in zip(("first", "next"), found, strict=True):
        row("by hand", f"seconds from the {which} submission", ", ".join(f"{k} {v:.1f}" for k, v in marks.items()))
    assert max(marks["trial"] for marks in found) <= 20
