"""Runs over both sites that are watched as those of `tests/faults` are: who drives them, their recipe, their row."""

from __future__ import annotations

import numpy as np
import servers
from hosts import Network, end
from sklearn.datasets import load_digits

from tests.faults.conftest import Row, Watched

SITES = {"site-a": 500, "site-b": 500}
ROUNDS, PATIENCE = 40, 600


class OnHead:
    """`dpray` on the head, in a folder there."""

    def __init__(self, network) -> None:
        self.network, self.begun = network, []
        self.folder = network["head"].home / "work"
        self.folder.mkdir()

    def begin(self, *arguments):
        self.begun.append(self.network["head"].begin("dpray", *arguments, "--address", "auto", cwd=self.folder))
        return self.begun[-1]

    def run(self, *arguments):
        return self.network["head"].run("dpray", *arguments, cwd=self.folder, check=False)

    def path(self):
        return self.folder / "dpray-runs" / "small"

    def kill(self, process, patience=0.0):
        end(process)


class FromLaptop(OnHead):
    """The same runs, submitted from a host that is no node."""

    def begin(self, command, *arguments):
        assert command == "run"
        where = ("--address", f"http://{self.network['head'].address}:{servers.DASHBOARD}", "--workspace", self.folder)
        self.begun.append(self.network["laptop"].begin("dpray", "submit", *arguments, *where))
        return self.begun[-1]


def give_records(network: Network) -> None:
    """Real records for each site, and for the head those that are declared public."""
    digits = load_digits()
    x, y, begin = digits.data / 16.0, digits.target, 0
    for site, count in SITES.items():
        np.savez(network[site].home / "records.npz", x=x[begin : begin + count], y=y[begin : begin + count])
        begin += count
    np.savez(network.shared / "public.npz", x=x[begin:], y=y[begin:])


def watched(network: Network, fault: str, driver: type[OnHead], **cohort) -> Watched:
    """Begin to watch a run."""
    data = {"path": "~/records.npz", "features": 64, "classes": 10}
    document = {
        "name": "small",
        "population": {"name": "people"},
        "budget": {"epsilon": 6, "delta": 1e-5},
        "shares": {"search": 0.3, "training": 0.7},
        "data": {**data, "evaluation": {"public": True, "path": str(network.shared / "public.npz")}},
        "cohort": {"sites": SITES, "timeout": PATIENCE, **cohort},
        "search": {"votes": 1, "folds": 2, "space": {"learning_rate": {"grid": [0.5, 2.0]}}},
        "training": {"algorithm": "dp_fedsofim", "rounds": ROUNDS, "clip": 1.0},
        "tracking": {"uri": None},
    }
    journals = [network[site].home / "dpray-sites" for site in SITES]
    ledger = f"sqlite:///{network['head'].home / 'ledger.db'}"
    return Watched(driver(network), Row(fault), document, ledger=ledger, sites=journals)


def cells(seen: Row) -> str:
    """What came of a fault."""
    counts = ("faults", "runs", "completed", "overspent", "lost_charges", "lost_rounds", "looks")
    return ", ".join(f"{name.replace('_', ' ')} {getattr(seen, name)}" for name in counts)
