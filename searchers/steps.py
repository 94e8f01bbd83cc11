"""Step rules: how a private descent moves along what it has released.

| symbol | meaning                                                            | shape  | in the code           |
|--------|--------------------------------------------------------------------|--------|-----------------------|
| θ_t    | iterate t, in the coordinates of the box                           | (d,)   | `thetas[t]`           |
| ĝ_t    | released gradient at θ_t: clipped mean plus N(0, σ² I)             | (d,)   | `gradients[t]`        |
| σ      | std of the noise on each coordinate of every ĝ_t; 0 without noise  |        | `context.sigma`       |
| T      | planned number of steps                                            |        | `context.iterations`  |
| w      | width of the box                                                   | (d,)   | `context.width`       |
| S_t    | Σ_{i≤t} ĝ_i², coordinate by coordinate                             | (d,)   | `_energy`             |

| rule         | θ_{t+1} before projection                     | result                      | source          |
|--------------|-----------------------------------------------|-----------------------------|-----------------|
| `Sgd`        | θ_t − η ĝ_t                                   | last iterate                | the theory      |
| `AdaGrad`    | θ_t − r ĝ_t/√S_t                              | last iterate                | the experiments |
| `NoiseAware` | θ_t − min(r, w/4) ĝ_t/√(S_t + κ (t + 1) σ²)   | average of the last quarter | ours            |

All are pure functions of released values and public constants: nothing else need be saved, and `iterates` recomputes
the path from the releases.

*Guarantee.* Post-processing of the releases: the iterates, and the result, cost no privacy beyond them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]

_TINY = np.finfo(np.float64).tiny


@dataclass(frozen=True, eq=False)
class Context:
    """Public constants that a rule may use.

    Attributes:
        sigma: σ, std of the noise on each coordinate of a released gradient, in losses per unit of θ; 0 without noise.
        lower, upper: the box, (d,), in the coordinates of θ.
        iterations: T, planned number of steps.
    """

    sigma: float
    lower: FloatArray
    upper: FloatArray
    iterations: int

    @property
    def width(self) -> FloatArray:
        """w, (d,)."""
        return np.asarray(self.upper - self.lower, dtype=np.float64)


class Rule(Protocol):
    """A step rule. Pure: the same history gives the same step."""

    def next(self, thetas: FloatArray, gradients: FloatArray, context: Context) -> FloatArray:
        """θ_{t+1} before projection, (d,), from θ_0 … θ_t and ĝ_0 … ĝ_t, both (t + 1, d)."""
        ...

    def result(self, thetas: FloatArray) -> FloatArray:
        """What the search returns, (d,), from all iterates (t + 1, d): inside the box, since the box is convex."""
        ...

    def describe(self) -> dict[str, Any]:
        """Name and constants, plain JSON: part of the search's identity."""
        ...


@dataclass(frozen=True)
class Sgd:
    """Plain gradient steps, θ_{t+1} = θ_t − η ĝ_t: what the theory of the paper is about.

    Args:
        rate: η, in units of θ per (loss per unit of θ).
        average: share of the iterates, counted from the last, that the result averages; 0 for the last iterate alone.
    """

    rate: float
    average: float = 0.0

    def __post_init__(self) -> None:
        _positive("rate", self.rate)
        _share("average", self.average)

    def next(self, thetas: FloatArray, gradients: FloatArray, context: Context) -> FloatArray:
        """See `Rule.next`."""
        return np.asarray(thetas[-1] - self.rate * gradients[-1])

    def result(self, thetas: FloatArray) -> FloatArray:
        """See `Rule.result`."""
        return _tail(thetas, self.average)

    def describe(self) -> dict[str, Any]:
        """See `Rule.describe`."""
        return {"rule": "sgd", **asdict(self)}


@dataclass(frozen=True)
class AdaGrad:
    """θ_{t+1} = θ_t − r ĝ_t/√S_t (Duchi et al. 2011): what the authors' experiments use, r = 1.

    A coordinate that is all noise moves like one that is all signal: by ±r/√(t + 1) on average, whatever μ is.

    Args:
        rate: r, in units of θ: the length of the first step along every coordinate.
        average: as `Sgd`.
    """

    rate: float = 1.0
    average: float = 0.0

    def __post_init__(self) -> None:
        _positive("rate", self.rate)
        _share("average", self.average)

    def next(self, thetas: FloatArray, gradients: FloatArray, context: Context) -> FloatArray:
        """See `Rule.next`. A coordinate without any gradient so far stays."""
        return np.asarray(thetas[-1] - self.rate * gradients[-1] / np.sqrt(_energy(gradients) + _TINY))

    def result(self, thetas: FloatArray) -> FloatArray:
        """See `Rule.result`."""
        return _tail(thetas, self.average)

    def describe(self) -> dict[str, Any]:
        """See `Rule.describe`."""
        return {"rule": "adagrad", **asdict(self)}


