"""A cohort that is played in the test's own process, records with classes that can be told apart, and a ledger."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from dpray.platform.cohort.client import Records, Stack
from dpray.platform.cohort.local_steps import NoisedQuery
from dpray.platform.cohort.queries import Terms
from dpray.platform.cohort.sums import ClientSum
from dpray.platform.confine import Confinement
from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger import Ledger
from dpray.platform.privacy.mechanisms import Regime, Unit
from dpray.platform.privacy.noise import NoiseSource, counted_noisers, to_grid
from dpray.trainers.models import LinearHead

F, K = 4, 3
BUDGET = Budget(8.0, 1e-5)
SIZES = (30, 50, 20, 60)


def blobs(n, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, K, n)
    return Records(3 * np.eye(K, F)[y] + 0.3 * rng.standard_normal((n, F)), y)


@dataclass
class Clients:
    """Some clients as a query sees them."""

    task: object
    shards: Stack
    names: tuple
    confinement: Confinement = field(default_factory=lambda: Confinement("test"))


class PlayedCohort:
    """A cohort in this process whose noise follows from the key. `script` has what happens instead of an answer."""

    def __init__(self, model=None, sizes=SIZES, quorum=None):
        self.task = model or LinearHead(F, K)
        self.shards = {f"client-{i}": blobs(n, seed=i) for i, n in enumerate(sizes)}
        self.counts = {name: len(shard) for name, shard in self.shards.items()}
        self.clients = tuple(self.shards)
        self.quorum = quorum or len(sizes)
        self.n_min = counted_noisers(self.quorum, 1)
        self.answering = self.clients
        self.terms = Terms(self.task.dimension, self.task.relative_error, len(sizes), sum(sizes))
        self.script, self.asked = {}, []

    def start(self):
        pass

    def trust(self, regime):
        return str(regime)

    def noise_for(self, mechanism, mu, regime):
        return mechanism.noise(mu, noisers=self.n_min if regime is Regime.DISTRIBUTED else 1)

    def view(self):
        stack = Stack.of([self.shards[name] for name in self.answering])
        return Clients(self.task, stack, self.answering)

    def sum(self, attempt, query, mechanism, regime):
        step = attempt.key.step
        self.asked.append(step)
        if step in self.script:
            raise self.script.pop(step)
        query.check(mechanism, self.terms)
        noise = self.noise_for(mechanism, attempt.mu, regime)
        records = sum(self.counts[name] for name in self.answering)
        if isinstance(query, NoisedQuery):
            query.refuse_regime(regime)

            def draw(k):
                key = str(attempt.key), k
                return np.stack([NoiseSource(7).draw(noise, mechanism.width, *key, name) for name in self.answering])

            total = query.noised(self.view(), noise.grid, draw).sum(axis=0)
            return ClientSum(total, noise.grid, self.answering, records, noise)
        total = to_grid(query.messages(self.view()), noise.grid).sum(axis=0)
        parties = ("server",) if regime is Regime.CENTRAL else self.answering
        for party in parties if noise.private else ():
            total += NoiseSource(7).draw(noise, len(total), str(attempt.key), party)
        return ClientSum(total, noise.grid, self.answering, records, noise)


@pytest.fixture
def ledger(tmp_path):
    with Ledger(f"sqlite:///{tmp_path}/ledger.db") as opened:
        opened.population("people", records_per_client=60).account(Unit.RECORD, BUDGET)
        yield opened


@pytest.fixture
def people(ledger):
    return ledger.population("people")


class Killed(BaseException):
    """The end of the process, played."""


def killed_in_round(t):
    """An `on_round` that ends the process as round t ends, before its checkpoint."""

    def on_round(row):
        if row["training_iteration"] == t:
            raise Killed

    return on_round


class Hosted:
    """All clients as a query sees them."""

    def __init__(self, cohort, key):
        self.task, self.names, self.confinement = cohort.task, cohort.clients, Confinement("key")
        self.shards, self._noise, self._key = Stack.of(cohort.shards.values()), cohort.noise, key

    def coins(self, client):
        return self._noise.generator("sample", self._key, client)


class AloneCohort:
    """Clients whose sums are asked for in this process; noise is drawn once, by a server."""

    def __init__(self, task, shards, noise=None):
        self.task, self.shards, self.noise = task, shards, NoiseSource(noise)
        self.counts = {name: len(shard) for name, shard in shards.items()}
        self.clients, self.n_min = tuple(shards), 1
        self.terms = Terms(task.dimension, task.relative_error, len(shards), sum(self.counts.values()))
        self.asked = []

    def attached(self):
        return self

    def start(self):
        pass

    def trust(self, regime):
        return str(regime)

    def noise_for(self, mechanism, mu, regime):
        return mechanism.noise(mu)

    def sum(self, attempt, query, mechanism, regime):
        assert regime is Regime.CENTRAL
        query.check(mechanism, self.terms)
        self.asked.append((attempt.run.name, str(attempt.key)))
        noise = mechanism.noise(attempt.mu)
        rows = query.messages(Hosted(self, str(attempt.key)))
        total = to_grid(rows, noise.grid).sum(axis=0)
        if noise.private:
            total += self.noise.draw(noise, rows.shape[1], attempt.run.name, str(attempt.key))
        return ClientSum(total, noise.grid, self.clients, sum(self.counts.values()), noise)


@pytest.fixture
def alone_cohort():
    """The class."""
    return AloneCohort


@pytest.fixture
def make_blobs():
    """Makes (n) records of K = 3 well separated classes with F = 4 features."""

    def make(n, seed=0):
        rng = np.random.default_rng(seed)
        y = rng.integers(0, 3, n)
        return Records(3 * np.eye(3, 4)[y] + 0.3 * rng.standard_normal((n, 4)), y)

    return make
