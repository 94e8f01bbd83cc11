"""What the ledger costs: a release is two durable transactions, and a little arithmetic.

Timed by this process's own processor time: what others do on the machine, and how fast its disk is, is left out.
"""

import statistics
import time

import numpy as np
import pytest

from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger import Ledger, Plan, PlannedRelease
from dpray.platform.privacy.mechanisms import Unit


@pytest.mark.slow
def test_a_release_costs_less_than_two_milliseconds_besides_waiting_for_the_disk(tmp_path, releases):
    with Ledger(f"sqlite:///{tmp_path}/l.db") as ledger:
        people = ledger.population("digits", records_per_client=10)
        people.account("record", Budget(6, 1e-5))
        people.account("client", Budget(60, 1e-5))
        run = people.run("a")
        run.reserve(Plan((PlannedRelease("training", "sum", Unit.RECORD, 10**6, 300),)))
        times, value, theta = [], np.random.default_rng(0).normal(size=652), np.zeros(650)
        for step in range(300):
            begin = time.process_time()
            releases.make(run, 1000, step, value=value, query={"theta": theta})
            times.append(time.process_time() - begin)
    assert statistics.median(times) < 0.002


@pytest.mark.slow
def test_opening_a_run_verifies_ten_thousand_entries_in_about_a_second(tmp_path, releases):
    with Ledger(f"sqlite:///{tmp_path}/l.db") as ledger:
        people = ledger.population("digits")
        people.account("record", Budget(6, 1e-5))
        run = people.run("a")
        for step in range(5000):
            releases.make(run, 1000, step)
        begin = time.process_time()
        people.run("a")
        assert ledger.head().sequence > 10_000
        assert time.process_time() - begin < 3
