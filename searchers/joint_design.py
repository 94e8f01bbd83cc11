"""Joint optimisation of a batch: what the posterior gradient leaves unknown, and its minimiser (§1.2, eq. 2).

Coordinates are u = (z − θ)/ℓ, lengthscales from the iterate θ = 0; the kernel is k(u, v) = exp(−|u − v|²/2).

| symbol | meaning                                                              | shape    |
|--------|----------------------------------------------------------------------|----------|
| d, b, m | dimension, points of the batch, kept points                         |          |
| X, D   | the batch; kept points, which do not move                            | (b, d), (m, d) |
| Z      | all points, [D; X], N = m + b of them                                | (N, d)   |
| s      | noise variance over outputscale                                      |          |
| ω, Ω   | importance of each coordinate's variance; diag(ω)                    | (d,)     |
| C      | ∇k(0, Z), column i is z_i·exp(−|z_i|²/2)                             | (d, N)   |
| A      | k(Z, Z) + sI                                                         | (N, N)   |
| W      | C A⁻¹                                                                | (d, N)   |
| T      | Σ_j ω_j (1 − (C A⁻¹ Cᵀ)_jj), what is minimised                       |          |
| L_D, L | Cholesky factors of A_DD (once) and of A_XX − A_XD A_DD⁻¹ A_DX       | (m, m), (b, b) |

Gradient: ∂T/∂C = −2ΩW, ∂T/∂A = WᵀΩW, and the chain rule through the kernel into X alone.

Nothing here sees data: positions, noise and importances are public.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.blas import dtrsm
from scipy.linalg.lapack import dpotrf
from scipy.optimize import Bounds, minimize
from threadpoolctl import ThreadpoolController

FloatArray = NDArray[np.float64]

_LIMIT = 2_000
"""Iterations at most."""
_LOOK, _LOOKED = 25, 12_000
"""Iterations that every start gets before the best one is followed: as many as make `_LOOKED` moves of a coordinate, at
least `_LOOK`. A small problem, where a look costs little, is followed to the end from everywhere."""
_RELATIVE, _GRADIENT = 1e-9, 1e-8
"""Convergence: relative decrease of T in one iteration, and the projected gradient (T and radius scaled to 1)."""
_MEMORY = 5
"""Corrections L-BFGS keeps: more cost more than they save at b·d of a few hundred and above."""


@lru_cache(maxsize=1)
def blas() -> ThreadpoolController:
    """Controller of the loaded BLAS libraries: `with blas().limit(limits=1)`, so that sums have one order."""
    return ThreadpoolController().select(user_api="blas")


def kernel(left: FloatArray, right: FloatArray) -> FloatArray:
    """exp(−|u − v|²/2) of all pairs, (n, d) and (m, d) → (n, m)."""
    exponents = left @ right.T
    exponents -= (left * left).sum(axis=1)[:, None] / 2
    exponents -= (right * right).sum(axis=1) / 2
    return np.asarray(np.exp(np.minimum(exponents, 0.0, out=exponents), out=exponents), dtype=np.float64)


def slopes(points: FloatArray) -> FloatArray:
    """Cᵀ: the kernel's gradient at 0 towards each point, (n, d)."""
    return np.asarray(points * np.exp(-(points * points).sum(axis=1, keepdims=True) / 2), dtype=np.float64)


def factor(matrix: FloatArray) -> FloatArray:
    """Lower Cholesky factor, column-major; `matrix` may be overwritten.

    Raises:
        ValueError: the matrix is not positive definite in float64.
    """
    lower, failed = dpotrf(matrix.T, lower=1, clean=1, overwrite_a=1)
    if failed:
        raise ValueError(
            f"The kernel matrix of {len(matrix)} points is singular in float64: "
            "points coincide and the noise is too small to tell them apart; give a larger noise or fewer points."
        )
    return np.asarray(lower, dtype=np.float64)


def gram(points: FloatArray, noise: float) -> FloatArray:
    """A = k(Z, Z) + sI, (N, N)."""
    A = kernel(points, points)
    A[np.diag_indices(len(A))] = 1.0 + noise
    return A


