"""Bounded contributions: the pure functions whose outputs the mechanisms' sensitivities speak of.

| symbol | meaning                               | shape  |
|--------|---------------------------------------|--------|
| x      | rows: one per record, user or client  | (n, d) |
| C      | clipping bound, L2                    |        |
| s      | scores of candidates, higher is better | (p,)   |
| u      | 2⁻⁵³, unit roundoff of float64        |        |
| S, v   | symmetric matrix and its packing      | (f, f), (f(f+1)/2,) |

A row with any non-finite value contributes zero, whole: a NaN coordinate must not switch clipping off.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from dpray.platform.privacy import checks
from dpray.platform.privacy.noise import FloatArray, GridNoise, IntArray, draw, from_grid

UNIT_ROUNDOFF = 2.0**-53
"""u: half the spacing of float64 numbers around 1."""
_RANGE = 1e100


def clip_rows(rows: ArrayLike, bound: float) -> FloatArray:
    """Rows scaled down to an L2 norm of at most `bound`; rows with a non-finite value become zero.

    Row i of the result depends on row i only. The input is not modified; zero rows stay zero.

    Args:
        rows: (n, d), real.
        bound: C, between 1e-100 and 1e100.

    Returns:
        (n, d) float64 with norms ≤ C(1 + (d + 16)·2⁻⁵³), the factor `float_sum_error` counts with.

    Raises:
        ValueError: rows are not a real matrix, or the bound is out of range.
    """
    bound = _bound(bound)
    x = _matrix(rows, "rows")
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        norms = np.sqrt(np.einsum("ij,ij->i", x, x))
        factors = bound / np.maximum(norms, bound)
        clipped = x * factors[:, None]
    extreme = np.flatnonzero(~np.isfinite(norms))
    if extreme.size:
        clipped[extreme] = _clip_extreme(x[extreme], bound)
    return np.asarray(clipped, dtype=np.float64)


def _clip_extreme(x: FloatArray, bound: float) -> FloatArray:
    """Rows that are not finite, and rows whose squares overflow, which are all longer than any allowed bound."""
    largest = np.max(np.abs(x), axis=1)
    finite = np.isfinite(largest)
    scaled = np.where(finite[:, None], x, 0.0) / np.where(finite, largest, 1.0)[:, None]
    norms = np.where(finite, np.sqrt(np.einsum("ij,ij->i", scaled, scaled)), 1.0)
    return np.asarray(scaled * (bound / norms)[:, None], dtype=np.float64)


def float_sum_error(summands: int, dimension: int) -> float:
    """Bound on how much further than 2C a float64 sum of `summands` clipped vectors can move, in units of C.

    A computed clip factor leaves a norm of at most C(1 + (d + 16)u). A sum of n vectors in any order, fused or not, is
    off by at most γ_m·Σ‖x_i‖ ≤ γ_m·nC in L2, γ_m = mu/(1 − mu), with m = n + 16 for the products in each summand
    (Higham 2002, §3.1 and §4.2). Twice each: once for the data set, once for its neighbour.

    Raises:
        ValueError: so many summands (beyond 2⁴⁵) that the bound means nothing.
    """
    if summands > 2**45:
        raise ValueError(f"Sums of {summands} vectors are beyond what float64 bounds can state: at most 2**45.")
    operations, clipping = (summands + 16) * UNIT_ROUNDOFF, (dimension + 16) * UNIT_ROUNDOFF
    return 2 * (1 + clipping) * summands * operations / (1 - operations) + 2 * clipping


def _bound(bound: float) -> float:
    bound = checks.positive("The clipping bound", bound)
    if not 1 / _RANGE <= bound <= _RANGE:
        raise ValueError(f"The clipping bound must lie between 1e-100 and 1e100, but {bound} was given: rescale.")
    return bound


def _matrix(values: ArrayLike, name: str) -> FloatArray:
    array = np.asarray(values)
    if array.ndim != 2 or array.dtype.kind not in "fiub":
        raise ValueError(f"{name} must be a real matrix (n, d), but an array {array.shape} of {array.dtype} was given.")
    with np.errstate(over="ignore"):
        return array.astype(np.float64, copy=False)


def top_k_votes(scores: ArrayLike, k: int, generator: np.random.Generator) -> IntArray:
    """Ballot with exactly k ones, at the k best scores; ties broken at random, NaN worst of all.

    Ties that went to the lowest index would leak the order of the grid into the votes.

    Args:
        scores: (p,), higher is better.
        k: number of ones, 1 ≤ k ≤ p.
        generator: the client's own; shared with neither noise nor training.

    Returns:
        (p,) int64 of zeros and ones.

    Raises:
        ValueError: scores are not a real vector, or k is not a whole number in 1 … p.
    """
    values = np.asarray(scores)
    if values.ndim != 1 or values.dtype.kind not in "fiub":
        raise ValueError(f"scores must be a real vector (p,), but an array {values.shape} of {values.dtype} was given.")
    k = checks.integer("k", k, at_least=1)
    if k > values.size:
        raise ValueError(f"{k} votes for {values.size} candidates are too many: give at most one each.")
    values = values.astype(np.float64)
    bad = np.isnan(values)
    order = np.lexsort((generator.permutation(values.size), -np.where(bad, 0.0, values), bad))
    ballot = np.zeros(values.size, dtype=np.int64)
    ballot[order[:k]] = 1
    return ballot


def clipped_covariance(rows: ArrayLike, bound: float) -> FloatArray:
    """Σ x̃x̃ᵀ over rows clipped to L2 norm `bound`; (n, f) → (f, f), exactly symmetric; errors as `clip_rows`."""
    x = clip_rows(rows, bound)
    covariance = x.T @ x
    return np.asarray((covariance + covariance.T) / 2, dtype=np.float64)


def pack_symmetric(matrix: ArrayLike) -> FloatArray:
    """Upper triangle of a symmetric (f, f) matrix with off-diagonal entries times √2; Frobenius norm = L2 norm.

    Returns:
        (f(f+1)/2,) float64, row by row.

    Raises:
        ValueError: the matrix is not real, square and symmetric (NaN is not symmetric).
    """
    array = _matrix(matrix, "A symmetric matrix")
    if not np.array_equal(array, array.T):
        raise ValueError(f"The matrix {array.shape} must be square and symmetric without NaN.")
    upper = np.triu_indices(len(array))
    return np.asarray(array[upper] * _weights(*upper), dtype=np.float64)


def unpack_symmetric(packed: ArrayLike, features: int) -> FloatArray:
    """Inverse of `pack_symmetric`: (f(f+1)/2,) → (f, f), exactly symmetric.

    Raises:
        ValueError: the length does not belong to f features.
    """
    features = checks.integer("features", features, at_least=1)
    values = np.asarray(packed, dtype=np.float64)
    upper = np.triu_indices(features)
    if values.shape != upper[0].shape:
        raise ValueError(f"{features} features pack into {len(upper[0])} numbers, but {values.shape} were given.")
    matrix = np.zeros((features, features))
    matrix[upper] = values / _weights(*upper)
    matrix.T[upper] = matrix[upper]
    return matrix


def _weights(rows: IntArray, columns: IntArray) -> FloatArray:
    return np.where(rows == columns, 1.0, math.sqrt(2.0))


def symmetric_noise(noise: GridNoise, features: int, generator: np.random.Generator) -> FloatArray:
    """One noiser's symmetric (f, f) noise: variance s² on the diagonal, s²/2 beside it, mirrored; s = `noise.share`.

    Equal in law to (A + Aᵀ)/2 with A_ij ~ N(0, s²). It is drawn packed and on the grid; a release adds the packed
    integers to the packed sum *before* unpacking, and this matrix is what it then holds.
    """
    features = checks.integer("features", features, at_least=1)
    steps = draw(noise, features * (features + 1) // 2, generator)
    return unpack_symmetric(from_grid(steps, noise.grid), features)
