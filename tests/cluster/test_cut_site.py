"""A site's cable is taken out in the middle of a run, and put in again.

The run is watched as in `tests/faults`: a process of its own reads the ledger and both sites' journals all the time,
and at the end every quantum and every round is accounted for.
"""

import random
import time

import numpy as np
import pytest
import servers
from hosts import end
from sklearn.datasets import load_digits

from tests.faults.conftest import Row, Watched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SITES = {"site-a": 500, "site-b": 500}
ROUNDS, PATIENCE = 40, 30


class OnHead:
    """`dpray` on the head, in a folder there."""

    def __init__(self, head) -> None:
        self.head, self.folder, self.begun = head, head.home / "work", []
        self.folder.mkdir()

    def begin(self, *arguments):
        self.begun.append(self.head.begin("dpray", *arguments, cwd=self.folder))
        return self.begun[-1]

    def run(self, *arguments):
        return self.head.run("dpray", *arguments, cwd=self.folder, check=False)

    def path(self):
        return self.folder / "dpray-runs" / "small"

    def kill(self, process, patience=0.0):
        end(process)


@pytest.fixture
def sites(network):
    """Ray on the head and two sites, and real records at each site."""
    digits = load_digits()
    x, y, begin = digits.data / 16.0, digits.target, 0
    for site, count in SITES.items():
        np.savez(network[site].home / "records.npz", x=x[begin : begin + count], y=y[begin : begin + count])
        begin += count
    np.savez(network.shared / "public.npz", x=x[begin:], y=y[begin:])
    servers.by_hand(network)
    return network


@pytest.fixture
def watched(sites, row):
    """A run over both sites, watched; what came of it is a row of the table."""
    data = {"path": "~/records.npz", "features": 64, "classes": 10}
    document = {
        "name": "small",
        "population": {"name": "people"},
        "budget": {"epsilon": 6, "delta": 1e-5},
        "shares": {"search": 0.3, "training": 0.7},
        "data": {**data, "evaluation": {"public": True, "path": str(sites.shared / "public.npz")}},
        "cohort": {"sites": SITES, "timeout": PATIENCE},
        "search": {"votes": 1, "folds": 2, "space": {"learning_rate": {"grid": [0.5, 2.0]}}},
        "training": {"algorithm": "dp_fedsofim", "rounds": ROUNDS, "clip": 1.0},
        "tracking": {"uri": None},
    }
    journals = [sites[site].home / "dpray-sites" for site in SITES]
    head = OnHead(sites["head"])
    ledger = f"sqlite:///{head.folder / 'dpray-ledger.db'}"
    made = Watched(head, Row(""), document, ledger=ledger, options=("--address", "auto"), sites=journals)
    yield made
    made.close()
    seen = made.row
    row(
        "by hand",
        seen.fault,
        f"faults {seen.faults}, runs {seen.runs}, completed {seen.completed}, overspent {seen.overspent}, "
        f"lost charges {seen.lost_charges}, lost rounds {seen.lost_rounds}, looks {seen.looks}",
    )


@pytest.fixture
def dice():
    """Random moments, after a seed that is printed."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed of the faults' moments: {seed}")
    return random.Random(seed)


def in_a_round(watched, process, dice):
    """Wait for a random round to be charged and not yet stored."""
    after = watched.stored + dice.randint(2, 6)
    there = watched.reach(process, lambda: watched.stored >= after and watched.newest() == "charged", 240)
    assert there, process.communicate()


def test_a_sites_network_is_cut_and_mended(sites, watched, dice):
    """No round ends without the site; after some seconds the run goes on by itself, as if nothing had been."""
    watched.row.fault = "a site's network cut in a round, mended after seconds"
    process = watched.begin()
    for site in dice.sample(sorted(SITES), 2):
        in_a_round(watched, process, dice)
        sites.cut(site)
        watched.row.faults += 1
        time.sleep(dice.uniform(1, 2))  # what was on its way has arrived
        before = watched.stored
        time.sleep(dice.uniform(1, 5))
        assert watched.stored == before, "a round was made without one of two sites"
        sites.mend(site)
    ended = watched.ended(process, 400)
    assert ended.code == 0, ended.stderr
    watched.settle()
