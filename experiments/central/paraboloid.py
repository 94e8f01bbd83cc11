"""The smallest objective: every user's loss is a bowl of the user's own. For tests, and to try a recipe out."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpray.platform.user_losses import UserLosses


class Paraboloid(UserLosses):
    """f_i(θ) = ½ ‖θ − c_i‖², θ in [−2, 2]ᵈ, c_i drawn around (1, −1, 1, …).

    Args:
        dimension: d.
        users: n.
        seed: of the c_i.
    """

    def __init__(self, dimension: int, users: int, seed: int) -> None:
        self.users, self.dimension = users, dimension
        lowest = np.where(np.arange(dimension) % 2, -1.0, 1.0)
        self._lowest = lowest + 0.1 * np.random.default_rng([seed, dimension]).standard_normal((users, dimension))

    def space(self) -> dict[str, Any]:
        """`x_0` … as Tune's domains."""
        from ray import tune

        return {f"x_{j}": tune.uniform(-2.0, 2.0) for j in range(self.dimension)}

    def fit(self, config: dict[str, Any]) -> NDArray[np.float64]:
        """θ."""
        return np.array([float(config[f"x_{j}"]) for j in range(self.dimension)])

    def losses(self, model: NDArray[np.float64]) -> NDArray[np.float64]:
        """(n,)."""
        return np.asarray(0.5 * ((model - self._lowest) ** 2).sum(axis=1))
