"""A cohort without Ray, for tests of a search's logic: real ballots, real noise, real ledger."""

import base64
import struct

import numpy as np
import pytest

from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger import Ledger
from dpray.platform.privacy.mechanisms import Regime
from dpray.platform.privacy.noise import NoiseSource, draw, from_grid, to_grid
from dpray.platform.privacy.selection import noisy_argmax


class SummedVotes:
    def __init__(self, total, records, answered):
        self.total, self.records, self.answered = total, records, answered

    def pack(self):
        return np.concatenate([self.total, [self.records, self.answered]])


class LocalCohort:
    """Clients in this process. `judge(client, config)` scores; higher is better."""

    masked = False

    def __init__(self, clients=20, judge=lambda client, config: -abs(config["x"] - 2), seed=7):
        self.clients = tuple(f"c{index:02d}" for index in range(clients))
        self.n_min = clients
        self.judge, self.noise = judge, NoiseSource(seed)
        self.scores = {}
        self.evaluated = []
        self.sums = 0
        self.before_sum = lambda attempt: None
        self.scores_together = False
        self.check_candidate = lambda config: None

    def handle(self):
        return self

    def trust(self, regime):
        return {"central": "central", "local": "local"}.get(regime, "central (aggregator trusted, shares simulated)")

    def noise_for(self, mechanism, mu, regime):
        return mechanism.noise(mu, noisers=self.n_min if regime is Regime.DISTRIBUTED else 1)

    def evaluate_all(self, run, candidates):
        for candidate, config in candidates.items():
            self.evaluated.append((run, candidate, config))
            for client in self.clients:
                self.scores.setdefault((run, client), {})[candidate] = self.judge(client, config)
        return len(self.clients)

    def forget(self, run):
        self.scores = {key: scores for key, scores in self.scores.items() if key[0] != run}

    def winner(self, attempt, query, mechanism):
        self.before_sum(attempt)
        self.sums += 1
        key = (attempt.run.name, str(attempt.key))
        counts = sum(self.ballots(attempt, query, mechanism))
        return noisy_argmax(counts, mechanism.scale(mechanism.epsilon_of(attempt.mu)), self.noise.generator(*key))

    def ballots(self, attempt, query, mechanism):
        key = (attempt.run.name, str(attempt.key))
        for client in self.clients:
            scores = self.scores.get(((attempt.run.population.name, query.run), client), {})
            row = np.array([scores.get(index, -np.inf) for index in range(mechanism.candidates)])
            ties = self.noise.generator(*key, client, "ties").random(mechanism.candidates)
            ballot = np.zeros(mechanism.candidates)
            ballot[np.lexsort((ties, -row))[: mechanism.votes]] = 1
            yield ballot

    def sum(self, attempt, query, mechanism, regime):
        self.before_sum(attempt)
        self.sums += 1
        noise = self.noise_for(mechanism, attempt.mu, regime)
        key = (attempt.run.name, str(attempt.key))
        total = np.zeros(mechanism.candidates, dtype=np.int64)
        for client, ballot in zip(self.clients, self.ballots(attempt, query, mechanism), strict=True):
            total += to_grid(ballot, noise.grid)
            if noise.private and regime is not Regime.CENTRAL:
                total += draw(noise, mechanism.candidates, self.noise.generator(*key, client))
        if noise.private and regime is Regime.CENTRAL:
            total += draw(noise, mechanism.candidates, self.noise.generator(*key))
        return SummedVotes(from_grid(total, noise.grid), 50 * len(self.clients), len(self.clients))


@pytest.fixture
def local_cohort():
    return LocalCohort


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    yield ledger
    ledger.close()


@pytest.fixture
def population(ledger):
    people = ledger.population("people", records_per_client=100)
    people.account("client", Budget(8.0, 1e-5))
    return people


def encoded(value: float) -> list[bytes]:
    """A number as it could be found in a file: decimal text, float32 and float64, hex and base64."""
    raw = [struct.pack("<d", value), struct.pack("<f", value)]
    texts = [f"{value:.6f}"[:7].encode(), *(part.hex().encode() for part in raw)]
    return [*raw, *texts, *(base64.b64encode(part).rstrip(b"=")[:-1] for part in raw)]


def found_in(folder, value: float) -> list[str]:
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and any(code in path.read_bytes() for code in encoded(value)):
            found.append(path.name)
    return found


@pytest.fixture
def encodings():
    return encoded


@pytest.fixture
def leaks():
    """Names of the files below a folder that hold a value, in whatever encoding."""
    return found_in
