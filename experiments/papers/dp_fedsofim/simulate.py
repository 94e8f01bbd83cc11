"""Many trainings at once: those that differ in noise, seed or settings only share one pass over the records.

| symbol | code      | meaning                                                                    | shape     |
|--------|-----------|----------------------------------------------------------------------------|-----------|
| S      | `arms`    | trainings that are stacked                                                 |           |
| θ      | `thetas`  | parameters of all of them                                                  | (S, d)    |
| u      |           | clipped sum over all records, without noise                                | (S, d)    |
| N      |           | what sums are divided by: records; with `means` the smallest client's, n times |       |
| G      |           | (u + σz)/N                                                                 | (S, d)    |
| y, c_i | `y`, `controls` | DP-SCAFFOLD: clients' own parameters, control variates               | (n, S, d) |

With the mean over records, u does not depend on how records are dealt out to clients: iid and Dirichlet are the same
training, bit for bit but for the order of a sum. Only a mean of client means (`means`) and local steps see clients.

Steps, noise scales, clipped sums and preconditioners are the product's own; what is simulated is the way of messages.
A test lays the parameters of every method beside those of its trainer, over a cohort with the same normals.

Products over a block of records may be in float32 (`single`), for twice the speed: sums over blocks, noise, steps and
states are float64 all the same, and so is everything the product does.

*Guarantee.* None: noise is seeded so that tables can be made again. For public data only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from dpray.experiments.papers.dp_fedsofim.noise import Condition, covariance_std, gradient_std
from dpray.platform.cohort.client import Records
from dpray.platform.privacy.mechanisms import clipped_covariance, pack_symmetric, unpack_symmetric
from dpray.trainers.fedfc import FedFCSettings, preconditioner
from dpray.trainers.models import Design, LinearHead, take
from dpray.trainers.settings import ServerState, Settings

FloatArray = NDArray[np.float64]

_BLOCK = 1024  # records of a pass at a time: their residuals, for all trainings, stay in the cache


class Noise(Protocol):
    """Standard normals as `noise.Normals` gives them."""

    def gradient(self, t: int) -> FloatArray:
        """(d,)."""

    def covariance(self, numbers: int) -> FloatArray:
        """(numbers,)."""

    def step(self, t: int, k: int, clients: int) -> FloatArray:
        """(n, d)."""


@dataclass(frozen=True, eq=False)
class Luck:
    """What a seed decides: θ_0, (d,), and z."""

    start: FloatArray
    noise: Noise


@dataclass(frozen=True, eq=False)
class Arm:
    """One training of a stack; those of a seed share their `luck`."""

    settings: Settings
    condition: Condition
    luck: Luck


@dataclass(frozen=True, eq=False)
class Trained:
    """What became of the trainings.

    Attributes:
        thetas: (S, d) at the end.
        accuracies: (S, T), after every round; without records to score NaN.
    """

    thetas: FloatArray
    accuracies: FloatArray


def started(features: int, seed: int, classes: int) -> FloatArray:
    """θ_0 as `torch.nn.Linear` draws it, uniform within ±1/√f, (d,); public, by the seed."""
    bound = 1 / np.sqrt(features)
    return np.random.default_rng([seed, 3]).uniform(-bound, bound, (features + 1) * classes)


def by_sums(
    model: LinearHead,
    arms: Sequence[Arm],
    train: Records | Sequence[Records],
    scored: Records | None = None,
    single: bool = False,
) -> Trained:
    """Algorithms that ask for one sum a round.

    Args:
        model: the head; its start is not used.
        arms: with equal T.
        train: all records, for the mean over records; or each client's, for the mean of client means.
        scored: records that are predicted after every round.
        single: products in float32.
    """
    means = not isinstance(train, Records)
    designs = [model.prepare(part) for part in (train if means else _blocks(train))]  # type: ignore[union-attr, arg-type]
    counts = [len(design.y) for design in designs]
    weights = [min(counts) / count if means else 1.0 for count in counts]
    N, records = (min(counts) * len(counts) if means else sum(counts)), sum(counts)
    T, clips = arms[0].settings.rounds, np.array([arm.settings.clip for arm in arms])
    sigma = np.stack([_std(model, arm, records) for arm in arms])
    states = _preconditioned(model, arms, designs)
    designs = [_rounded(design) for design in designs] if single else designs
    accuracies = np.full((len(arms), T), np.nan)
    for t in range(1, T + 1):
        u = _sums(model, _thetas(states), designs, weights, clips)
        z = {luck: luck.noise.gradient(t) for luck in {arm.luck for arm in arms}}
        for s, arm in enumerate(arms):
            G = (u[s] + sigma[s, t - 1] * z[arm.luck]) / N
            states[s] = _after(arm.settings, states[s], G, t, float(sigma[s, t - 1]) / N)
        if scored is not None:
            accuracies[:, t - 1] = scores(model, _thetas(states), scored)
    return Trained(_thetas(states), accuracies)


def by_local_steps(
    model: LinearHead,
    arms: Sequence[Arm],
    clients: Sequence[Records],
    scored: Records | None = None,
    single: bool = False,
) -> Trained:
    """DP-SCAFFOLD with K > 1 steps, regime `local`; arms with equal T, K and luck, arguments as in `by_sums`."""
    designs = [model.prepare(part) for part in clients]
    designs = [_rounded(design) for design in designs] if single else designs
    counts = np.array([len(part) for part in clients], dtype=np.float64)
    n, N, d, S = len(clients), int(counts.sum()), model.dimension, len(arms)
    T, K = arms[0].settings.rounds, arms[0].settings.local_steps
    clips = np.array([arm.settings.clip for arm in arms])
    rates = np.array([arm.settings.local_rate for arm in arms])[:, None]
    sigma = np.stack([_std(model, arm, N) for arm in arms])
    states = [arm.settings.initial_state(arm.luck.start) for arm in arms]
    controls = np.zeros((n, S, d))
    accuracies = np.full((S, T), np.nan)
    for t in range(1, T + 1):
        corrections = np.tensordot(counts, controls, 1) / N - controls
        y = np.repeat(_thetas(states)[None], n, axis=0)
        messages = np.zeros((n, S, d))
        for k in range(K):
            z = arms[0].luck.noise.step(t, k, n)
            for i, design in enumerate(designs):
                noised = _sums(model, y[i], [design], [1.0], clips) + sigma[:, t - 1, None] * z[i]
                messages[i] += noised
                y[i] -= rates * (noised / counts[i] + corrections[i])
        G = messages.sum(axis=0) / (N * K)
        s = sigma[:, t - 1] * np.sqrt(n * K) / (N * K)
        states = [_after(arm.settings, states[a], G[a], t, float(s[a])) for a, arm in enumerate(arms)]
        controls = messages / (K * counts[:, None, None])
        if scored is not None:
            accuracies[:, t - 1] = scores(model, _thetas(states), scored)
    return Trained(_thetas(states), accuracies)


def scores(model: LinearHead, thetas: FloatArray, records: Records) -> FloatArray:
    """Accuracy of every training, (S,)."""
    S, f, K = len(thetas), model.features, model.classes
    W = thetas.reshape(S, f + 1, K)
    right = np.zeros(S)
    for block in _blocks(records):
        z = (block.x @ W[:, :-1].transpose(1, 0, 2).reshape(f, S * K)).reshape(-1, S, K) + W[:, -1]
        right += (z.argmax(axis=2) == block.y[:, None]).sum(axis=0)
    return right / len(records)


def _sums(
    model: LinearHead, thetas: FloatArray, designs: Sequence[Design], weights: Sequence[float], clips: FloatArray
) -> FloatArray:
    """u, (S, d): trainings with the same C in one product."""
    total = np.zeros_like(thetas)
    groups = [np.flatnonzero(clips == clip) for clip in np.unique(clips)]
    for group in groups:
        asked = thetas[group].astype(designs[0].x.dtype)
        for design, weight in zip(designs, weights, strict=True):
            everyone = np.ones((len(group), len(design.y)), dtype=np.bool_)
            total[group] += weight * model.fold_sums(asked, design, everyone, float(clips[group[0]]))
    return total


def _rounded(design: Design) -> Design:
    """The design in float32; products with parameters in float32 then are, too."""
    x, norm = (cast(FloatArray, array.astype(np.float32)) for array in (design.x, design.norm))
    return replace(design, x=x, norm=norm)


def _preconditioned(model: LinearHead, arms: Sequence[Arm], designs: Sequence[Design]) -> list[ServerState]:
    """States before the first round, those of DP-FedFC with the P that its first release makes."""
    features, records = model.features + 1, sum(len(design.y) for design in designs)
    exact: dict[float, FloatArray] = {}
    ready = []
    for arm in arms:
        state = arm.settings.initial_state(arm.luck.start)
        if not isinstance(arm.settings, FedFCSettings):
            ready.append(state)
            continue
        C, gamma = arm.settings.covariance_clip, arm.settings.gamma
        if C not in exact:
            rows = [np.column_stack([design.x, np.ones(len(design.x))]) for design in designs]
            exact[C] = pack_symmetric(np.sum([clipped_covariance(part, C) for part in rows], axis=0))
        sigma = covariance_std(arm.settings, arm.condition, features, records)
        packed = exact[C] + sigma * arm.luck.noise.covariance(len(exact[C]))
        P = preconditioner(unpack_symmetric(packed, features), records, gamma)
        ready.append(replace(state, slots={**state.slots, "preconditioner": P}))
    return ready


def _after(settings: Settings, state: ServerState, G: FloatArray, t: int, s: float) -> ServerState:
    """The state after round t; the one before, where the step is not finite: there the trainer stops."""
    if state.steps < t - 1:
        return state
    with np.errstate(over="ignore", invalid="ignore"):
        after = settings.server_step(state, G, t, s)
    return replace(after, steps=t) if np.isfinite(after.theta).all() else state


def _std(model: LinearHead, arm: Arm, records: int) -> FloatArray:
    return gradient_std(arm.settings, arm.condition, model.dimension, records, model.relative_error)


def _thetas(states: Sequence[ServerState]) -> FloatArray:
    return np.stack([state.theta for state in states])


def _blocks(records: Records) -> list[Records]:
    return [take(records, np.arange(i, min(i + _BLOCK, len(records)))) for i in range(0, len(records), _BLOCK)]
