"""Small clients that differ, and a cohort in this process whose noise is made of given normals."""

import numpy as np
import pytest

from dpray.platform.cohort.client import Records, Stack
from dpray.platform.cohort.local_steps import NoisedQuery
from dpray.platform.cohort.queries import Terms
from dpray.platform.cohort.request import noise_of
from dpray.platform.cohort.sums import ClientSum
from dpray.platform.confine import Confinement
from dpray.platform.privacy.ledger import Ledger
from dpray.platform.privacy.mechanisms import Unit
from dpray.platform.privacy.noise import counted_noisers, to_grid
from dpray.trainers.fedfc import COVARIANCE
from dpray.trainers.models import LinearHead

F, K = 5, 3
SIZES = (30, 50, 20, 60)


def blobs(n, seed, label=None):
    """Records of classes that overlap; mostly of one class, if it is given."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, K, n) if label is None else np.where(rng.random(n) < 0.8, label, rng.integers(0, K, n))
    return Records(2 * np.eye(K, F)[y] + rng.standard_normal((n, F)), y)


class Started(LinearHead):
    """A head that starts where the simulation does."""

    def __init__(self, start):
        super().__init__(F, K)
        self.start = start

    def initial(self):
        return self.start.copy()


class Hosted:
    """All clients as a query sees them."""

    def __init__(self, cohort):
        self.task, self.names, self.confinement = cohort.task, cohort.clients, Confinement("test")
        self.shards = Stack.of(cohort.shards.values())


class GivenNoise:
    """A cohort that adds σ times the normals of `noise`, rounded to the release's grid."""

    def __init__(self, model, shards, noise):
        self.task, self.noise = model, noise
        self.shards = {f"client-{number}": shard for number, shard in enumerate(shards)}
        self.counts = {name: len(shard) for name, shard in self.shards.items()}
        self.clients, self.quorum = tuple(self.shards), len(shards)
        self.n_min = counted_noisers(self.quorum, 1)
        self.terms = Terms(model.dimension, model.relative_error, len(shards), sum(self.counts.values()))

    def start(self):
        pass

    def trust(self, regime):
        return str(regime)

    def noise_for(self, mechanism, mu, regime):
        return noise_of(mechanism, mu, regime, self.n_min)

    def sum(self, attempt, query, mechanism, regime):
        query.check(mechanism, self.terms)
        noise, t = self.noise_for(mechanism, attempt.mu, regime), attempt.key.step
        if isinstance(query, NoisedQuery):
            width = mechanism.width

            def draw(k):
                return to_grid(noise.sigma * self.noise.step(t, k, len(self.clients))[:, :width], noise.grid)

            total = query.noised(Hosted(self), noise.grid, draw).sum(axis=0)
        else:
            total = to_grid(query.messages(Hosted(self)), noise.grid).sum(axis=0)
            covariance = attempt.key.mechanism == COVARIANCE
            z = self.noise.covariance(len(total)) if covariance else self.noise.gradient(t)
            total += to_grid(noise.std(len(self.clients)) * z, noise.grid)
        return ClientSum(total, noise.grid, self.clients, sum(self.counts.values()), noise)


@pytest.fixture
def clients():
    """Four clients of 20 to 60 records, three of them mostly of a class of their own."""
    return [blobs(n, seed, label) for seed, (n, label) in enumerate(zip(SIZES, (0, 1, 2, None), strict=True))]


@pytest.fixture
def scored():
    """Records that nobody trains on."""
    return blobs(300, 99)


@pytest.fixture
def people(tmp_path):
    """A population with an account that no test exhausts."""
    from dpray.platform.privacy.budget import Budget

    with Ledger(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        population = ledger.population("people", records_per_client=60)
        population.account(Unit.RECORD, Budget(1000.0, 1e-5))
        yield population


@pytest.fixture
def open_people(tmp_path):
    """A population whose account lets trainings without noise pass."""
    import math

    from dpray.platform.privacy.budget import Budget

    with Ledger(f"sqlite:///{tmp_path}/open.db") as ledger:
        population = ledger.population("people", records_per_client=60)
        population.account(Unit.RECORD, Budget(math.inf, 1e-5, non_private=True))
        yield population
