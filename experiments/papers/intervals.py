"""Intervals over seeds, and the comparison of methods in pairs.

| symbol | meaning                                                                   | shape |
|--------|---------------------------------------------------------------------------|-------|
| x_k    | log of the loss a method found with seed k                                | (K,)  |
| r_k    | x_k − log of the loss the reference found with the same seed              | (K,)  |

Losses of different seeds (other data, another start) differ by a factor, so means are geometric and differences are
ratios. Intervals are Student's t, 95 %, over the seeds: of the mean of x_k or r_k, then exponentiated. Pairing takes
the spread between seeds out: the interval of a ratio is much narrower than the two losses' own.

Accuracies are averaged as they are (`plain`), over runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean, geometric for losses, and its interval; NaN bounds where there is one seed only."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.mean:.3g}"
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True)
class Pairing:
    """A method against the reference.

    Attributes:
        ratio: geometric mean of (method's loss / reference's loss); above 1: the reference is better.
        worse: seeds with which the method's loss is higher.
        seeds: seeds that both have.
    """

    ratio: Interval
    worse: int
    seeds: int


def geometric(losses: ArrayLike) -> Interval:
    """Geometric mean of losses above 0, one per seed, with its interval.

    Raises:
        ValueError: no losses, or one that is not above 0.
    """
    values = np.asarray(losses, dtype=np.float64)
    if not values.size or not (values > 0).all():
        raise ValueError(f"{values.size} losses were given; give one or more, all above 0.")
    return _exponentiated(np.log(values))


def plain(values: ArrayLike) -> Interval:
    """Mean of values, one per run, with its interval: for accuracies, which have a scale of their own.

    Raises:
        ValueError: no values, or one that is not finite.
    """
    given = np.asarray(values, dtype=np.float64)
    if not given.size or not np.isfinite(given).all():
        raise ValueError(f"{given.size} values were given; give one or more, all finite.")
    mean, half = _student(given)
    return Interval(mean, mean - half, mean + half)


def paired(losses: Mapping[int, float], reference: Mapping[int, float]) -> Pairing:
    """Losses by seed against the reference's: only seeds that both have count.

    Raises:
        ValueError: they share no seed.
    """
    shared = sorted(set(losses) & set(reference))
    if not shared:
        raise ValueError("The two methods share no seed, so there is nothing to pair.")
    ratios = np.log([losses[seed] / reference[seed] for seed in shared])
    return Pairing(_exponentiated(ratios), int((ratios > 0).sum()), len(shared))


def _exponentiated(logs: FloatArray) -> Interval:
    mean, half = _student(logs)
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def _student(values: FloatArray) -> tuple[float, float]:
    """Mean, and half the width of its interval; NaN for one value."""
    from scipy.stats import t

    count = len(values)
    if count < 2:
        return float(values.mean()), math.nan
    half = float(t.ppf(0.5 + CONFIDENCE / 2, count - 1)) * float(values.std(ddof=1)) / math.sqrt(count)
    return float(values.mean()), half
