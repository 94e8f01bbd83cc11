"""The batch of one DP-GIBO iteration: closed forms where they are optimal, joint optimisation elsewhere (§1.2, §1.3).

Coordinates are u = (z − θ)/ℓ, lengthscales from the iterate θ = 0; the kernel is k(u, v) = exp(−|u − v|²/2).

| symbol  | meaning                                                                | shape      |
|---------|------------------------------------------------------------------------|------------|
| d, b, m | dimension, points of the batch, kept points of earlier iterations      |            |
| Z       | all points: kept ones first, then the batch                            | (m + b, d) |
| s       | `noise`: noise variance over outputscale                               |            |
| ω       | `importance` of each coordinate's variance; 1/ℓ² makes it that in θ    | (d,)       |
| C, A    | ∇k(0, Z) and k(Z, Z) + sI                                              | (d, m + b), (m + b, m + b) |
| W       | C A⁻¹: the posterior mean of the gradient at θ is W y, in u units      | (d, m + b) |
| trace   | Σ_j ω_j (1 − (C A⁻¹ Cᵀ)_jj), variance of that gradient (outputscale 1) |            |
| h       | radius of a simplex around θ                                           |            |
| q       | dimension of a simplex: q + 1 points, a pair where q = 1               |            |

*Guarantee.* Nothing here sees data. Designs depend on θ, borders, kept positions, noise and importances, all public,
and are functions of them: the same input gives the same bits, also in another process (same libraries and machine).
What a design promises is the variance under the kernel, not the gradient of a loss that does not follow it.

*Level.* Where W·1 ≠ 0 (one-sided designs at a border; kept points), the common level of a user's losses leaks into the
gradient. The curator therefore centres each user's row, so that the weights of *centred* values are W(I − 11ᵀ/N),
N = m + b: the search does that. `Design.weights` are the plain W.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike
from scipy.linalg import cho_solve

from dpray.platform.privacy import checks
from dpray.searchers.joint_design import (
    FloatArray,
    Objective,
    blas,
    factor,
    gram,
    minimise,
    reflected,
    scattered,
    slopes,
)
from dpray.searchers.simplices import arranged, axes, corners, directions, radius

_LEAST_NOISE = 1e-10
"""s below which float64 cannot resolve what the kernel matrix says about the gradient."""
_PUSH = 0.05
"""Size, in radii, of the irregular displacement that keeps a symmetric start off a saddle point."""
_REACHES = (4.0, 2.0)
"""Radii at which points beyond 2d start, in further starts: with little noise, two distances tell the slope and the
third derivative apart; with more, one distance is best, which is where the first start has them."""


@dataclass(frozen=True, eq=False)
class Design:
    """Where to evaluate, and how the values make a gradient. Arrays are read-only.

    Attributes:
        points: offsets from θ in lengthscales, (b, d).
        weights: W, (d, m + b), kept points first: the posterior-mean gradient at θ is weights @ y, in u units
            (divide by ℓ for θ units).
        trace: Σ_j ω_j Var_j of that gradient at outputscale 1.
    """

    points: FloatArray
    weights: FloatArray
    trace: float


def trace(
    points: ArrayLike, noise: float, *, kept: ArrayLike | None = None, importance: ArrayLike | None = None
) -> float:
    """Σ_j ω_j (1 − (C A⁻¹ Cᵀ)_jj) at any points: eq. 2, densely.

    Args:
        points: (b, d), in lengthscales from θ.
        noise: s, at least 1e-10.
        kept: (m, d), None for none.
        importance: ω, (d,), None for all 1.

    Raises:
        ValueError: shapes, a value that is not finite, or the noise are wrong.
    """
    X = _points("points", points)
    d = X.shape[1]
    s, omega = _noise(noise), _importance(importance, d)
    with blas().limit(limits=1):
        return _described(X, s, _kept(kept, d), omega).trace


def weights(points: ArrayLike, noise: float) -> FloatArray:
    """W = C A⁻¹, (d, m): weights @ y is the posterior-mean gradient at θ, in u units; errors as `trace`."""
    X = _points("points", points)
    with blas().limit(limits=1):
        return _weights(X, _noise(noise))


def simplex(d: int, noise: float) -> Design:
    """d + 1 points, a regular simplex of the best radius h: trace d − (d+1)h²e^{−h²}/(1 − e^{−h²(1+1/d)} + s).

    Raises:
        ValueError: d < 1, or the noise is below 1e-10.
    """
    d, s = checks.integer("The dimension d", d, at_least=1), _noise(noise)
    with blas().limit(limits=1):
        return _described(radius(d, s) * corners(d), s, np.empty((0, d)), np.ones(d))


def pairs(d: int, noise: float, replicates: int = 1) -> Design:
    """2·replicates·d points ±h·e_j, the best radius h: trace d(1 − 2h²e^{−h²}/(1 − e^{−2h²} + s/replicates)).

    With more than one replicate there are better designs of the same size (`joint`); errors as `simplex`.
    """
    d, s = checks.integer("The dimension d", d, at_least=1), _noise(noise)
    replicates = checks.integer("The number of replicates", replicates, at_least=1)
    arms = np.tile(radius(1, s / replicates) * np.eye(d), (replicates, 1))
    with blas().limit(limits=1):
        return _described(np.concatenate([arms, -arms]), s, np.empty((0, d)), np.ones(d))


def design(
    d: int,
    b: int,
    noise: float,
    *,
    lower: ArrayLike | None = None,
    upper: ArrayLike | None = None,
    kept: ArrayLike | None = None,
    importance: ArrayLike | None = None,
    rotation: ArrayLike | None = None,
) -> Design:
    """The batch of b points that minimises the trace, computed once where it depends on (d, b, noise) only.

    Without kept points, with equal importances and b ≤ 2d, the joint optimum is a closed form: regular simplices in
    mutually orthogonal subspaces, around θ (one of them: b = d + 1; pairs: b = 2d). It is used where it fits in the
    box; everything else is `joint`.

    Args:
        d: dimension.
        b: points of the batch, any number from 1.
        noise: s, at least 1e-10.
        lower, upper: borders of the box relative to θ, in u units, (d,), lower ≤ 0 ≤ upper. θ on a border is normal.
            A dimension of width zero is not probed; its variance stays.
        kept: (m, d), None for none.
        importance: ω, (d,), None for all 1.
        rotation: (d, d), orthogonal: turns the design. Where kept points or unequal importances fix the directions it
            has no effect, and where the turned design leaves the box it is the start of the joint optimisation.

    Raises:
        ValueError: an argument is out of its range, or the box does not contain θ or is θ alone.
    """
    d, b = checks.integer("The dimension d", d, at_least=1), checks.integer("The batch size b", b, at_least=1)
    s, omega, D = _noise(noise), _importance(importance, d), _kept(kept, d)
    low, high = _box(lower, upper, d)
    R = None if rotation is None else _rotation(rotation, d)
    with blas().limit(limits=1):
        start = None
        if not len(D):
            free = _free(d, b, s, omega.tobytes())
            if R is not None and (omega == omega[0]).all():
                free = Design(_fixed(free.points @ R), _fixed(R.T @ free.weights), free.trace)
            if (free.points >= low).all() and (free.points <= high).all():
                return free
            start = free.points
        return _joint(b, s, omega, D, low, high, start)


def joint(
    d: int,
    b: int,
    noise: float,
    *,
    lower: ArrayLike | None = None,
    upper: ArrayLike | None = None,
    kept: ArrayLike | None = None,
    importance: ArrayLike | None = None,
    start: ArrayLike | None = None,
) -> Design:
    """Minimise the trace over all b points at once: L-BFGS-B, analytic gradient, a few deterministic starts.

    A local optimum. The starts are the closed form turned towards what the kept points leave unknown, the same laid
    out otherwise (moved away from borders it crosses), and scattered points; arguments and errors as `design`.

    Args:
        start: (b, d), the only start instead; clipped into the box, otherwise used as it is.
    """
    d, b = checks.integer("The dimension d", d, at_least=1), checks.integer("The batch size b", b, at_least=1)
    s, omega, D = _noise(noise), _importance(importance, d), _kept(kept, d)
    low, high = _box(lower, upper, d)
    only = None if start is None else _points("start", start)
    if only is not None and only.shape != (b, d):
        raise ValueError(f"The start must have the shape of the batch, ({b}, {d}), but {only.shape} was given.")
    with blas().limit(limits=1):
        if only is None:
            return _joint(b, s, omega, D, low, high, None)
        objective = Objective(s, omega, D, b)
        return _described(minimise(objective, [only], low, high, radius(1, s)), s, D, omega)


def smallest(
    d: int,
    noise: float,
    bias: float,
    *,
    most: int,
    lower: ArrayLike | None = None,
    upper: ArrayLike | None = None,
    kept: ArrayLike | None = None,
    importance: ArrayLike | None = None,
    rotation: ArrayLike | None = None,
) -> tuple[Design, bool]:
    """The smallest batch whose trace is at most `bias` (ε_bias, §1.3), by doubling and bisection; free of privacy cost.

    Args:
        bias: largest trace allowed, above zero.
        most: largest batch considered.
        d, noise, lower, upper, kept, importance, rotation: as for `design`.

    Returns:
        The design, and whether its trace is ≤ bias. If not, `most` points cannot reach it, and it has that many; if so,
        the design with one point less has a larger trace.

    Raises:
        ValueError: as `design`; `bias` is not above zero; `most` < 1.
    """
    bias, most = checks.positive("The bias ε_bias", bias), checks.integer("The largest batch", most, at_least=1)

    place = {"lower": lower, "upper": upper, "kept": kept, "importance": importance, "rotation": rotation}

    def of(b: int) -> Design:
        return design(d, b, noise, **place)

    below, b = 0, 1
    best = of(b)
    while best.trace > bias:
        if b == most:
            return best, False
        below, b = b, min(2 * b, most)
        best = of(b)
    while b - below > 1:
        middle = (below + b) // 2
        tried = of(middle)
        if tried.trace <= bias:
            b, best = middle, tried
        else:
            below = middle
    return best, True


def rotation(d: int, generator: np.random.Generator) -> FloatArray:
    """A rotation or reflection drawn uniformly (Haar) from the orthogonal group, (d, d).

    Its generator is the search's public one, never that of the noise.
    """
    d = checks.integer("The dimension d", d, at_least=1)
    with blas().limit(limits=1):
        Q, R = np.linalg.qr(generator.standard_normal((d, d)))
    # Without the signs, QR's convention would favour some orientations (Mezzadri 2007).
    return np.asarray(Q * np.where(np.diag(R) < 0, -1.0, 1.0), dtype=np.float64)


@lru_cache(maxsize=64)
def _free(d: int, b: int, s: float, importance: bytes) -> Design:
    """The design without box and kept points; it depends on nothing that changes during a search."""
    omega, none, anywhere = np.frombuffer(importance), np.empty((0, d)), np.full(d, np.inf)
    if b <= 2 * d and (omega == omega[0]).all():
        return _described(arranged(np.ones(d), np.eye(d), b, s), s, none, omega)
    return _joint(b, s, omega, none, -anywhere, anywhere, None)


def _joint(
    b: int, s: float, omega: FloatArray, D: FloatArray, low: FloatArray, high: FloatArray, first: FloatArray | None
) -> Design:
    d, h = len(omega), radius(1, s)
    if not (high > low).any():
        raise ValueError("The box is the single point θ: no point of it says anything about the gradient.")
    objective = Objective(s, omega, D, b)
    movable = np.where(high > low, omega, 0.0)
    leading = directions(objective.unexplained, movable) if len(D) else axes(movable)
    aligned = arranged(*leading, b, s) if first is None else first
    push = _PUSH * h * scattered(b, d)
    starts = [aligned + push, reflected(h * scattered(b, d, 1), low, high)]
    if ((aligned < low) | (aligned > high)).any():
        starts.append(_moved_inside(aligned, low, high) + push)
    elif len(D):
        starts.append(arranged(*axes(movable), b, s) + push)
    if b > 2 * d:
        starts += [arranged(*axes(movable), b, s, reach) + push for reach in _REACHES]
    found = minimise(objective, starts, low, high, h)
    unpushed = np.clip(aligned, low, high)
    return _described(found if objective(found)[0] <= objective(unpushed)[0] else unpushed, s, D, omega)


def _moved_inside(X: FloatArray, low: FloatArray, high: FloatArray) -> FloatArray:
    """The points, moved together so that they fit between the borders, or are centred where there is no room."""
    extent, middle = np.abs(X).max(axis=0), np.zeros(X.shape[1])
    bounded = np.isfinite(low) & np.isfinite(high)
    middle[bounded] = (low[bounded] + high[bounded]) / 2
    room = np.where(bounded, (high - low) / 2, np.inf) >= extent
    fitting = np.clip(0.0, np.where(room, low + extent, middle), np.where(room, high - extent, middle))
    return np.asarray(X + fitting, dtype=np.float64)


def _described(X: FloatArray, s: float, D: FloatArray, omega: FloatArray) -> Design:
    Z = np.concatenate([D, X])
    W = _weights(Z, s)
    explained = np.sum(W * slopes(Z).T, axis=1)
    return Design(_fixed(X), _fixed(W), float(omega @ (1.0 - explained)))


def _weights(Z: FloatArray, s: float) -> FloatArray:
    return np.asarray(cho_solve((factor(gram(Z, s)), True), slopes(Z)).T, dtype=np.float64)


def _fixed(array: FloatArray) -> FloatArray:
    fixed = np.array(array, dtype=np.float64, order="C")
    fixed.flags.writeable = False
    return fixed


def _noise(noise: float) -> float:
    s = checks.positive("The noise (its variance over the outputscale)", noise)
    if s < _LEAST_NOISE:
        raise ValueError(
            f"The noise must be at least {_LEAST_NOISE:g} (its variance over the outputscale), but {s:g} was given: "
            "float64 cannot resolve less; losses without noise are modelled well with 1e-6."
        )
    return s


def _points(name: str, values: ArrayLike) -> FloatArray:
    array = np.asarray(values)
    if array.ndim != 2 or 0 in array.shape or array.dtype.kind not in "fiu":
        raise ValueError(f"{name} must be a real matrix (points, d), but {array.shape} of {array.dtype} was given.")
    array = np.ascontiguousarray(array, dtype=np.float64)
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite, but NaN or infinity was given.")
    return array


def _kept(kept: ArrayLike | None, d: int) -> FloatArray:
    if kept is None or np.shape(kept)[:1] == (0,):
        return np.empty((0, d))
    array = _points("kept", kept)
    if array.shape[1] != d:
        raise ValueError(f"Kept points must have d = {d} coordinates, but {array.shape} was given.")
    return array


def _importance(importance: ArrayLike | None, d: int) -> FloatArray:
    omega = np.ones(d) if importance is None else np.array(importance, dtype=np.float64)
    if omega.shape != (d,) or not np.isfinite(omega).all() or (omega < 0).any() or not omega.any():
        raise ValueError(
            f"Importances must be {d} finite numbers, none negative, not all zero; {importance!r} was given."
        )
    return omega


def _box(lower: ArrayLike | None, upper: ArrayLike | None, d: int) -> tuple[FloatArray, FloatArray]:
    low = np.full(d, -np.inf) if lower is None else np.array(lower, dtype=np.float64)
    high = np.full(d, np.inf) if upper is None else np.array(upper, dtype=np.float64)
    if low.shape != (d,) or high.shape != (d,):
        raise ValueError(f"Borders must be {d} numbers each, but shapes {low.shape} and {high.shape} were given.")
    wrong = np.flatnonzero(~((low <= 0) & (high >= 0)))
    if wrong.size:
        j = int(wrong[0])
        raise ValueError(
            f"The box, relative to θ, must contain 0 in every dimension, but dimension {j} goes from {low[j]:g} to "
            f"{high[j]:g}: project θ into the box first."
        )
    return low, high


def _rotation(rotation: ArrayLike, d: int) -> FloatArray:
    R = np.array(rotation, dtype=np.float64)
    if R.shape != (d, d) or not np.abs(R @ R.T - np.eye(d)).max() < 1e-9:
        raise ValueError(
            f"The rotation must be an orthogonal ({d}, {d}) matrix, but {R.shape} was given: see `rotation`."
        )
    return R
