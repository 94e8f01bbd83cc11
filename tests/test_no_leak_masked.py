"""Regime `distributed` under a masked sum: every byte that the driver is sent, over a search and a training.

Without noise, which would hide what the masks are there to hide: each client's un-noised message is known exactly, and
so is every sum over some of the clients. Nothing of them is in what the driver received, the sum over all is what the
ledger stored. The same run under a trusted sum is the negative control.
"""

import pickle
import sqlite3
import sys
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import pytest
from scipy.stats import chi2

from dpray.platform.cohort import Cohort, Records, Site
from dpray.platform.cohort.dispatch import Dispatch
from dpray.platform.cohort.masked.messages import MaskedInput
from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger import Ledger, ReleaseKey
from dpray.platform.privacy.mechanisms import Regime, Unit
from dpray.platform.privacy.noise import to_grid
from dpray.searchers import DPHypeSearch
from dpray.searchers.driving import drive
from dpray.trainers import DPFedSOFIMTrainer, LinearHead, Rehearsal, SOFIMSettings, TrainingTask
from dpray.trainers.base import MECHANISM

from .test_no_leak import Canaries

FEATURES, CLASSES, CLIENTS, ROWS, T = 7, 3, 4, 12, 6
MODEL = LinearHead(FEATURES, CLASSES)
RATES = [0.5, 2.0, 8.0]


def settings(config):
    return SOFIMSettings(rounds=T, learning_rate=config["learning_rate"], clip=0.7)


def shard(number):
    rng = np.random.default_rng([91, number])
    return Records(rng.uniform(0.1, 0.9, (ROWS, FEATURES)), rng.integers(0, CLASSES, ROWS))


def loader(number):
    return lambda: shard(number)


@dataclass
class Heard:
    """What reached the driver: each answer as bytes, the vectors under masks among them; and what it had asked.

    `scores`: what the clients had noted of the candidates before they were told to forget it.
    """

    answers: list[bytes] = field(default_factory=list)
    vectors: dict[str, list[bytes]] = field(default_factory=dict)
    thetas: list[np.ndarray] = field(default_factory=list)
    methods: set[str] = field(default_factory=set)
    scores: list[float] = field(default_factory=list)


@pytest.fixture
def heard(monkeypatch, ray_local, tmp_path):
    """Hosts cannot import the tests, so this module travels by value; and the driver's side of every call is kept."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    call, record = Dispatch.call, Heard()

    def watched(self, method, arguments, **options):
        if method == "forget":
            record.scores += scores(tmp_path / "sites")
        answers = call(self, method, arguments, **options)
        record.methods.add(method)
        for asked in list(arguments.values())[:1]:
            query = getattr(asked[0], "query", None) if asked else None
            if method == "prepare" and hasattr(query, "theta"):
                record.thetas.append(np.array(query.theta))
        for answer in answers.values():
            record.answers.append(pickle.dumps(answer))
            for message in answer if isinstance(answer, list) else []:
                if isinstance(message, MaskedInput):
                    record.vectors.setdefault(message.session.hex(), []).append(message.data)
        return answers

    monkeypatch.setattr(Dispatch, "call", watched)
    return record


def searched_and_trained(folder, secure_sum):
    """A vote on three rates and a training with the winner; returns the sums that the ledger stored, and the grid."""
    rehearsal = Rehearsal(MODEL, settings, None, Regime.DISTRIBUTED, CLIENTS, CLIENTS * ROWS, CLIENTS - 1, folds=3)
    sites = {f"site-{number}": Site(loader(number), ROWS) for number in range(CLIENTS)}
    task = TrainingTask(MODEL, rehearsal)
    with (
        Ledger(f"sqlite:///{folder}/ledger.db") as ledger,
        Cohort(task, sites, state_dir=folder / "sites", secure_sum=secure_sum) as cohort,
    ):
        people = ledger.population("people", records_per_client=ROWS)
        people.account(Unit.RECORD, Budget(float("inf"), 1e-5, non_private=True))
        run = people.run("open")
        grid = [{"learning_rate": rate} for rate in RATES]
        search = DPHypeSearch(cohort, run, quanta=None, votes=1, candidates=grid, reserve=False)
        drive(search)
        won = settings(search.best_config)
        trainer = DPFedSOFIMTrainer(cohort, run, MODEL, won, quanta=None, reserve=False)
        trainer.fit()
        noise = cohort.noise_for(trainer.mechanism, np.inf, Regime.DISTRIBUTED)
        stored = [run.stored(ReleaseKey("training", MECHANISM, t))[: MODEL.dimension] for t in range(1, T + 1)]
        return stored, noise.grid


def messages(theta, grid):
    """Each client's un-noised message on the grid, (clients, d) int64."""
    return np.stack([to_grid(MODEL.clipped_sum(theta, shard(number), 0.7), grid) for number in range(CLIENTS)])


