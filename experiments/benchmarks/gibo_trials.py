"""DP-GIBO's evaluations through a real Tuner: what Ray Tune costs where the objective is cheap.

| symbol | meaning                                       | here  |
|--------|-----------------------------------------------|-------|
| d, T   | dimension; iterations                         | 102, 10 |
| b      | points of an iteration, d + 1                 | 103   |
|        | evaluations, each of them a sleep of 1 ms     | 1 030 |

Bound: 40 s on two cores for the whole `Tuner.fit`, trial processes and curator included. A trial costs Tune about .1 s
whatever it does, so a trial evaluates several points (`points_per_trial`); how many is the first column. The yardstick
is the same evaluations one after the other in this process.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger import Ledger
from dpray.platform.user_losses import UserLosses

BOUND = 40.0


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    dimension: int = 102
    iterations: int = 10
    users: int = 200
    per_trial: tuple[int, ...] = (26, 13, 1)


FULL = Size()
QUICK = Size(dimension=3, iterations=1, per_trial=(2,))


class OneMillisecond(UserLosses):
    """An objective that takes 1 ms and has a minimum in the middle."""

    def __init__(self, users: int) -> None:
        self.users = users

    def fit(self, config: dict[str, Any]) -> NDArray[np.float64]:
        """The point itself, after 1 ms."""
        time.sleep(1e-3)
        return np.array(list(config.values()))

    def losses(self, model: NDArray[np.float64]) -> NDArray[np.float64]:
        """The same for every user."""
        return np.full(self.users, (model**2).sum())


def rows(size: Size) -> list[str]:
    """The table, in Markdown. Ray must not be running: it is started and ended here."""
    import ray

    from dpray.experiments import engine

    engine.prepare(None)
    evaluations = size.iterations * (size.dimension + 1)
    lines = [
        f"## {evaluations} evaluations of 1 ms through Tune, d = {size.dimension}, T = {size.iterations}",
        "",
        f"Bound: {BOUND:g} s. One after the other, without Tune: {_plain(size, evaluations):.2f} s.",
        "",
        "| points a trial | trials | seconds | evaluations/s | ended |",
        "|---|---|---|---|---|",
    ]
    with engine.ray_running(None, "auto"):
        for index, per_trial in enumerate(size.per_trial):
            seconds, trials, reason = _tuned(size, per_trial, index)
            lines.append(f"| {per_trial} | {trials} | {seconds:.1f} | {evaluations / seconds:.0f} | {reason} |")
    assert not ray.is_initialized()
    return lines


def _plain(size: Size, evaluations: int) -> float:
    task = OneMillisecond(size.users)
    config = {f"x{j}": 0.0 for j in range(size.dimension)}
    began = time.perf_counter()
    for _ in range(evaluations):
        task.losses(task.fit(config))
    return time.perf_counter() - began


def _tuned(size: Size, per_trial: int, index: int) -> tuple[float, int, str | None]:
    from ray import tune

    from dpray.searchers.gibo import DPGIBOSearch

    with tempfile.TemporaryDirectory() as folder, Ledger(f"sqlite:///{Path(folder) / 'ledger.db'}") as ledger:
        people = ledger.population(f"people{index}")
        people.account("user", Budget(8.0, 1e-5))
        space = {f"x{j}": tune.uniform(-3.0, 3.0) for j in range(size.dimension)}
        began = time.perf_counter()
        search = DPGIBOSearch(
            OneMillisecond(size.users),
            people.run("run"),
            mu=1.0,
            clip=0.5,
            iterations=size.iterations,
            space=space,
            points_per_trial=per_trial,
        )
        tuner = tune.Tuner(
            search.trainable(),
            param_space=space,
            tune_config=search.tune_config(),
            run_config=tune.RunConfig(storage_path=str(Path(folder) / "tune"), verbose=0),
        )
        results = tuner.fit()
        seconds = time.perf_counter() - began
        search.close()
    return seconds, len(results), search.reason
