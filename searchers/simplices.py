"""Closed forms of the batch: regular simplices around θ in mutually orthogonal subspaces (§1.2).

Coordinates are u = (z − θ)/ℓ, lengthscales from the iterate θ = 0; the kernel is k(u, v) = exp(−|u − v|²/2).

| symbol | meaning                                                                     | shape  |
|--------|-----------------------------------------------------------------------------|--------|
| d, b   | dimension, points of the batch                                              |        |
| q      | dimension of a simplex: q + 1 points, a pair where q = 1                    |        |
| h, c   | its radius; 1 + 1/q, the squared distance of two corners over 2h²           |        |
| s      | noise variance over outputscale                                             |        |
| a      | direction in which the gradient is probed                                   | (d,)   |
| S, Ω   | covariance of the gradient that kept points leave; importances, diagonal    | (d, d) |

A simplex says nothing about gradients orthogonal to it, and simplices orthogonal to each other do not disturb each
other, because the weights of each add up to zero: variances add. A simplex leaves the fraction
1 − (1 + 1/q)h²e^{−h²}/(1 − e^{−ch²} + s) of the variance of each of its q directions. For b ≤ 2d and equal importances
the best such arrangement equals the numerical joint optimum (compared for d ≤ 5, s from 1e-6 to 100); d + k points make
k simplices, b < d + 1 points one in a subspace.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from scipy.optimize import brentq

from dpray.searchers.joint_design import FloatArray


def axes(importance: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Importances in descending order, and the axes they belong to as columns."""
    order = np.argsort(-importance, kind="stable")
    return importance[order], np.eye(len(order))[:, order]


def directions(unexplained: FloatArray, importance: FloatArray) -> tuple[FloatArray, FloatArray]:
    """What knowing each direction would save, in descending order, and the directions as columns.

    Knowing aᵀg saves aᵀSΩSa/(aᵀSa), S the unexplained covariance; it is stationary at a = Ω^{1/2}v with v an
    eigenvector of Ω^{1/2}SΩ^{1/2}.
    """
    root = np.sqrt(importance)
    values, vectors = np.linalg.eigh(root[:, None] * unexplained * root)
    columns = root[:, None] * vectors
    norms = np.linalg.norm(columns, axis=0)
    columns = np.where(norms > 0, columns, vectors) / np.where(norms > 0, norms, 1.0)
    return np.maximum(values[::-1], 0.0), columns[:, ::-1]


def arranged(values: FloatArray, directions: FloatArray, b: int, s: float, reach: float = 1.0) -> FloatArray:
    """b points as simplices in blocks of the directions, small ones (more exact) where values are large.

    Args:
        values: what knowing each direction saves, (d,), descending.
        directions: the directions, as columns, (d, d).
        b: number of points.
        s: noise.
        reach: points beyond two for each direction are put on the pairs' arms again, this many radii out.

    Returns:
        (b, d). Without such points, directions orthonormal and values equal, it is the joint optimum.
    """
    if b == 1:
        return np.asarray(directions[:, :1].T, dtype=np.float64)  # h²e^{−h²}/(1 + s) is largest at h = 1
    sizes = _blocks(values, min(b, 2 * len(values)), s)
    made = np.concatenate([radius(q, s) * corners(q) @ directions[:, at : at + q].T for at, q in sizes])
    return np.concatenate([made, reach * made[np.arange(b - len(made)) % len(made)]])


def _blocks(values: FloatArray, b: int, s: float) -> list[tuple[int, int]]:
    """(first direction, q) of the simplices that save most, by dynamic programming over (j, p).

    The first j directions, in order, with p points: direction j − 1 stays unknown, or ends a block of q ≤ j directions
    and q + 1 points, which saves the fraction `_saved(q)` of its values.
    """
    d = len(values)
    total = np.concatenate([[0.0], np.cumsum(values)])
    saved = np.array([0.0, *(_saved(q, s) for q in range(1, min(d, b - 1) + 1))])
    gain = np.zeros((d + 1, b + 1))
    choice = np.zeros((d + 1, b + 1), dtype=np.int64)
    for j in range(1, d + 1):
        q = np.arange(min(j, b - 1) + 1)
        first = j - np.maximum(q, 1)
        points = np.arange(b + 1) - np.where(q > 0, q + 1, 0)[:, None]
        added = saved[q] * (total[j] - total[first])
        options = np.where(points >= 0, gain[first[:, None], np.maximum(points, 0)] + added[:, None], -1.0)
        choice[j] = options.argmax(axis=0)
        gain[j] = options.max(axis=0)
    blocks, j, p = [], d, b
    while j > 0:
        size = int(choice[j, p])
        if size:
            blocks.append((j - size, size))
        j, p = j - max(size, 1), p - (size + 1 if size else 0)
    return blocks or [(0, 1)]  # nothing can be saved where only dimensions without room are important


def corners(q: int) -> FloatArray:
    """Regular simplex with corners of length 1 around 0, (q + 1, q)."""
    corners = np.zeros((q + 1, q))
    for k in range(1, q + 1):
        corners[:k, k - 1], corners[k, k - 1] = 1.0, -k
        corners[:, k - 1] /= np.sqrt(k * (k + 1.0))
    return np.asarray(corners * np.sqrt((q + 1.0) / q), dtype=np.float64)


@lru_cache(maxsize=4096)
def radius(q: int, s: float) -> float:
    """h that maximises h²e^{−h²}/(1 − e^{−ch²} + s), c = 1 + 1/q: the root x = h² of the derivative, in (0, 1)."""
    c = 1.0 + 1.0 / q
    return float(
        np.sqrt(brentq(lambda x: (1 - x) * (s - np.expm1(-c * x)) - c * x * np.exp(-c * x), 0.0, 1.0, xtol=1e-300))
    )


def _saved(q: int, s: float) -> float:
    """Fraction of the variance of q directions that a simplex of q + 1 points removes."""
    x, c = radius(q, s) ** 2, 1.0 + 1.0 / q
    return float(c * x * np.exp(-x) / (s - np.expm1(-c * x)))
