"""What the ledger costs: a release is two durable transactions, and a little arithmetic."""

import os
import statistics
import time

import numpy as np
import pytest

from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger import Ledger, Plan, PlannedRelease
from dpray.platform.privacy.mechanisms import Unit


def _sync_time(folder):
    """Median seconds of writing and syncing 16 KiB here and now: what one durable transaction cannot do without."""
    times = []
    with (folder / "probe").open("wb", buffering=0) as file:
        for _ in range(50):
            begin = time.perf_counter()
            file.write(bytes(16384))
            os.fsync(file.fileno())
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


@pytest.mark.slow
def test_a_release_costs_two_syncs_and_less_than_two_milliseconds(tmp_path, releases):
    with Ledger(f"sqlite:///{tmp_path}/l.db") as ledger:
        people = ledger.population("digits", records_per_client=10)
        people.account("record", Budget(6, 1e-5))
        people.account("client", Budget(60, 1e-5))
        run = people.run("a")
        run.reserve(Plan((PlannedRelease("training", "sum", Unit.RECORD, 10**6, 300),)))
        times, value, theta = [], np.random.default_rng(0).normal(size=652), np.zeros(650)
        for step in range(300):
            begin = time.perf_counter()
            releases.make(run, 1000, step, value=value, query={"theta": theta})
            times.append(time.perf_counter() - begin)
    sync = _sync_time(tmp_path)
    assert statistics.median(times) < 0.002 + 4 * sync


@pytest.mark.slow
def test_opening_a_run_verifies_ten_thousand_entries_in_about_a_second(tmp_path, releases):
    with Ledger(f"sqlite:///{tmp_path}/l.db") as ledger:
        people = ledger.population("digits")
        people.account("record", Budget(6, 1e-5))
        run = people.run("a")
        for step in range(5000):
            releases.make(run, 1000, step)
        begin = time.perf_counter()
        people.run("a")
        assert ledger.head().sequence > 10_000
        assert time.perf_counter() - begin < 3