@dataclass(frozen=True)
class NoiseAware:
    """AdaGrad with longer steps, held back where a coordinate is no more than the known noise, and averaged late.

    θ_{t+1} = θ_t − min(r, w/4) ĝ_t/√(S_t + κ (t + 1) σ²). Noise alone gives S_t ≈ (t + 1) σ²: such a coordinate moves
    √(1 + κ) times less than a clear one, by default 1.06 against 1.5 (AdaGrad: 1 and 1), and what is left of its random
    walk is averaged over the last iterates. Measuring the loss in another unit changes no step.

    Args:
        rate: r, in units of θ: the length of the first step along a coordinate whose gradient is clear. Never more than
            a quarter of the box, so that narrow ranges need no rate of their own.
        damping: κ, how many times the noise's expected energy is added to S_t.
        average: as `Sgd`.
    """

    rate: float = 1.5
    damping: float = 1.0
    average: float = 0.25

    def __post_init__(self) -> None:
        _positive("rate", self.rate)
        if isinstance(self.damping, bool) or not 0 <= self.damping < math.inf:
            raise ValueError(f"damping is {self.damping!r}; it is a finite number from 0.")
        _share("average", self.average)

    def next(self, thetas: FloatArray, gradients: FloatArray, context: Context) -> FloatArray:
        """See `Rule.next`. A coordinate without any gradient so far stays."""
        rate = np.minimum(self.rate, context.width / 4)
        scale = _energy(gradients) + self.damping * len(gradients) * context.sigma**2
        return np.asarray(thetas[-1] - rate * gradients[-1] / np.sqrt(scale + _TINY))

    def result(self, thetas: FloatArray) -> FloatArray:
        """See `Rule.result`."""
        return _tail(thetas, self.average)

    def describe(self) -> dict[str, Any]:
        """See `Rule.describe`."""
        return {"rule": "noise_aware", **asdict(self)}


_BY_NAME: dict[str, type[Sgd | AdaGrad | NoiseAware]] = {"sgd": Sgd, "adagrad": AdaGrad, "noise_aware": NoiseAware}


def rule(step: str | Rule, rate: float | None = None) -> Rule:
    """A rule by name, or as it is.

    Args:
        step: "sgd", "adagrad", "noise_aware", or a rule.
        rate: the named rule's rate, in its own unit; None for its default.

    Raises:
        ValueError: an unknown name; no rate for `sgd`, which has no default; a rate beside a rule.
    """
    if not isinstance(step, str):
        if rate is not None:
            raise ValueError(f"rate={rate!r} was given beside a rule, which has its own: leave it out.")
        return step
    if step not in _BY_NAME:
        raise ValueError(f"There is no step rule {step!r}; there are {', '.join(_BY_NAME)}.")
    if rate is not None:
        return _BY_NAME[step](rate=rate)
    if step == "sgd":
        raise ValueError(
            "step='sgd' needs a rate (units of θ per loss per unit of θ): there is no good one for all losses. "
            "adagrad and noise_aware have defaults."
        )
    return _BY_NAME[step]()  # type: ignore[call-arg]


def iterates(rule: Rule, start: ArrayLike, gradients: ArrayLike, context: Context) -> FloatArray:
    """The whole path θ_0 … θ_t, (t + 1, d), from released gradients (t, d); every iterate is projected onto the box."""
    released = np.asarray(gradients, dtype=np.float64).reshape(-1, len(context.lower))
    thetas = [np.clip(np.asarray(start, dtype=np.float64), context.lower, context.upper)]
    for t in range(len(released)):
        following = rule.next(np.array(thetas), released[: t + 1], context)
        thetas.append(np.clip(following, context.lower, context.upper))
    return np.array(thetas)


def _energy(gradients: FloatArray) -> FloatArray:
    return np.asarray((gradients**2).sum(axis=0))


def _tail(thetas: FloatArray, share: float) -> FloatArray:
    last = max(1, round(share * len(thetas)))
    return np.asarray(thetas[-last:].mean(axis=0), dtype=np.float64)


def _positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}; it is a length, finite and above 0.")


def _share(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{name} is {value!r}; it is a share of the iterates, from 0 (the last alone) to 1 (all).")
