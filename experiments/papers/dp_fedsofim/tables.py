"""Both tables, as lists of jobs whose rows go into a CSV when the job is done.

(a) `paper`: the paper's own settings, T = 70, five seeds. Jobs of a task and a seed:

- `local`, `distributed`: all methods that ask for one sum, at all ε, in this regime; `local` with n = 100 or n = 20,
  `distributed` with n = 100. They do not depend on the partition (`simulate`), which is `any` in the CSV.
- `means`: three of them with the mean of client means, Dirichlet(.5), regime `local`, at ε = 1, 10 and ∞.
- `scaffold`: DP-SCAFFOLD with K = 3, iid and Dirichlet(.5), regime `local`, the only one it has.

(b) `tuned`: each method has `TRIALS` trials, scored on records held out of the training set, and the best of them is
trained on the whole training set with five seeds, scored on the test set. A job is a task, an ε, and n with a regime.

Trainings without noise are the same for every n and regime: they are there once, with regime `none` and n = 0, made
beside those of `local` with n = 100.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpray.experiments.papers import rows
from dpray.experiments.papers.dp_fedsofim import methods
from dpray.experiments.papers.dp_fedsofim.data import TASKS, Ground, dealt, ground, tuning_ground
from dpray.experiments.papers.dp_fedsofim.methods import BOXES, SCAFFOLD
from dpray.experiments.papers.dp_fedsofim.noise import Condition, Normals
from dpray.experiments.papers.dp_fedsofim.simulate import Arm, Luck, by_local_steps, by_sums, scores, started
from dpray.platform.cohort.client import Records
from dpray.platform.privacy.mechanisms import Regime
from dpray.trainers.models import LinearHead
from dpray.trainers.settings import Settings

FloatArray = NDArray[np.float64]

EPSILONS = (0.5, 1.0, 2.0, 5.0, 10.0, math.inf)
MEANS_EPSILONS = (1.0, 10.0, math.inf)
SEEDS = range(400, 405)
TUNING_SEED = 399
TRIALS = 8
MANY, FEW = 100, 20
"""n."""
ANY, NONE = "any", "none"


@dataclass(frozen=True)
class Row:
    """A line of table (a): one training.

    Attributes:
        curve: accuracies of all rounds in thousandths.
        seconds: of processor time, the job's divided by its rows.
    """

    task: str
    part: str
    method: str
    regime: str
    clients: int
    partition: str
    epsilon: float
    seed: int
    accuracy: float
    curve: str = ""
    seconds: float = 0.0

    @property
    def rounds(self) -> FloatArray:
        """Accuracy after each round, (T,), to three digits."""
        return np.array([int(part) for part in self.curve.split()]) / 1000


@dataclass(frozen=True)
class Tuned:
    """A line of table (b): a trial (seed -1, accuracy on records held out), or a final training (on the test set)."""

    task: str
    method: str
    regime: str
    clients: int
    partition: str
    epsilon: float
    trial: int
    seed: int
    config: str
    accuracy: float
    seconds: float

    @property
    def final(self) -> bool:
        """Whether it is a final training."""
        return self.seed >= 0


@dataclass(frozen=True)
class Job:
    """A job of table (a)."""

    task: str
    part: str
    seed: int
    clients: int
    partition: str = ANY
    single: bool = True

    @property
    def key(self) -> rows.Key:
        """What its rows have in common."""
        return self.task, self.part, self.seed, self.clients, self.partition


@dataclass(frozen=True)
class TunedJob:
    """A job of table (b)."""

    task: str
    epsilon: float
    regime: str
    clients: int
    partition: str = ANY

    @property
    def key(self) -> rows.Key:
        """What its rows have in common."""
        return self.task, self.epsilon, self.regime, self.clients, self.partition


def jobs(tasks: Sequence[str], seeds: Sequence[int], *, single: bool = True) -> list[Job]:
    """Table (a), what matters most first; products in float32 (`single`), or as the product makes them."""
    main = [task for task in tasks if not TASKS[task].secondary]
    found = [Job(task, str(Regime.LOCAL), seed, MANY) for seed in seeds for task in main]
    found += [Job(task, str(Regime.DISTRIBUTED), seed, MANY) for seed in seeds for task in main]
    found += [Job(task, str(Regime.LOCAL), seed, FEW) for seed in seeds for task in main]
    found += [Job(task, str(Regime.LOCAL), seed, MANY) for seed in seeds for task in tasks if task not in main]
    for clients in (MANY, FEW):
        for kind in ("dirichlet", "iid"):
            found += [Job(task, "scaffold", seed, clients, kind) for seed in seeds for task in main]
        found += [Job(task, "means", seed, clients, "dirichlet") for seed in seeds for task in main]
    return [replace(job, single=single) for job in found]


def tuned_jobs(tasks: Sequence[str]) -> list[TunedJob]:
    """Table (b): what matters most comes first."""
    main = [task for task in tasks if not TASKS[task].secondary]
    finite = (1.0, 5.0, 0.5, 2.0, 10.0)
    found = [TunedJob(task, math.inf, NONE, 0) for task in main]
    for regime, clients in ((Regime.LOCAL, MANY), (Regime.DISTRIBUTED, MANY), (Regime.LOCAL, FEW)):
        found += [TunedJob(task, epsilon, str(regime), clients) for epsilon in finite for task in main]
        if (regime, clients) == (Regime.LOCAL, MANY):
            found += [
                TunedJob(task, epsilon, str(regime), clients, kind)
                for task in main
                for epsilon in (1.0, 5.0, math.inf)
                for kind in ("iid", "dirichlet")
            ]
    return found


def fill(todo: Sequence[Job], folder: Path, *, workers: int = 1, told: Callable[[str], object] = print) -> int:
    """Run table (a)'s jobs whose rows are missing."""
    return rows.fill(todo, folder / "paper.csv", Row, _job_of, run, workers=workers, every=1, told=told)


