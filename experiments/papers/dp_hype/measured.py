"""What a condition's numbers are made of, computed once: local scores, and what every candidate is worth.

| symbol | meaning                                                                       | shape  |
|--------|-------------------------------------------------------------------------------|--------|
| s      | local scores: accuracy on the fifth of its records that a client held out     | (n, p) |
| a      | accuracy of each candidate's federated model on records that did not vote     | (p,)   |

Votes are cheap and repeated; these are not, and are kept in a file a condition, outside the repository.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpray.experiments.papers.dp_hype import federated
from dpray.experiments.papers.dp_hype.grid import GRID, Config, standing_for
from dpray.experiments.papers.dp_hype.tasks import Condition, Ground, Task
from dpray.experiments.papers.dp_hype.votes import Score

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Measured:
    """The numbers of one condition.

    Attributes:
        local: s, (n, p); NaN where a training diverged or a client had too few records.
        worth: a, (p,).
    """

    local: FloatArray
    worth: FloatArray


def measured(condition: Condition, cache: Path) -> Measured:
    """The numbers of a condition, from the cache if they are there.

    Raises:
        DatasetMissing: the data is not there.
    """

    def compute() -> dict[str, FloatArray]:
        ground = condition.ground()
        return {"local": local_scores(condition, ground), "worth": worths(condition, ground)}

    return Measured(**_kept(condition, "", cache, compute))


def local_losses(condition: Condition, cache: Path) -> FloatArray:
    """Minus the mean cross-entropy on the hold-outs, (n, p), in nats, for votes by loss; from the cache if it is there.

    Raises:
        DatasetMissing: the data is not there.
    """

    def compute() -> dict[str, FloatArray]:
        return {"local": local_scores(condition, condition.ground(), score="loss")}

    return _kept(condition, "-loss", cache, compute)["local"]


def _kept(
    condition: Condition, what: str, cache: Path, compute: Callable[[], dict[str, FloatArray]]
) -> dict[str, FloatArray]:
    """Arrays of a file in the cache, which is written whole or not at all."""
    place = cache / f"{'-'.join(str(part) for part in condition.key)}{what}.npz"
    if place.is_file():
        with np.load(place, allow_pickle=False) as arrays:
            return dict(arrays)
    found = compute()
    place.parent.mkdir(parents=True, exist_ok=True)
    half = place.with_suffix(f".{os.getpid()}.part")
    with half.open("wb") as file:
        np.savez(file, **found)  # type: ignore[arg-type]
    half.replace(place)
    return found


def local_scores(
    condition: Condition, ground: Ground, grid: Sequence[Config] = GRID, score: Score = "accuracy"
) -> FloatArray:
    """s: every client trains every candidate by the product's own local search, (n, p)."""
    from dpray.trainers.local_search import LocalSearchTask, Validation

    task = condition.task
    search = LocalSearchTask(task.model(), training=task.training, validation=Validation(score=score))
    configs = _trained(task, grid)
    distinct = [config for number, config in enumerate(configs) if configs.index(config) == number]
    rows = [
        search.fit_and_scores(distinct, records, np.random.default_rng([condition.seed, 13, number]))
        for number, records in enumerate(ground.clients)
    ]
    return np.asarray(np.array(rows)[:, [distinct.index(config) for config in configs]], dtype=np.float64)


def worths(condition: Condition, ground: Ground, grid: Sequence[Config] = GRID) -> FloatArray:
    """a: federated averaging of every candidate, from a start of its own, (p,)."""
    task = condition.task
    rounds, share = task.federation(condition.partition)
    return federated.accuracies(
        task.model(),
        _trained(task, grid),
        ground.clients,
        ground.test,
        rounds=rounds,
        share=share,
        epochs=task.epochs,
        batch=task.batch,
        dropout=task.dropout,
        seed=condition.seed,
    )


def _trained(task: Task, grid: Sequence[Config]) -> list[Config]:
    return [standing_for(config, task.slow) for config in grid]
