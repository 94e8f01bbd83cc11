"""The searches that are compared, all of them the product's, with equal evaluations and an equal start.

| family             | methods                                       | evaluations     | private |
|--------------------|-----------------------------------------------|-----------------|---------|
| start              | start: θ_0, nothing done                      | 0               |         |
| gibo               | GIBO, noise_aware and adagrad                 | T(d + 1)        | no      |
| dp-gibo            | DP-GIBO, noise_aware, adagrad and sgd         | T(d + 1)        | yes     |
| differences        | finite differences, noise_aware and adagrad   | T(d + 1)        | yes     |
| spsa               | SPSA, noise_aware                             | 2T⌊(d + 1)/2⌋   | yes     |
| random             | random search, private random search          | T(d + 1)        | one not |
| random, whole box  | the same, candidates from the whole box       | T(d + 1)        | one not |
| global bo          | BoTorch, over the whole box; up to d = 10     | T(d + 1)        | no      |

- Start: descents begin at θ_0, which is drawn from where the task's searches start; random search's first candidate is
  θ_0, and the others are drawn from the same part of the box ("whole box": from all of it). Global BO has no start; its
  first points are a Sobol sequence over the whole box.
- Random search without privacy tells the candidate with the lowest exact loss: NOT PRIVATE.
- Private random search clips losses to [0, c], and its one release spends the whole μ. c = ½ is what predicting 0
  costs, a public number; c = 1 is shown beside it.
- sgd: rate 3/(σ√d), so that a step of noise alone has length 3, and the last half of the iterates is averaged.
  adagrad: rate 1, last iterate. noise_aware: its defaults.
- Designs and differences: ℓ = 1, σ² = .01, random rotation; h = .5.

Noise is seeded, so a table can be made again: NOT PRIVATE, public data only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpray.experiments.papers.dp_gibo.objectives import Objective
from dpray.experiments.papers.dp_gibo.simulate import AT_ONCE, Accounts, play
from dpray.experiments.papers.dp_gibo.tasks import Remembering, Task, Unsteady
from dpray.searchers import steps

if TYPE_CHECKING:
    from dpray.searchers.central import CentralSearch

BOUNDS = (0.5, 1.0)
"""c of private random search."""


@dataclass(frozen=True)
class Found:
    """What a method found.

    Attributes:
        method: its name in tables.
        mu: what it spent; ∞: not private.
        loss: exact mean loss over the users.
        evaluations: how many points it evaluated.
        seconds: how long it took.
    """

    method: str
    mu: float
    loss: float
    evaluations: int
    seconds: float


@dataclass(frozen=True, eq=False)
class Ground:
    """What a family plays on.

    Args:
        task, seed: which black box.
        accounts: who pays.
        mus: μ of the private methods.
        options: further arguments of DP-GIBO's search (ablations).
        deviation: τ, see `Unsteady`; 0 for exact evaluations.
    """

    task: Task
    seed: int
    accounts: Accounts
    mus: Sequence[float]
    options: Mapping[str, Any] = field(default_factory=dict)
    deviation: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "objective", self.task.objective(self.seed))

    objective: Objective = field(init=False)

    def exact(self, config: Mapping[str, float]) -> float:
        """Mean loss over the users at a configuration."""
        return float(self.objective.losses_many(self.objective.theta(config)[None]).mean())

    def found(self, method: str, mu: float, make: Callable[..., CentralSearch], evaluated: Any = None) -> Found:
        """Play a search; `make` gets task, run and the arguments that all searches share."""
        begun = time.perf_counter()
        run = self.accounts.run(f"{self.task.name}, {method}, {mu:g}", private=math.isfinite(mu))
        own = {"mu": mu} if math.isfinite(mu) else {}
        shared = {"seed": self.seed, "noise_seed": self.seed, "curator_actor": False, "points_per_trial": AT_ONCE}
        search = make(self.objective, run, **own, **shared)
        if evaluated is None:
            exact = self.objective
            evaluated = Unsteady(exact, self.deviation, self.seed) if self.deviation else exact
        count = play(search, evaluated)
        return Found(method, mu, self.exact(search.best_config), count, time.perf_counter() - begun)

    @property
    def descent(self) -> dict[str, Any]:
        """Arguments of every descent."""
        return {
            "iterations": self.task.iterations,
            "space": self.objective.space(),
            "start": self.objective.start(self.seed),
        }

    def sigma(self, mu: float) -> float:
        """σ_DP = 2B√T/(nμ)."""
        return 2 * self.task.clip * math.sqrt(self.task.iterations) / (self.objective.users * mu)


def start(ground: Ground) -> Iterator[Found]:
    """θ_0 itself."""
    yield Found("start", math.inf, ground.exact(ground.objective.start(ground.seed)), 0, 0.0)


def gibo(ground: Ground, rules: Sequence[str | steps.Rule] = ("noise_aware", "adagrad")) -> Iterator[Found]:
    """Without noise and clipping."""
    from dpray.searchers import GIBOSearch

    for rule in rules:
        make = partial(GIBOSearch, step=rule, **ground.descent, **ground.options)
        yield ground.found(f"GIBO {_named(rule)}", math.inf, make)


def dp_gibo(ground: Ground, rules: Sequence[str | steps.Rule] = ("noise_aware", "adagrad", "sgd")) -> Iterator[Found]:
    """The method of the paper, with three rules."""
    from dpray.searchers import DPGIBOSearch

    for mu in ground.mus:
        for given in rules:
            rule = given
            if given == "sgd":
                length = ground.sigma(mu) * math.sqrt(ground.objective.dimension)
                rule = steps.Sgd(3 / length, average=0.5)
            make = partial(DPGIBOSearch, clip=ground.task.clip, step=rule, **ground.descent, **ground.options)
            yield ground.found(f"DP-GIBO {_named(given)}", mu, make)


def differences(ground: Ground) -> Iterator[Found]:
    """Per-user finite differences."""
    from dpray.searchers import FiniteDifferenceSearch

    for mu in ground.mus:
        for rule in ("noise_aware", "adagrad"):
            make = partial(FiniteDifferenceSearch, clip=ground.task.clip, step=rule, **ground.descent)
            yield ground.found(f"finite differences {rule}", mu, make)


def spsa(ground: Ground) -> Iterator[Found]:
    """Two-point random directions."""
    from dpray.searchers import SPSASearch

    for mu in ground.mus:
        make = partial(SPSASearch, clip=ground.task.clip, step="noise_aware", **ground.descent)
        yield ground.found("SPSA noise_aware", mu, make)


def random(ground: Ground, *, whole: bool = False) -> Iterator[Found]:
    """Random candidates: the best by exact losses, and the best by report-noisy-max."""
    from dpray.searchers import PrivateRandomSearch

    objective, suffix = ground.objective, ", whole box" if whole else ""
    configs, thetas = candidates(ground, whole)
    remembered = Remembering(objective)
    begun = time.perf_counter()
    means = remembered.losses_many(thetas).mean(axis=1)
    yield Found(f"random{suffix}", math.inf, float(means.min()), len(means), time.perf_counter() - begun)
    for mu in ground.mus:
        for bound in BOUNDS:
            make = partial(PrivateRandomSearch, bound=bound, candidates=configs)
            yield ground.found(f"private random c={bound:g}{suffix}", mu, make, remembered)


def candidates(ground: Ground, whole: bool) -> tuple[list[dict[str, float]], NDArray[np.float64]]:
    """T(d + 1) configurations and their points: θ_0, and draws from where searches start, or from the whole box."""
    objective = ground.objective
    low, high = (objective.lower, objective.upper) if whole else (objective.start_lower, objective.start_upper)
    count = ground.task.iterations * (objective.dimension + 1)
    drawn = np.random.default_rng([ground.seed, 8]).uniform(low, high, (count - 1, objective.dimension))
    configs = [objective.start(ground.seed), *(objective.config(theta) for theta in drawn)]
    return configs, np.array([objective.theta(config) for config in configs])


def global_bo(ground: Ground) -> Iterator[Found]:
    """BoTorch over the whole box: as many proposals as time allows, a Sobol sequence before them."""
    import torch

    from dpray.searchers import GlobalBOSearch

    torch.set_num_threads(1)
    d, count = ground.objective.dimension, ground.task.iterations * (ground.objective.dimension + 1)
    proposals = proposed(d, count)
    size = max(2, proposals // 10)
    make = partial(
        GlobalBOSearch,
        iterations=1 + proposals // size,
        batch_size=size,
        first=count - proposals // size * size,
        space=ground.objective.space(),
    )
    yield ground.found("global BO", math.inf, make)


def proposed(d: int, count: int) -> int:
    """How many of global BO's points its model proposes; the rest are the Sobol sequence before them.

    A proposal takes ½ s up to d = 10 and 2.5 s at d = 20 among 400 points, a quarter of an hour for one seed, so the
    tables have global BO up to d = 10 only.
    """
    return count - 3 if d <= 2 else min(60, count // 2)


FAMILIES: dict[str, Callable[[Ground], Iterator[Found]]] = {
    "start": start,
    "gibo": gibo,
    "dp-gibo": dp_gibo,
    "differences": differences,
    "spsa": spsa,
    "random": random,
    "random, whole box": partial(random, whole=True),
    "global bo": global_bo,
}
"""Families of methods, by name: each plays all its methods at every μ."""


def _named(rule: str | steps.Rule) -> str:
    return rule if isinstance(rule, str) else str(rule.describe()["rule"])
