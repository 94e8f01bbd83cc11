"""Rounds through the pool of Ray actors: without a ledger, with a durable one, and a trainer's whole round.

| contestant | what is in a round |
|---|---|
| without ledger | broadcast θ, clients' sums (their journals on disk), noise, total, a plain step |
| durable ledger | the same inside `Run.release`: charge → commit (noise shares only) → store, each synced to disk |
| trainer | a round of `DPFedSOFIMTrainer.fit`: the release, the server's step, the metrics; no checkpoint, no tracker |
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from dpray.experiments.benchmarks.measure import Round
from dpray.experiments.benchmarks.work import CLASSES, CLIP, FEATURES, RATE
from dpray.platform.cohort import ClientSum, Cohort, GradientSum
from dpray.platform.privacy.budget import Budget, share, split
from dpray.platform.privacy.ledger import Attempt, Head, Ledger, Population, Release, ReleaseKey, Run, Standing
from dpray.platform.privacy.ledger.chain import current_head
from dpray.platform.privacy.ledger.plan import charged_text
from dpray.platform.privacy.ledger.standing import descent
from dpray.platform.privacy.mechanisms import ClippedSum, Mechanism, Regime, Unit
from dpray.trainers import DPFedSOFIMTrainer, SOFIMSettings
from dpray.trainers.models import FloatArray, LinearHead

T = TypeVar("T")
BUDGET = Budget(epsilon=6.0, delta=1e-5)


class MemoryRun:
    """As much of a ledger's run as a cohort's sum asks for, kept nowhere."""

    def __init__(self, population: Population) -> None:
        self.name, self.population = "in memory", population
        self.head, _ = self._read(())
        self._known: dict[int, str] = {}

    def standing(self, attempt: Attempt, passed: Iterable[int] = ()) -> Standing:
        """A release that was just charged; the ledger is read for entries that were not asked for before only."""
        new = set(passed) - self._known.keys()
        if new or not self._known:
            self._known |= self._read((1, *new))[1]
        return Standing("charged", None, (), None, self.head, self._known[1], self._known)

    def _read(self, passed: Iterable[int]) -> tuple[Head, dict[int, str]]:
        return self.population.storage.read(lambda c: (current_head(c), descent(c, passed)[1]))

    def commit(self, attempt: Attempt, participants: frozenset[str], *, sample_inside: bool = False) -> Head:
        """Records nothing."""
        return self.head


class TimedRun(Run):
    """A run that adds up the seconds spent in its calls of the ledger."""

    seconds = 0.0

    @classmethod
    def opened(cls, population: Population, name: str) -> TimedRun:
        """Open a run of the population."""
        run = population.run(name)
        return cls(population, run.name, run.epoch, run.stamps)

    def charge(self, *args: Any, **kwargs: Any) -> Attempt | Release:
        """As `Run.charge`."""
        charge = super().charge
        return self._timed(lambda: charge(*args, **kwargs))

    def commit(self, attempt: Attempt, participants: frozenset[str], *, sample_inside: bool = False) -> Head:
        """As `Run.commit`."""
        commit = super().commit
        return self._timed(lambda: commit(attempt, participants, sample_inside=sample_inside))

    def store(self, attempt: Attempt, value: NDArray[Any]) -> Release:
        """As `Run.store`."""
        store = super().store
        return self._timed(lambda: store(attempt, value))

    def standing(self, attempt: Attempt, passed: Iterable[int] = ()) -> Standing:
        """As `Run.standing`."""
        standing = super().standing
        return self._timed(lambda: standing(attempt, passed))

    def _timed(self, call: Callable[[], T]) -> T:
        began = time.perf_counter()
        try:
            return call()
        finally:
            self.seconds += time.perf_counter() - began


class Pool:
    """A started cohort with a ledger, ready for rounds of each kind.

    Args:
        cohort: whose clients hold the benchmark's records.
        ledger: where releases are charged; a new population for every burst.
    """

    def __init__(self, cohort: Cohort, ledger: Ledger) -> None:
        self._cohort, self._ledger, self._numbers = cohort, ledger, itertools.count()
        self._model = LinearHead(FEATURES, CLASSES)
        self._records = sum(cohort.counts.values())
        self._mechanism: Mechanism = ClippedSum(
            CLIP, Unit.RECORD, self._model.dimension, self._records, self._model.relative_error
        )

    def without_ledger(self, regime: Regime, count: int) -> list[Round]:
        """Rounds whose attempts are made up in memory."""
        run, label = cast(Run, MemoryRun(self._population())), f"memory {next(self._numbers)}"
        head, what = self._ledger.head(), charged_text(self._mechanism)
        theta, made = self._model.initial(), []
        for t, quanta in enumerate(_shares(count + 1)):
            began = time.perf_counter()
            key = ReleaseKey(label, "gradients", t)
            attempt = Attempt(run, key, quanta, 1, head, None, t, Unit.RECORD, what, self._cohort.trust(regime))
            theta = self._stepped(theta, self._sum(attempt, theta, regime))
            made.append(Round(time.perf_counter() - began))
        return made[1:]

    def with_ledger(self, regime: Regime, count: int) -> list[Round]:
        """Rounds released by a durable ledger."""
        run = self._run()
        theta, made = self._model.initial(), []
        for t, quanta in enumerate(_shares(count + 1)):
            began, before = time.perf_counter(), run.seconds
            theta = self._stepped(theta, self._released(run, t, quanta, theta, regime))
            made.append(Round(time.perf_counter() - began, run.seconds - before))
        run.close()
        return made[1:]

    def trainer(self, regime: Regime, count: int) -> list[Round]:
        """Rounds of DP-FedSOFIM, from the end of one to the end of the next."""
        run, ends = self._run(), list[tuple[float, float]]()
        settings = SOFIMSettings(rounds=count + 1, clip=CLIP)
        DPFedSOFIMTrainer(
            self._cohort,
            run,
            self._model,
            settings,
            budget=BUDGET,
            regime=regime,
            on_round=lambda row: ends.append((time.perf_counter(), run.seconds)),
        ).fit()
        run.close()
        return [Round(end - began, after - before) for (began, before), (end, after) in itertools.pairwise(ends)]

    def _run(self) -> TimedRun:
        return TimedRun.opened(self._population(), "benchmark")

    def _population(self) -> Population:
        population = self._ledger.population(f"burst {next(self._numbers)}")
        population.account(Unit.RECORD, BUDGET)
        return population

    def _released(self, run: Run, t: int, quanta: int, theta: FloatArray, regime: Regime) -> FloatArray:
        def compute(attempt: Attempt) -> FloatArray:
            return self._sum(attempt, theta, regime)

        key, query = ReleaseKey("training", "gradients", t), GradientSum(theta, CLIP).describe()
        trust = self._cohort.trust(regime)
        return run.release(key, query, self._mechanism, quanta, compute, trust=trust).value

    def _sum(self, attempt: Attempt, theta: FloatArray, regime: Regime) -> FloatArray:
        return self._cohort.sum(attempt, GradientSum(theta, CLIP), self._mechanism, regime).pack()

    def _stepped(self, theta: FloatArray, packed: FloatArray) -> FloatArray:
        value, records, _ = ClientSum.unpack(packed)
        return np.asarray(theta - RATE / records * value)


def _shares(rounds: int) -> tuple[int, ...]:
    """Most of the budget's μ², over the rounds."""
    return split(share(BUDGET.quanta or 0, 0.99), rounds)


@contextmanager
def local_ray(object_store: int) -> Iterator[Path]:
    """Ray on this machine alone, unless it runs already, and a folder for ledger and journals; gone afterwards.

    Args:
        object_store: bytes of shared memory.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    import ray

    with tempfile.TemporaryDirectory(prefix="dpb", ignore_cleanup_errors=True) as folder:
        ours = not ray.is_initialized()
        if ours:
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=object_store,
                _temp_dir=folder,
            )
        try:
            yield Path(folder)
        finally:
            if ours:
                ray.shutdown()


@contextmanager
def started(cohort: Cohort, folder: Path) -> Iterator[Pool]:
    """A pool with a ledger of its own in the folder."""
    with cohort, Ledger(f"sqlite:///{folder / 'ledger.db'}") as ledger:
        yield Pool(cohort, ledger)