def fill_tuned(
    todo: Sequence[TunedJob], folder: Path, *, workers: int = 1, told: Callable[[str], object] = print
) -> int:
    """Run table (b)'s jobs whose rows are missing."""
    return rows.fill(todo, folder / "tuned.csv", Tuned, _tuned_job_of, run_tuned, workers=workers, every=1, told=told)


def run(job: Job, rounds: int = methods.ROUNDS) -> list[Row]:
    """All trainings of a job of table (a)."""
    begun, data, task = time.process_time(), ground(job.task), TASKS[job.task]
    model = LinearHead(data.train.x.shape[1], data.classes)
    luck = _luck(model, job.seed)
    if job.part in (Regime.LOCAL, Regime.DISTRIBUTED):
        names, conditions = methods.paper(task, rounds), conditions_of(Regime(job.part), job.clients)
        arms = [(name, Arm(settings, each, luck)) for name, settings in names.items() for each in conditions]
        if task.secondary:
            arms = [(name, arm) for name, arm in arms if name != "FedFC"]
        trained = by_sums(model, [arm for _, arm in arms], data.train, data.scored, job.single)
    else:
        clients = dealt(data.train, job.partition, job.clients, job.seed)
        epsilons = MEANS_EPSILONS if job.part == "means" else EPSILONS
        conditions = [Condition(epsilon, Regime.LOCAL, job.clients) for epsilon in epsilons]
        if job.part == "means":
            known = methods.paper(task, rounds)
            arms = [(name, Arm(known[name], each, luck)) for name in methods.MEANS for each in conditions]
        else:
            arms = [(SCAFFOLD, Arm(methods.scaffold(rounds), each, luck)) for each in conditions]
        train = by_sums if job.part == "means" else by_local_steps
        trained = train(model, [arm for _, arm in arms], clients, data.scored, job.single)
    seconds = round((time.process_time() - begun) / len(arms), 3)
    return [
        Row(
            job.task,
            job.part,
            name,
            *_place(arm.condition, job.partition),
            job.partition,
            arm.condition.epsilon,
            job.seed,
            round(float(curve[-1]), 5),
            " ".join(str(round(1000 * value)) for value in curve),
            seconds,
        )
        for (name, arm), curve in zip(arms, trained.accuracies, strict=True)
    ]