class Objective:
    """T as a function of the batch, with its gradient; the kept points' part is computed here, once.

    One evaluation costs O(m²b + b³ + Nbd): the factor of A is extended by the block of the batch, never refactored.

    Args:
        noise: s > 0.
        importance: ω, (d,).
        kept: D, (m, d); m may be 0.
        size: b.
    """

    def __init__(self, noise: float, importance: FloatArray, kept: FloatArray, size: int) -> None:
        self._noise, self._omega, self._kept, self._size = noise, importance, len(kept), size
        d = len(importance)
        self._Z, self._W, self._halves = np.empty((self._kept + size, d)), np.empty((self._kept + size, d)), np.empty(0)
        self._Z[: self._kept] = kept
        self._halves = (kept * kept).sum(axis=1) / 2
        self._base = float(importance.sum())
        if self._kept:
            self._L_D = factor(gram(kept, noise))
            self._V_D = np.asarray(dtrsm(1.0, self._L_D, slopes(kept), lower=1), dtype=np.float64)
            self._base -= float((self._V_D * self._V_D).sum(axis=0) @ importance)

    @property
    def unexplained(self) -> FloatArray:
        """Posterior covariance of the gradient at 0 given the kept points alone, (d, d)."""
        covariance = np.eye(len(self._omega))
        if self._kept:
            covariance -= self._V_D.T @ self._V_D
        return covariance

    def __call__(self, X: FloatArray) -> tuple[float, FloatArray]:
        """T and ∂T/∂X, (b, d)."""
        m, Z, W = self._kept, self._Z, self._W
        Z[m:] = X
        halves = (X * X).sum(axis=1) / 2
        K = Z @ X.T
        K[:m] -= self._halves[:, None]
        K[m:] -= halves[:, None]
        K -= halves
        np.exp(np.minimum(K, 0.0, out=K), out=K)
        S = K[m:].copy()
        S[np.diag_indices(len(S))] = 1.0 + self._noise
        decay = np.exp(-halves)[:, None]
        C = X * decay
        if m:
            B = dtrsm(1.0, self._L_D, K[:m], lower=1)
            S -= B.T @ B
            C -= B.T @ self._V_D
        L = factor(S)
        V = dtrsm(1.0, L, C, lower=1)
        trace = self._base - float((V * V).sum(axis=0) @ self._omega)
        W[m:] = dtrsm(1.0, L, V, lower=1, trans_a=1)
        if m:
            W[:m] = dtrsm(1.0, self._L_D, self._V_D - B @ W[m:], lower=1, trans_a=1)
        G = W[m:] * self._omega
        Q = W @ G.T
        Q *= K
        gradient = Q.T @ Z
        gradient -= Q.sum(axis=0)[:, None] * X
        gradient -= decay * (G - X * (X * G).sum(axis=1, keepdims=True))
        return trace, 2 * gradient


def minimise(
    objective: Objective, starts: Sequence[FloatArray], lower: FloatArray, upper: FloatArray, scale: float
) -> FloatArray:
    """Follow every start for a few iterations of L-BFGS-B, then the best of them to the end.

    T has many local minima where kept points or borders break its symmetry; a short look tells the poor ones.

    Args:
        objective: of b points in d dimensions.
        starts: (b, d) each; clipped into the box.
        lower, upper: borders, (d,), infinite where there is none.
        scale: length of a typical step, so that the first one does not leave the region of interest.

    Returns:
        (b, d), inside the box; its T is no larger than that of any start.
    """
    ahead = [np.clip(start, lower, upper) for start in starts]
    if len(ahead) > 1:
        look = max(_LOOK, _LOOKED // ahead[0].size)
        looked = [_follow(objective, start, lower, upper, scale, look) for start in ahead]
        ahead = [min(looked, key=lambda found: found[0])[1]]
    return _follow(objective, ahead[0], lower, upper, scale, _LIMIT)[1]


def _follow(
    objective: Objective, start: FloatArray, lower: FloatArray, upper: FloatArray, scale: float, iterations: int
) -> tuple[float, FloatArray]:
    size = len(start)
    at_start = objective(start)[0]
    unit = max(at_start, np.finfo(float).tiny)

    def scaled(x: FloatArray) -> tuple[float, FloatArray]:
        value, gradient = objective(x.reshape(size, -1) * scale)
        return value / unit, gradient.ravel() * (scale / unit)

    found = minimize(
        scaled,
        start.ravel() / scale,
        jac=True,
        method="L-BFGS-B",
        bounds=Bounds(np.tile(lower / scale, size), np.tile(upper / scale, size)),
        options={
            "maxiter": iterations,
            "maxfun": 10 * iterations,
            "maxcor": _MEMORY,
            "ftol": _RELATIVE,
            "gtol": _GRADIENT,
        },
    )
    points = np.clip(found.x.reshape(size, -1) * scale, lower, upper)
    return (float(found.fun) * unit, points) if found.fun * unit <= at_start else (at_start, start)


def scattered(size: int, dimension: int, shift: int = 0) -> FloatArray:
    """Irregular but always the same numbers in [−1, 1), (b, d): a start without symmetry, or a push off a saddle.

    Not a random generator's: its stream may change with its version, and designs must not.
    """
    places = np.arange(1, size * dimension + 1, dtype=np.float64) + shift * size * dimension
    # Sums of two irrational multiples, and a square that breaks the lattice they would lie on.
    numbers = places * 0.6180339887498949 + places * places * 0.41421356237309503
    return np.asarray(2 * (numbers % 1.0) - 1, dtype=np.float64).reshape(size, dimension)


def reflected(points: FloatArray, lower: FloatArray, upper: FloatArray) -> FloatArray:
    """Points outside the box mirrored at the border they crossed, as far as the box goes."""
    inside = np.where(points > upper, np.maximum(2 * upper - points, lower), points)
    return np.asarray(np.where(inside < lower, np.minimum(2 * lower - inside, upper), inside), dtype=np.float64)
