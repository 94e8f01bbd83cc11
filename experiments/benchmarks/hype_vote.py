"""A whole vote of DP-HYPE through Ray Tune on real data: local models of all clients, ballots, one release.

| symbol | meaning                                      | here                                        |
|--------|----------------------------------------------|---------------------------------------------|
| n      | clients, Adult's training part dealt evenly  | 100                                         |
| p      | candidates of the paper's grid               | 10 learning rates × 5 γ × 2 momenta = 100   |
| E, B   | local epochs, minibatch                      | 5, 64                                       |
| k, ε, δ | votes of a client, budget                   | 5, 1, 10⁻⁵                                  |

Bound: 90 s on two cores for `Tuner.fit`, 10 000 local models and the release included; Ray and the clients run already.
"""

from __future__ import annotations

import itertools
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpray.experiments.benchmarks import machine
from dpray.experiments.benchmarks.measure import QUIET, Others
from dpray.platform import datasets
from dpray.platform.cohort import Cohort, Records
from dpray.platform.cohort.partition import partition
from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.ledger import Ledger
from dpray.trainers.local_search import LocalSearchTask, StackedMLP

BOUND = 90.0
RATES = (0.5, 0.1, 0.05, 5e-4, 1e-4, 1e-6, 5e-7, 1e-7, 5e-8, 1e-8)
GAMMAS = (0.0, 0.1, 0.25, 0.99, 1.0)
MOMENTA = (0.0, 0.9)


@dataclass(frozen=True)
class Size:
    """How much is measured; `records`: of all clients together, None: all of Adult's training part."""

    clients: int = 100
    candidates: int = 100
    epochs: int = 5
    records: int | None = None


FULL = Size()
QUICK = Size(clients=4, candidates=12, epochs=1, records=200)


def grid(count: int) -> list[dict[str, float]]:
    """The first candidates of the paper's grid."""
    every = itertools.product(RATES, GAMMAS, MOMENTA)
    return [{"learning_rate": eta, "gamma": gamma, "momentum": beta} for eta, gamma, beta in every][:count]


def rows(size: Size, data: Path | None) -> list[str]:
    """The table, in Markdown; a sentence where Adult is not here. A Ray that runs is used, else one is started."""
    from dpray.experiments import engine

    engine.prepare(None)
    try:
        adult = datasets.load("adult", data)
    except datasets.DatasetMissing as missing:
        return [f"The vote on Adult was not measured: {missing}"]
    x, y = adult.x_train[: size.records], adult.y_train[: size.records]
    parts = partition(y, size.clients, "iid", seed=0)
    shards = {f"client-{index:03d}": Records(x[part], y[part]) for index, part in enumerate(parts)}
    with engine.ray_running(None, 2), tempfile.TemporaryDirectory() as folder, Others() as others:
        found = _vote(shards, size, Path(folder))
    models = size.clients * size.candidates
    quiet = "quiet" if others.cores <= QUIET else f"disturbed: others used {others.cores:.1f} cores"
    return [
        f"## A vote through Tune: Adult, {size.clients} clients, {size.candidates} candidates, {size.epochs} epochs",
        "",
        f"Bound: {BOUND:g} s on two cores; here are {machine.cores()}. {quiet}.",
        "",
        "| local models | trials | seconds | models a second | winner | ended |",
        "|---|---|---|---|---|---|",
        f"| {models} | {found['trials']} | {found['seconds']:.1f} | {models / found['seconds']:.0f} | "
        f"{found['winner']} | {found['reason']} |",
    ]


def _vote(shards: dict[str, Records], size: Size, folder: Path) -> dict[str, Any]:
    from ray import tune

    from dpray.experiments import engine
    from dpray.searchers.hype import DPHypeSearch

    features = next(iter(shards.values())).x.shape[1]
    task = LocalSearchTask(StackedMLP(features), training={"epochs": size.epochs, "dropout": 0.2})
    with Ledger(f"sqlite:///{folder / 'ledger.db'}") as ledger:
        people = ledger.population("people", records_per_client=max(map(len, shards.values())))
        people.account("client", Budget(1.0, 1e-5))
        cohort = Cohort(task, shards, actors=2, state_dir=folder / "sites")
        with engine.hushed():
            cohort.start()
        with cohort, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a vote that is mostly noise: nothing is read from it here
            began = time.perf_counter()
            search = DPHypeSearch(
                cohort, people.run("vote"), budget=Budget(1.0, 1e-5), votes=5, candidates=grid(size.candidates)
            )
            tuner = tune.Tuner(
                search.trainable(),
                tune_config=search.tune_config(),
                run_config=tune.RunConfig(storage_path=str(folder / "tune"), verbose=0),
            )
            results = tuner.fit()
            winner, seconds = search.best_config, time.perf_counter() - began
    return {"seconds": seconds, "trials": len(results), "winner": winner, "reason": search.reason}
