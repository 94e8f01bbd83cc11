"""The tables, as lists of jobs; a CSV takes a job's rows when it is done, and a job that is in it is not run again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpray.experiments.papers import rows
from dpray.experiments.papers.dp_gibo.methods import FAMILIES, Found, Ground, dp_gibo
from dpray.experiments.papers.dp_gibo.simulate import accounts
from dpray.experiments.papers.dp_gibo.tasks import TASKS, Task
from dpray.platform.datasets import DatasetMissing


@dataclass(frozen=True)
class Block:
    """Some families on some tasks.

    Attributes:
        tasks, families: names.
        mus: μ of the private methods.
        variant: what is varied, as text (ablations); "" otherwise.
        options: arguments of DP-GIBO's search.
        deviation: τ of the evaluations.
        rules: step rules of DP-GIBO; () for all of the family.
        most_seeds: as many of the table's seeds at most (slow methods).
    """

    tasks: tuple[str, ...]
    families: tuple[str, ...]
    mus: tuple[float, ...] = (1.0, 0.2)
    variant: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    deviation: float = 0.0
    rules: tuple[str, ...] = ()
    most_seeds: int | None = None


@dataclass(frozen=True)
class Table:
    """A table: its blocks, and the seeds it has where none are asked for."""

    name: str
    title: str
    blocks: tuple[Block, ...]
    seeds: range


@dataclass(frozen=True)
class Row:
    """A line of the CSV; `loss` is the exact mean loss, which only public data may show."""

    task: str
    variant: str
    family: str
    method: str
    mu: float
    seed: int
    evaluations: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class Job:
    """One family, task and seed."""

    block: Block
    task: Task
    family: str
    seed: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What its rows have in common."""
        return self.task.name, self.block.variant, self.family, self.seed

    def rows(self) -> list[Row]:
        """Run it."""
        family: Callable[[Ground], Iterator[Found]] = FAMILIES[self.family]
        with accounts() as open_accounts:
            ground = Ground(
                self.task, self.seed, open_accounts, self.block.mus, self.block.options, self.block.deviation
            )
            found = list(dp_gibo(ground, self.block.rules) if self.block.rules else family(ground))
        name, variant = self.task.name, self.block.variant
        return [
            Row(name, variant, self.family, f.method, f.mu, self.seed, f.evaluations, f.loss, round(f.seconds, 3))
            for f in found
        ]


_PRIVATE = ("start", "gibo", "dp-gibo", "differences", "spsa", "random", "random, whole box")
_ABLATED = ("lasso10", "gp10")


def _support_vectors() -> Iterator[Block]:
    """What matters most first: these evaluations are the slow ones."""
    first, rest = ("start", "dp-gibo", "random"), ("differences", "spsa", "random, whole box")
    yield Block(("svr-gas",), first)
    yield Block(("svr-ct_slices",), _PRIVATE)
    yield Block(("svr-gas",), ("gibo",))
    yield Block(("svr-keggundirected",), (*first, "gibo"))
    yield Block(("svr-gas", "svr-keggundirected"), rest)


def _ablations() -> Iterator[Block]:
    rules = ("noise_aware", "adagrad")
    for mu in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0):
        yield Block(_ABLATED, ("dp-gibo",), (mu,), f"mu={mu:g}", rules=rules)
        yield Block(_ABLATED, ("random",), (mu,), f"mu={mu:g}")
    yield Block(_ABLATED, ("start", "gibo"), (), "mu=inf")
    for bias in (6.0, 3.0, 1.5, 0.75, 0.5):
        options = {"batch": "adaptive", "bias": bias}
        yield Block(_ABLATED, ("dp-gibo",), (1.0,), f"bias={bias:g}", options, rules=("noise_aware",))
    for deviation in (0.0, 0.005, 0.02):
        for noise in (1e-4, 1e-2, 1.0):
            variant = f"tau={deviation:g} sigma2={noise:g}"
            yield Block(_ABLATED, ("dp-gibo",), (1.0,), variant, {"noise": noise}, deviation, ("noise_aware",))


def _table(name: str, title: str, tasks: Sequence[str], seeds: range, bo: Sequence[str]) -> Table:
    return Table(name, title, (Block(tuple(tasks), _PRIVATE), Block(tuple(bo), ("global bo",), most_seeds=5)), seeds)


TABLES = {
    table.name: table
    for table in (
        _table("lasso", "Group LASSO", [f"lasso{d}" for d in (2, 10, 20)], range(200, 220), ["lasso2", "lasso10"]),
        _table("gp", "GP regression", [f"gp{d}" for d in (2, 5, 10, 15)], range(200, 220), ["gp2", "gp5", "gp10"]),
        Table("svr", "Kernel SVR", tuple(_support_vectors()), range(200, 205)),
        Table("ablations", "Ablations of DP-GIBO", tuple(_ablations()), range(200, 210)),
    )
}
"""Every table, by name."""


def jobs(table: Table, seeds: Iterable[int], tasks: Mapping[str, Task] = TASKS) -> list[Job]:
    """All jobs of a table, block by block, seed by seed: what is there after an interruption is whole seeds."""
    chosen = list(seeds)
    return [
        Job(block, tasks[task], family, seed)
        for block in table.blocks
        for seed in chosen[: block.most_seeds]
        for task in block.tasks
        for family in block.families
    ]


def available(table: Table, tasks: Mapping[str, Task] = TASKS) -> tuple[Table, list[str]]:
    """The table without the tasks whose data is not here, and a sentence for each of those."""
    missing: dict[str, str] = {}
    for name in dict.fromkeys(task for block in table.blocks for task in block.tasks):
        try:
            tasks[name].objective(0)
        except DatasetMissing as error:
            missing[name] = f"{name} was skipped: {error}"
    blocks = tuple(
        dataclasses.replace(block, tasks=tuple(task for task in block.tasks if task not in missing))
        for block in table.blocks
    )
    return dataclasses.replace(table, blocks=blocks), list(missing.values())


def fill(todo: Sequence[Job], place: Path, *, workers: int = 1, told: Callable[[str], object] = print) -> int:
    """Run the jobs whose rows `place` does not have; returns how many. See `rows.fill`."""
    return rows.fill(todo, place, Row, _job_of, Job.rows, workers=workers, told=told)


def read(place: Path) -> list[Row]:
    """The rows of a CSV; see `rows.read`."""
    return rows.read(place, Row)


def _job_of(row: Row) -> rows.Key:
    return row.task, row.variant, row.family, row.seed
