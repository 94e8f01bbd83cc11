"""The tables, as lists of jobs, one for each population; a CSV takes a job's rows when it is done.

A table has two CSVs: what every candidate is worth, and what each way to choose chose. A *run* is one repetition of the
vote, with ballots and noise of its own, on the local scores of one seed. Seeds draw records, partition, splits, starts
and minibatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpray.experiments.papers import rows
from dpray.experiments.papers.dp_hype.grid import GRID
from dpray.experiments.papers.dp_hype.measured import local_losses, measured
from dpray.experiments.papers.dp_hype.tasks import TASKS, Condition, Task
from dpray.experiments.papers.dp_hype.votes import RULES, Rule, Subsets
from dpray.platform.privacy.noise import NoiseSource

EPSILONS = (0.1, 0.25, 0.5, 1.0, 3.0, math.inf)
REPETITIONS = 20


@dataclass(frozen=True)
class Block:
    """Partitions with the numbers of clients they are dealt to."""

    partitions: tuple[str, ...]
    clients: tuple[int, ...]


@dataclass(frozen=True)
class Table:
    """A table: a task, its populations, and the seeds it has where none are asked for."""

    name: str
    title: str
    blocks: tuple[Block, ...]
    seeds: range


@dataclass(frozen=True)
class Worth:
    """A line of the first CSV: a candidate, its mean local score, and its federated model's accuracy."""

    task: str
    partition: str
    clients: int
    seed: int
    candidate: int
    learning_rate: float
    gamma: float
    momentum: float
    local: float
    accuracy: float


@dataclass(frozen=True)
class Choice:
    """A line of the second CSV: which candidates a method chose in its runs, and their mean accuracy."""

    task: str
    partition: str
    clients: int
    seed: int
    method: str
    epsilon: float
    winners: str
    accuracy: float

    @property
    def chosen(self) -> tuple[int, ...]:
        """The candidate of each run."""
        return tuple(int(number) for number in self.winners.split())


@dataclass(frozen=True)
class Job:
    """One population, and where its numbers are kept."""

    condition: Condition
    cache: Path

    @property
    def key(self) -> rows.Key:
        """What its rows have in common."""
        return self.condition.key


_REDUCED = (Block(("iid", "dir0.5"), (100, 50)), Block(("dir5", "dir30"), (100, 50)))

TABLES = {
    table.name: table
    for table in (
        Table(
            "adult",
            "Adult",
            (
                Block(("dir0.5", "iid"), (100,)),
                Block(("iid",), (50, 250)),
                Block(("dir0.5",), (50,)),
                Block(("dir2",), (250,)),
                Block(("dir5", "dir30"), (100, 50, 250)),
            ),
            range(300, 305),
        ),
        Table("mnist", "MNIST, reduced", (*_REDUCED, Block(("iid",), (250,))), range(300, 303)),
        Table("cifar", "CIFAR-10-JPEG, reduced", _REDUCED, range(300, 303)),
    )
}
"""Every table, by name; what matters most comes first."""


def jobs(table: Table, seeds: Iterable[int], cache: Path, task: Task | None = None) -> list[Job]:
    """All jobs of a table, seed by seed: what is there after an interruption is whole seeds."""
    chosen = task or TASKS[table.name]
    return [
        Job(Condition(chosen, partition, clients, seed), cache)
        for seed in seeds
        for block in table.blocks
        for partition in block.partitions
        for clients in block.clients
    ]


def fill(
    todo: Sequence[Job], folder: Path, name: str, *, workers: int = 1, told: Callable[[str], object] = print
) -> int:
    """Run the jobs whose rows are missing, `NAME_candidates.csv` and then `NAME.csv`; returns how many were measured.

    Raises:
        DatasetMissing: the data is not there.
    """
    asked = partial(rows.fill, todo, workers=workers, every=1, told=told)
    count = asked(folder / f"{name}_candidates.csv", Worth, _job_of, worths)
    asked(folder / f"{name}.csv", Choice, _job_of, choices)
    return count


def worths(job: Job) -> list[Worth]:
    """What each candidate is worth in a population."""
    _one_thread()
    found = measured(job.condition, job.cache)
    return [
        Worth(
            *job.condition.key,
            number,
            config["learning_rate"],
            config["gamma"],
            config["momentum"],
            local=round(_mean(found.local[:, number]), 6),
            accuracy=round(float(found.worth[number]), 6),
        )
        for number, config in enumerate(GRID)
    ]


def choices(job: Job) -> list[Choice]:
    """What each rule chooses in a population, at every ε, in all repetitions."""
    _one_thread()
    found = measured(job.condition, job.cache)
    source = NoiseSource(job.condition.seed)
    lines = []
    for rule in fitting(job.condition):
        key = (*job.condition.key, rule.name)
        scores = found.local if rule.score == "accuracy" else local_losses(job.condition, job.cache)
        runs = [rule.choose(scores, EPSILONS, source, *key, run) for run in range(REPETITIONS)]
        for epsilon, chosen in zip(EPSILONS, zip(*runs, strict=True), strict=True):
            accuracy = round(float(found.worth[list(chosen)].mean()), 6)
            winners = " ".join(str(number) for number in chosen)
            lines.append(Choice(*job.condition.key, rule.name, epsilon, winners, accuracy))
    return lines


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def fitting(condition: Condition) -> list[Rule]:
    """The rules for a population: subsets need a client a candidate, votes by loss a second training."""
    left_out = [rule for rule in RULES if rule.score == "loss" and not condition.task.by_loss]
    if condition.clients < len(GRID):
        left_out += [rule for rule in RULES if isinstance(rule, Subsets)]
    return [rule for rule in RULES if rule not in left_out]


def _job_of(row: Worth | Choice) -> rows.Key:
    return row.task, row.partition, row.clients, row.seed


def _mean(scores: NDArray[np.float64]) -> float:
    """Over the clients that have a score."""
    known = scores[~np.isnan(scores)]
    return float(known.mean()) if known.size else math.nan