def scores(folder):
    """What the clients noted of their candidates, from their own files."""
    found = []
    for journal in folder.rglob("journal.db"):
        with sqlite3.connect(f"file:{journal}?mode=ro", uri=True) as database:
            found += [score for (score,) in database.execute("SELECT score FROM scores")]
    return found


def seen(heard, grid):
    """Sets of clients, fewer than all, whose sum in some round is among what the driver received."""
    found = set()
    for theta in heard.thetas:
        rows = messages(theta, grid)
        for size in range(1, CLIENTS):
            for clients in combinations(range(CLIENTS), size):
                part = rows[list(clients)].sum(axis=0)
                for width in ("<i8", "<i4"):
                    pattern = part[:4].astype(width).tobytes()
                    if any(pattern in answer for answer in heard.answers):
                        found.add(clients)
    return found


def elements(data):
    """A vector under masks as numbers of its ring, for a vote's or a gradient's dimension."""
    dimension = MODEL.dimension if len(data) >= 4 * MODEL.dimension else len(RATES)
    return np.frombuffer(data, dtype=f"<u{len(data) // dimension}")


def unlike_bytes(vectors):
    """Whether the bytes of some vectors are not uniform: χ² over 256 values, false alarm 10⁻⁶."""
    counts = np.bincount(np.frombuffer(b"".join(vectors), dtype=np.uint8), minlength=256)
    expected = counts.sum() / 256
    return bool(((counts - expected) ** 2 / expected).sum() > chi2.isf(1e-6, 255))


def test_the_driver_is_sent_nothing_but_the_sum(heard, tmp_path):
    stored, grid = searched_and_trained(tmp_path, "masked")
    assert {"evaluate_all", "prepare", "share", "mask", "unmask"} <= heard.methods
    assert len(heard.thetas) == T
    for total, theta in zip(stored, heard.thetas, strict=True):
        np.testing.assert_array_equal(np.rint(total / grid), messages(theta, grid).sum(axis=0))
    assert seen(heard, grid) == set()
    private = np.concatenate([np.ravel(shard(number).x) for number in range(CLIENTS)])
    assert len(heard.scores) == CLIENTS * len(RATES)
    known = Canaries([*private, *heard.scores])
    assert not any(known.in_bytes(answer) for answer in heard.answers)
    assert len(heard.vectors) == T + 1
    assert not unlike_bytes([data for vectors in heard.vectors.values() for data in vectors])
    for size in range(2, CLIENTS + 1):  # pairwise masks cancel in all of them, self masks never
        parts = [
            sum(elements(vectors[j]) for j in clients).tobytes()
            for vectors in heard.vectors.values()
            for clients in combinations(range(CLIENTS), size)
        ]
        assert not unlike_bytes(parts)


def test_under_a_trusted_sum_the_driver_sees_every_clients_message(heard, tmp_path):
    """Negative control: the same search for the same bytes finds each client alone."""
    _, grid = searched_and_trained(tmp_path, "trusted")
    assert {(number,) for number in range(CLIENTS)} <= seen(heard, grid)
