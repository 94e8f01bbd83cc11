"""Vote and private training of the final model under one budget, on Adult, against spending all of it on training.

| what     | setting                                                                                        |
|----------|------------------------------------------------------------------------------------------------|
| clients  | 100, Adult's 32 561 training records; scored on its 16 281 test records, declared public       |
| account  | unit record, ε = .25, 1 or 3 in all, δ = 1e-5                                                  |
| model    | linear head on 108 features by public constants, DP-FedSOFIM, 40 rounds, β = .9, ρ = .5        |
| grid     | η ∈ {.5, 2, 8, 32} × C ∈ {.25, 1, 4}: what one would try without looking, p = 12               |
| vote     | DP-HYPE, k = 1, 30 % of μ²; clients score by 5-fold rehearsals of the noised training          |

| method   | spends                                                                                         |
|----------|------------------------------------------------------------------------------------------------|
| vote     | 30 % of μ² on the vote, 70 % on training with the winner                                       |
| default  | all of μ² on training with the authors' η = .1, C = 10                                         |
| grid     | all of μ² on training with one of the grid: at random is the mean over it, OPT the best of it  |

Searches, trainings, cohort and ledger are the product's own, the search through Ray Tune, each method with an account
of its own. Noise is seeded, so that the table can be made again: NOT PRIVATE, public data only.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from dpray.experiments import engine
from dpray.experiments.papers import rows
from dpray.experiments.papers.dp_hype.tasks import TASKS, Condition, Ground
from dpray.platform.privacy.budget import Budget, share
from dpray.platform.privacy.mechanisms import Regime, Unit
from dpray.platform.privacy.noise import NoiseSource

if TYPE_CHECKING:
    from dpray.platform.cohort import Cohort
    from dpray.platform.privacy.ledger import Account, Ledger, Run
    from dpray.trainers import LinearHead, Rehearsal, SOFIMSettings

CLIENTS = 100
EPSILONS = (0.25, 1.0, 3.0)
DELTA = 1e-5
ROUNDS = 40
SHARE = 0.3
GRID: tuple[Mapping[str, float], ...] = tuple(
    {"learning_rate": rate, "clip": clip} for rate, clip in product((0.5, 2.0, 8.0, 32.0), (0.25, 1.0, 4.0))
)
DEFAULT: Mapping[str, float] = {"learning_rate": 0.1, "clip": 10.0}
SEEDS = range(300, 310)


@dataclass(frozen=True)
class Trained:
    """A line of the CSV: one private training, and what its account spent in all."""

    partition: str
    seed: int
    budget: float
    method: str
    candidate: int
    learning_rate: float
    clip: float
    accuracy: float
    spent: float


@dataclass(frozen=True)
class Job:
    """All methods on one population at one ε."""

    partition: str
    seed: int
    epsilon: float
    rounds: int = ROUNDS
    clients: int = CLIENTS

    @property
    def key(self) -> rows.Key:
        """What its rows have in common."""
        return self.partition, self.seed, self.epsilon


def jobs(seeds: Sequence[int], partitions: Sequence[str] = ("iid", "dir0.5")) -> list[Job]:
    """Partition by partition, seed by seed."""
    return [Job(partition, seed, epsilon) for partition in partitions for seed in seeds for epsilon in EPSILONS]


def job_of(row: Trained) -> rows.Key:
    """Key of the job a row belongs to."""
    return row.partition, row.seed, row.budget


def ray_for_all() -> AbstractContextManager[None]:
    """Ray on this machine for the block, or the one that runs already."""
    engine.prepare(None)
    return engine.ray_running(None, 2)


def trained(job: Job, ground: Ground | None = None) -> list[Trained]:
    """Every method's private training, on the Ray that runs, else on one of its own.

    Args:
        job: which population and ε.
        ground: its data; read if left out.

    Raises:
        DatasetMissing: the data is not there.
    """
    given = ground or Condition(TASKS["adult"], job.partition, job.clients, job.seed).ground()
    with ray_for_all(), _playing(job, given) as play:
        found = [play.vote()]
        found.append(play.train("default", -1, DEFAULT))
        found += [play.train(f"grid {number}", number, config) for number, config in enumerate(GRID)]
    return found


@contextmanager
def _playing(job: Job, ground: Ground) -> Iterator[_Play]:
    """A cohort and a ledger of its own, in a temporary folder."""
    from dpray.platform.cohort import Cohort
    from dpray.platform.privacy.ledger import Ledger
    from dpray.trainers import LinearHead, TrainingTask

    model = LinearHead(ground.test.x.shape[1], 2)
    budget = Budget(job.epsilon, DELTA)
    shards = {f"client-{number:03d}": records for number, records in enumerate(ground.clients)}
    task = TrainingTask(model, _rehearsal(job, model, _shares(budget)[1], ground))
    with TemporaryDirectory(prefix="dpray-") as name:
        folder = Path(name)
        ledger = Ledger(f"sqlite:///{folder / 'ledger.db'}")
        try:
            with engine.hushed():
                cohort = Cohort(task, shards, actors=2, state_dir=folder / "sites", noise=NoiseSource(job.seed))
                cohort.start()
            with cohort:
                yield _Play(job, ground, cohort, ledger, model, budget, folder)
        finally:
            ledger.close()


def _shares(budget: Budget) -> tuple[int, int]:
    """μ² of the vote and of the training after it, in quanta; together all of the budget."""
    if budget.quanta is None:
        raise ValueError("A budget without a bound cannot be shared out.")
    search = share(budget.quanta, SHARE)
    return search, budget.quanta - search


def _settings(job: Job) -> functools.partial[SOFIMSettings]:
    from dpray.trainers import SOFIMSettings

    return functools.partial(SOFIMSettings.from_config, defaults={"rounds": job.rounds})


def _rehearsal(job: Job, model: LinearHead, quanta: int | None, ground: Ground) -> Rehearsal:
    from dpray.trainers import Rehearsal

    return Rehearsal(
        model,
        _settings(job),
        quanta=quanta,
        regime=Regime.DISTRIBUTED,
        clients=len(ground.clients),
        records=sum(len(records) for records in ground.clients),
        n_min=len(ground.clients) - 1,
    )


@dataclass(frozen=True)
class _Play:
    """What all methods of a job share."""

    job: Job
    ground: Ground
    cohort: Cohort
    ledger: Ledger
    model: LinearHead
    budget: Budget
    folder: Path

    def vote(self) -> Trained:
        """Vote and train on one account, whose whole plan is reserved before the first release."""
        from dpray.experiments.trials import tuned
        from dpray.platform.privacy.ledger import Plan, PlannedRelease
        from dpray.searchers.hype import MECHANISM, DPHypeSearch
        from dpray.trainers.base import MECHANISM as GRADIENTS

        account, run = self._open("vote")
        search_quanta, training_quanta = _shares(self.budget)
        run.reserve(
            Plan(
                (
                    PlannedRelease("search", MECHANISM, Unit.CLIENT, search_quanta, 1),
                    PlannedRelease("training", GRADIENTS, Unit.RECORD, training_quanta, self.job.rounds),
                )
            )
        )
        search = DPHypeSearch(
            self.cohort, run, quanta=search_quanta, votes=1, candidates=GRID, label="search", reserve=False
        )
        tuned(search, self.folder, run.epoch, lambda trial: None)
        best = search.best_candidate
        return self._trained("vote", best, GRID[best], account, run, training_quanta)

    def train(self, method: str, candidate: int, config: Mapping[str, float]) -> Trained:
        """All of the budget on one training."""
        account, run = self._open(method)
        return self._trained(method, candidate, config, account, run, self.budget.quanta)

    def _open(self, method: str) -> tuple[Account, Run]:
        people = self.ledger.population(f"adult of {method}")
        return people.account("record", self.budget), people.run(method)

    def _trained(
        self, method: str, candidate: int, config: Mapping[str, Any], account: Account, run: Run, quanta: int | None
    ) -> Trained:
        from dpray.trainers import DPFedSOFIMTrainer

        trainer = DPFedSOFIMTrainer(
            self.cohort,
            run,
            self.model,
            _settings(self.job)(config),
            quanta=quanta,
            reserve=method != "vote",
            evaluation=self.ground.test,
        )
        result = trainer.fit()
        job = self.job
        return Trained(
            job.partition,
            job.seed,
            job.epsilon,
            method,
            candidate,
            config["learning_rate"],
            config["clip"],
            round(float(result.metrics["accuracy"]), 6),
            round(account.spent_epsilon, 6),
        )
