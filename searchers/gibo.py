"""DP-GIBO: private local Bayesian optimisation with gradient information.

Notation, and where it lives here:

| symbol   | meaning                                                               | shape    | in the code            |
|----------|-----------------------------------------------------------------------|----------|------------------------|
| f        | mean of the users' losses; GP prior: zero mean, RBF kernel k          |          |                        |
| ℓ        | lengthscales, in the coordinates of the box; never fitted to losses   | (d,)     | `lengthscale`          |
| σ²       | variance of the observation noise; outputscale: of f                  |          | `noise`, `outputscale` |
| s        | σ²/outputscale                                                        |          | `ratio`                |
| D        | locations kept from earlier steps                                     | (m, d)   | `keep`                 |
| α(z|θ,D) | tr[∇k∇ᵀ(θ,θ) − C A⁻¹ Cᵀ]: variance left in ∇f(θ), eq. 2               |          | `design`               |
| b        | points of a batch, chosen jointly to minimise α                       |          | `batch_size`           |
| ε_bias   | largest α that a batch may leave (adaptive b; line 4)                 |          | `bias`                 |
| W        | C A⁻¹: posterior mean of ∇f(θ) is W y                                 | (d, m+b) | `weights`              |

One iteration, in the paper's order: b and z from α → losses y of every user (Tune trials) → g_i = W y_i, clipped →
ĝ = mean + noise → θ ← Π_box(step). The clipping, the release and the step are those of `descent`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dpray.searchers import design as designs
from dpray.searchers.box import Box
from dpray.searchers.central import whole
from dpray.searchers.descent import FloatArray, PrivateDescent

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpray.platform.privacy.ledger import Run
    from dpray.platform.user_losses import UserLosses


class DPGIBOSearch(PrivateDescent):
    """Ray Tune searcher that follows a private posterior gradient of the users' mean loss (DP-GIBO).

    Args:
        task: what is tuned: `fit(config)` and `losses(model)`, one loss per user; or a function that makes it.
        run: the ledger's run that is charged.
        budget, mu, quanta: what all iterations together may spend; exactly one.
        clip: B, bound on a user's gradient, in losses per unit of θ.
        iterations: T.
        space: floats only; may be left to `param_space` of the Tuner.
        lengthscale: ℓ, one number or one per searched key, in the coordinates of the box (of the log for log-floats).
        outputscale, noise: prior variance of f and of the observations.
        batch: "fixed": `batch_size` points each step; "adaptive": as few as leave a variance of at most `bias`, and
            never more than `batch_size`.
        batch_size: b, by default d + 1 (fixed) or 2d (adaptive).
        bias: ε_bias, in units of the prior variance of the gradient.
        rotate: turn each step's design at random (by `seed`), so that no direction is favoured.
        start, step, rate, keep, stop: see `PrivateDescent`.
        users, points_per_trial, seed, noise_seed, label, reserve, max_retries, max_concurrent, resources: see
            `CentralSearch`.

    Attributes:
        best_config: the result; path: configurations of all iterates; history: iterates and released gradients.

    Example:
        >>> search = DPGIBOSearch(task, run, mu=1.0, clip=0.05, iterations=20, space=space)
        >>> tune.Tuner(search.trainable(), param_space=space, tune_config=search.tune_config()).fit()
        >>> search.best_config

    Resuming: build the search again with the same arguments and run a new Tuner. Iterations that were released are read
    from the ledger; the one under way is evaluated again, and charged once.

    *Guarantee.* As `descent` states it: all iterates together are μ-GDP for one validation user replaced by another.
    ℓ, outputscale and noise must come from public data or be fixed beforehand.

    Raises:
        SpaceError, ValueError: a space that is no box, B ≤ 0, T < 1, μ ≤ 0, …: before anything is spent.
        BudgetExceeded, PlanConflict: from the reservation, before the first trial.
    """

    def __init__(
        self,
        task: UserLosses | Callable[[], UserLosses],
        run: Run,
        *,
        clip: float | None,
        iterations: int,
        lengthscale: float | Mapping[str, float] = 1.0,
        outputscale: float = 1.0,
        noise: float = 0.01,
        batch: Literal["fixed", "adaptive"] = "fixed",
        batch_size: int | None = None,
        bias: float | None = None,
        rotate: bool = True,
        **options: Any,
    ) -> None:
        if batch not in ("fixed", "adaptive"):
            raise ValueError(f"batch is {batch!r}: give 'fixed' or 'adaptive'.")
        if (bias is not None) != (batch == "adaptive"):
            raise ValueError("bias is the largest variance an adaptive batch may leave: give it with batch='adaptive'.")
        self.lengthscale = lengthscale
        self.ratio = _positive("noise", noise) / _positive("outputscale", outputscale)
        self.bias = None if bias is None else _positive("bias", bias)
        self.rotate = bool(rotate)
        self._size = None if batch_size is None else whole("batch_size", batch_size, least=2)
        self._told = False
        super().__init__(task, run, clip=clip, iterations=iterations, **options)

    def check_box(self, box: Box) -> None:
        """Refuse lengthscales that do not fit the searched keys."""
        box.per_dimension("lengthscale", self.lengthscale)

    @property
    def batch_size(self) -> int:
        """b, or the most that an adaptive b can be."""
        if self._size is not None:
            return self._size
        return self.box.dimension + 1 if self.bias is None else 2 * self.box.dimension

    @property
    def _scale(self) -> FloatArray:
        return self.box.per_dimension("lengthscale", self.lengthscale)

    def locate(self, t: int, theta: FloatArray, kept: FloatArray) -> FloatArray:
        """The batch that leaves the least variance in ∇f(θ): eq. 2, jointly over its points."""
        scale, d = self._scale, self.box.dimension
        turn = designs.rotation(d, np.random.default_rng([self.seed, 1, t])) if self.rotate and d > 1 else None
        options: dict[str, Any] = {
            "lower": (self.box.lower - theta) / scale,
            "upper": (self.box.upper - theta) / scale,
            "kept": (kept - theta) / scale if len(kept) else None,
            "importance": None if np.all(scale == scale[0]) else (scale[0] / scale) ** 2,
            "rotation": turn,
        }
        if self.bias is None:
            found = designs.design(d, self.batch_size, self.ratio, **options)
        else:
            found, reached = designs.smallest(d, self.ratio, self.bias, most=self.batch_size, **options)
            if not reached and not self._told:
                self._told = True
                warnings.warn(
                    f"A batch of {self.batch_size} points leaves a variance of {found.trace:.3g} in the gradient, and "
                    f"bias asks for {self.bias:g}: the batch stays at {self.batch_size}. Allow more points "
                    "(batch_size), or more bias.",
                    stacklevel=2,
                )
        return np.asarray(theta + scale * found.points, dtype=np.float64)

    def weights(self, theta: FloatArray, points: FloatArray) -> FloatArray:
        """W = C A⁻¹ in the coordinates of the box."""
        scale = self._scale
        return np.asarray(designs.weights((points - theta) / scale, self.ratio) / scale[:, None], dtype=np.float64)

    def describe(self) -> dict[str, Any]:
        """Prior and batch."""
        return {
            "lengthscale": self._scale.tolist(),
            "noise_ratio": self.ratio,
            "batch_size": self.batch_size,
            "bias": self.bias,
            "rotate": self.rotate,
        }


class GIBOSearch(DPGIBOSearch):
    """The same search without noise and without clipping: NOT PRIVATE, the baseline that shows what privacy costs.

    Args: as `DPGIBOSearch`, without clip and spend; the run's accounts must be `non_private`.

    *Guarantee.* None.
    """

    def __init__(
        self, task: UserLosses | Callable[[], UserLosses], run: Run, *, iterations: int, **options: Any
    ) -> None:
        super().__init__(task, run, clip=None, quanta=None, iterations=iterations, **options)


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < np.inf:
        raise ValueError(f"{name} is {value!r}; it is a variance, finite and above 0.")
    return float(value)