def conditions_of(regime: Regime, clients: int) -> list[Condition]:
    """Every finite ε; beside `local` with n = 100 also no noise."""
    found = [Condition(epsilon, regime, clients) for epsilon in EPSILONS if not math.isinf(epsilon)]
    return [*found, Condition(math.inf)] if (regime, clients) == (Regime.LOCAL, MANY) else found


def run_tuned(job: TunedJob) -> list[Tuned]:
    """Trials of every method, and five trainings of the best of each."""
    begun, task = time.process_time(), TASKS[job.task]
    condition = Condition(job.epsilon, Regime.LOCAL if job.regime == NONE else Regime(job.regime), max(job.clients, 1))
    tuning, whole = tuning_ground(job.task, TUNING_SEED), ground(job.task)
    configs = {
        name: [BOXES[box].at(point) for point in methods.points(TRIALS)]
        for name, box in ({name: name for name in BOXES} if job.partition == ANY else {SCAFFOLD: "FedGD"}).items()
    }

    def settings_of(name: str, trial: int) -> Settings:
        config = configs[name][trial]
        return methods.local_steps(config, 2 + 2 * (trial % 2)) if name == SCAFFOLD else BOXES[name].make(task, config)

    def accuracies(chosen: Sequence[tuple[str, int]], data: Ground, seeds: Sequence[int]) -> FloatArray:
        """(seeds, chosen)."""
        model = LinearHead(data.train.x.shape[1], data.classes)
        lucks = [_luck(model, seed) for seed in seeds]
        arms = [[Arm(settings_of(*each), condition, luck) for each in chosen] for luck in lucks]
        if job.partition == ANY:
            return _last(model, [arm for line in arms for arm in line], data).reshape(len(seeds), -1)
        dealings = [dealt(data.train, job.partition, job.clients, seed) for seed in seeds]
        return np.stack([_last(model, line, data, each) for line, each in zip(arms, dealings, strict=True)])

    trials = [(name, trial) for name in configs for trial in range(TRIALS)]
    worth = dict(zip(trials, accuracies(trials, tuning, [TUNING_SEED])[0], strict=True))
    best = [(name, max(range(TRIALS), key=lambda trial: worth[name, trial])) for name in configs]
    finals = dict(zip(SEEDS, accuracies(best, whole, SEEDS), strict=True))
    seconds = round((time.process_time() - begun) / (len(trials) + len(best) * len(finals)), 3)

    def row(name: str, trial: int, seed: int, accuracy: float) -> Tuned:
        place = job.task, name, job.regime, job.clients, job.partition, job.epsilon
        return Tuned(*place, trial, seed, json.dumps(configs[name][trial]), round(float(accuracy), 5), seconds)

    found = [row(name, trial, -1, worth[name, trial]) for name, trial in trials]
    for seed, values in finals.items():
        found += [row(name, trial, seed, value) for (name, trial), value in zip(best, values, strict=True)]
    return found


def _last(model: LinearHead, arms: Sequence[Arm], data: Ground, clients: Sequence[Records] | None = None) -> FloatArray:
    """Accuracy at the end, (S,); with clients by local steps, of which stacked arms have the same number."""
    if clients is None:
        return scores(model, by_sums(model, arms, data.train, single=True).thetas, data.scored)
    found = np.zeros(len(arms))
    steps = [arm.settings.local_steps for arm in arms]
    for number in sorted(set(steps)):
        group = [index for index, each in enumerate(steps) if each == number]
        trained = by_local_steps(model, [arms[index] for index in group], clients, single=True)
        found[group] = scores(model, trained.thetas, data.scored)
    return found


def _luck(model: LinearHead, seed: int) -> Luck:
    return Luck(started(model.features, seed, model.classes), Normals(seed, model.dimension))


def _place(condition: Condition, partition: str) -> tuple[str, int]:
    """Regime and n in the CSV."""
    if partition == ANY and math.isinf(condition.epsilon):
        return NONE, 0
    return str(condition.regime), condition.clients


def _job_of(row: Row) -> rows.Key:
    return row.task, row.part, row.seed, MANY if row.regime == NONE else row.clients, row.partition


def _tuned_job_of(row: Tuned) -> rows.Key:
    return row.task, row.epsilon, row.regime, row.clients, row.partition
