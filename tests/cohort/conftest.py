"""Small tasks, records, requests and real ledger attempts for the cohort's tests."""

import sys
from dataclasses import replace

import numpy as np
import pytest

from dpray.platform.cohort.client import ClientTask, Records, Stack
from dpray.platform.cohort.host import Host, HostSpec, Request
from dpray.platform.cohort.journal import SiteJournal
from dpray.platform.cohort.queries import GradientSum, Terms
from dpray.platform.privacy.budget import Budget, floor_quanta
from dpray.platform.privacy.ledger import Head, Ledger, ReleaseKey
from dpray.platform.privacy.mechanisms import ClippedSum, Regime, Unit
from dpray.platform.privacy.noise import NoiseSource

from .journals import ABC

DIMENSION = 6
CLIP = 1.5
SEARCH = ("people", "search")
"""A search as clients keep its scores: population and name."""
TRUST = {
    Regime.CENTRAL: "central",
    Regime.DISTRIBUTED: "central (aggregator trusted, shares simulated)",
    Regime.LOCAL: "local (clients simulated)",
}
"""What a pool's releases are charged under."""


class RowSum(ClientTask):
    """g_x = x − θ, clipped: the simplest task whose sum depends on every record and on θ. Behaves as `y` says.

    Labels above zero make the client's code misbehave, in the way `misbehave` knows them by.
    """

    dimension = DIMENSION

    def __init__(self, misbehave=None):
        self.misbehave = misbehave

    def clipped_sum(self, theta, records, clip):
        if self.misbehave is not None and records.y[0] > 0:
            return self.misbehave(int(records.y[0]), records)
        rows = records.x - theta
        norms = np.linalg.norm(rows, axis=1)
        return (rows * np.minimum(1, clip / np.maximum(norms, 1e-12))[:, None]).sum(axis=0)

    def update(self, theta, records, settings):
        if self.misbehave is not None and records.y[0] > 0:
            return self.misbehave(int(records.y[0]), records)
        return settings["rate"] * records.x.sum(axis=0)

    def fit_and_score(self, config, records, rng):
        if self.misbehave is not None and records.y[0] > 0:
            return self.misbehave(int(records.y[0]), records)
        return -abs(config["target"] - records.x.mean()) + config.get("jitter", 0.0) * rng.random()


def end_for_good(ray, handles):
    """End hosts, and wait until they are: Ray does it some time after it was told to."""
    for handle in handles:
        ray.kill(handle)
        try:
            while True:
                ray.get(handle.ready.remote())
        except ray.exceptions.RayActorError:
            continue


def records(seed=0, rows=5, label=0):
    rng = np.random.default_rng(seed)
    return Records(rng.standard_normal((rows, DIMENSION)), np.full(rows, label))


def client_names(number):
    return tuple(f"client-{index:03d}" for index in range(number))


def shards_of(number, rows=5):
    return {name: records(index, rows) for index, name in enumerate(client_names(number))}


def gradient_mechanism(clients=4, rows=5, **changes):
    settings = {"clip": CLIP, "unit": Unit.RECORD, "dimension": DIMENSION, "records": clients * rows, **changes}
    return ClippedSum(**settings)


@pytest.fixture
def make_host(tmp_path):
    """Build a host in this process; hosts of one test share the site's folder, as the hosts of a node do."""
    opened = []

    def build(shards, *, name="host", site="site", of=None, task=None, quorum=None, n_min=None, **settings):
        every = dict(shards)
        names = tuple(every) if of is None else tuple(of)
        stack = Stack.of([every[client] for client in names])
        rows = sum(len(shard) for shard in every.values())
        spec = HostSpec(
            name=name,
            clients=names,
            task=task or RowSum(),
            load=lambda: stack,
            folder=str(tmp_path / site),
            terms=Terms(DIMENSION, 0.0, len(every), rows),
            quorum=quorum or len(every),
            n_min=n_min or len(every),
            **{"noise": NoiseSource(), "cap": None, "limit": None, **settings},
        )
        host = Host(spec)
        opened.append(host)
        return host

    yield build
    for host in opened:
        host.close()


def ask(step=0, *, regime=Regime.DISTRIBUTED, mu=0.5, clients=4, rows=5, theta=None, **changes):
    """A request for a gradient sum, as the driver makes it."""
    request = Request(
        population="people",
        run="run",
        key=ReleaseKey("training", "clipped sum", step),
        epoch=1,
        head=Head(10 + step, "a" * 64),
        quanta=floor_quanta(mu),
        query=GradientSum(np.zeros(DIMENSION) if theta is None else theta, CLIP),
        mechanism=gradient_mechanism(clients, rows),
        regime=regime,
        ledger="1" * 64,
        lineage=dict.fromkeys(range(1, 1000), "a" * 64),
    )
    return replace(request, **changes)


@pytest.fixture
def ledger(tmp_path):
    with Ledger(f"sqlite:///{tmp_path}/ledger.db") as opened:
        yield opened


def opened_run(ledger):
    population = ledger.population("people", records_per_client=50)
    population.account(Unit.RECORD, Budget(30.0, 1e-5))
    return population.run("run")


@pytest.fixture
def run(ledger):
    return opened_run(ledger)


@pytest.fixture
def attempt(run):
    """Charge a release and give its attempt; the same step again gives the attempt of a resumed computation."""

    def charge(query, mechanism, step=0, quanta=floor_quanta(0.5), of=None, regime=Regime.DISTRIBUTED, trust=None):
        key = ReleaseKey("training", mechanism.name, step)
        return (of or run).charge(key, query.describe(), mechanism, quanta, trust or TRUST[regime])

    return charge


@pytest.fixture(scope="session")
def by_value(ray_local):
    """Ray's workers cannot import the tests: their classes travel by value."""
    from ray import cloudpickle

    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) and "/tests/cohort/" in str(module.__file__):
            cloudpickle.register_pickle_by_value(module)
    return ray_local


@pytest.fixture
def journal(tmp_path):
    opened = SiteJournal(tmp_path / "site" / "journal.db")
    opened.enrol(ABC)
    yield opened
    opened.close()
