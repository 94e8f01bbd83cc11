"""Two baselines that need no model of f: per-user finite differences, and SPSA along random directions.

| symbol | meaning                                                     | shape  |
|--------|-------------------------------------------------------------|--------|
| h      | distance of a location from θ, in the coordinates of the box | (d,)   |
| Δ_k    | random direction k of a step, ±1 in every coordinate         | (d,)   |
| W      | rows of difference quotients                                 | (d, m) |

    finite differences   ∂f/∂θ_j ≈ (f(θ + h_j e_j) − f(θ)) / h_j,  or with f(θ − h_j e_j) if two-sided
    SPSA                 ∇f ≈ (1/K) Σ_k (f(θ + hΔ_k) − f(θ − hΔ_k)) / 2 · Δ_k/h       (Spall 1992)

Clipping, noise, release and step are those of `descent`, so the *Guarantee* is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dpray.searchers.box import Box
from dpray.searchers.central import whole
from dpray.searchers.descent import FloatArray, PrivateDescent

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpray.platform.privacy.ledger import Run
    from dpray.platform.user_losses import UserLosses


class _Differences(PrivateDescent):
    """What both share: the distance h."""

    def __init__(
        self,
        task: UserLosses | Callable[[], UserLosses],
        run: Run,
        *,
        clip: float | None,
        iterations: int,
        distance: float | Mapping[str, float] = 0.5,
        **options: Any,
    ) -> None:
        self.distance = distance
        super().__init__(task, run, clip=clip, iterations=iterations, **options)

    def check_box(self, box: Box) -> None:
        """Refuse distances that do not fit the searched keys or reach across the box."""
        h = box.per_dimension("distance", self.distance)
        wide = np.flatnonzero(2 * h > box.upper - box.lower)
        if wide.size:
            j = int(wide[0])
            raise ValueError(
                f"distance is {h[j]:g} for {box.names[j]}, whose range is {box.upper[j] - box.lower[j]:g} wide: give "
                "at most half of that."
            )

    @property
    def _h(self) -> FloatArray:
        return self.box.per_dimension("distance", self.distance)

    def describe(self) -> dict[str, Any]:
        """Distance."""
        return {"distance": self._h.tolist()}


class FiniteDifferenceSearch(_Differences):
    """Private descent along per-user finite differences: d + 1 points a step, 2d if two-sided.

    Args: as `PrivateDescent`; distance: h, one number or one per searched key; two_sided.
    """

    def __init__(
        self,
        task: UserLosses | Callable[[], UserLosses],
        run: Run,
        *,
        clip: float | None,
        iterations: int,
        two_sided: bool = False,
        **options: Any,
    ) -> None:
        self.two_sided = bool(two_sided)
        super().__init__(task, run, clip=clip, iterations=iterations, **options)

    @property
    def batch_size(self) -> int:
        """d + 1, or 2d."""
        return 2 * self.box.dimension if self.two_sided else self.box.dimension + 1

    def locate(self, t: int, theta: FloatArray, kept: FloatArray) -> FloatArray:
        """θ and one neighbour per coordinate (towards the inside of the box), or two."""
        away = np.diag(self._h)
        if self.two_sided:
            return np.concatenate([self.box.project(theta + away), self.box.project(theta - away)])
        inside = theta + self._h <= self.box.upper
        return np.concatenate([theta[None], theta + np.where(inside, 1.0, -1.0)[:, None] * away])

    def weights(self, theta: FloatArray, points: FloatArray) -> FloatArray:
        """Least squares slope per coordinate over the points that differ from θ there and nowhere else, or lie at θ."""
        offsets = points - theta
        w = np.zeros((len(theta), len(points)))
        moved = offsets != 0
        own = moved.sum(axis=1)
        for j in range(len(theta)):
            used = (own == 0) | ((own == 1) & moved[:, j])
            x = offsets[used, j] - offsets[used, j].mean()
            if (x != 0).any():
                w[j, used] = x / (x @ x)
        return w

    def describe(self) -> dict[str, Any]:
        """Distance and sides."""
        return {**super().describe(), "two_sided": self.two_sided}


class SPSASearch(_Differences):
    """Private descent along simultaneous perturbations: two points for each of `directions` random directions.

    Args: as `PrivateDescent`; distance: h; directions: K, by default (d + 1) // 2, as many points as DP-GIBO's.
    """

    def __init__(
        self,
        task: UserLosses | Callable[[], UserLosses],
        run: Run,
        *,
        clip: float | None,
        iterations: int,
        directions: int | None = None,
        **options: Any,
    ) -> None:
        self.directions = None if directions is None else whole("directions", directions)
        super().__init__(task, run, clip=clip, iterations=iterations, **options)

    @property
    def batch_size(self) -> int:
        """2K."""
        return 2 * ((self.box.dimension + 1) // 2 if self.directions is None else self.directions)

    def locate(self, t: int, theta: FloatArray, kept: FloatArray) -> FloatArray:
        """θ ± hΔ_k, moved into the box as a pair where it would leave it."""
        signs = np.random.default_rng([self.seed, 1, t]).choice([-1.0, 1.0], (self.batch_size // 2, len(theta)))
        middle = np.clip(theta, self.box.lower + self._h, self.box.upper - self._h)
        return np.concatenate([middle + signs * self._h, middle - signs * self._h])

    def weights(self, theta: FloatArray, points: FloatArray) -> FloatArray:
        """Sum of Δ_k/(2hK) with the signs of the two points; points without their partner are left out."""
        middle = np.clip(theta, self.box.lower + self._h, self.box.upper - self._h)
        signs = np.sign(points - middle)
        paired = np.array([(signs == -row).all(axis=1).any() for row in signs])
        pairs = max(int(paired.sum()) // 2, 1)
        return np.asarray((signs * paired[:, None]).T / (2 * pairs * self._h[:, None]), dtype=np.float64)

    def describe(self) -> dict[str, Any]:
        """Distance and directions."""
        return {**super().describe(), "directions": self.batch_size // 2}
