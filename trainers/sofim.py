"""DP-FedSOFIM: federated descent, preconditioned by the outer product of its own momentum, at the server only.

| symbol | meaning | shape |
|---|---|---|
| θ | parameters | (…, d) |
| G | noised mean gradient of round t | (…, d) |
| M | momentum, M_t = β M_{t−1} + (1−β) G_t, M_0 = 0 | (…, d) |
| M̂ | M_t / (1 − βᵗ) with bias correction, else M_t | (…, d) |
| β | momentum coefficient | scalar |
| ρ | damping; ρ > 0 | scalar |
| η | learning rate | scalar |
| H | (ρI + M̂M̂ᵀ)⁻¹ = I/ρ − M̂M̂ᵀ / (ρ(ρ + ‖M̂‖²)) | never formed |
| s | std of the noise on each coordinate of G | scalar |
| f | E‖M̂_noise‖², what noise alone puts into ‖M̂‖²; public | scalar |
| a | max(‖M̂‖² − f, 0)/‖M̂‖² with `debias`, else 1 | (…) |

The step is θ ← θ − η H v. By Sherman-Morrison it needs two inner products and no matrix:

- `precondition="gradient"`, v = G (the paper): H G = (G − M̂ (M̂·G)/(ρ + ‖M̂‖²)) / ρ: plain descent at rate η/ρ, with the
  part along the momentum damped.
  M holds (1 − β) of this round's noise. Where noise is most of both, M·G ≈ (1 − β)ds² and ‖M‖² ≈ f, which is
  ds²(1 − β)/(1 + β) after many rounds: H G ≈ (G − M (1 + β)f/(ρ + f))/ρ. M's signal is G's, so that on average the step
  goes **uphill** once βf > ρ; `warnings` says so before anything is spent.
- `precondition="momentum"`, v = M̂ (the authors' code): H M̂ = M̂ / (ρ + ‖M̂‖²): a momentum step whose length cannot exceed
  η/(2√ρ), and no anisotropy at all.

Noise makes ‖M̂‖² too large by f in expectation. With `debias` H is (ρI + a M̂M̂ᵀ)⁻¹, whose curvature along M̂ is what is
left of ‖M̂‖² without f; with `rank` H is made of the last r gradients instead of M̂ (`curvature`).

Guarantee: everything here is post-processing of released gradients; it costs no privacy and gives none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from dpray.trainers.base import FederatedTrainer
from dpray.trainers.curvature import curved, eigen, pushed
from dpray.trainers.models import FloatArray
from dpray.trainers.momentum import dot, momentum, momentum_over_noise, noise_variance
from dpray.trainers.settings import ServerState, Settings, below_one, positive

Precondition = Literal["gradient", "momentum"]

_BLOCK = 32768  # coordinates updated together: a few blocks of float64 stay in the cache


def precondition(v: FloatArray, M: FloatArray, rho: float, floor: float = 0.0) -> FloatArray:
    """H v = (v − a M (M·v)/(ρ + a‖M‖²)) / ρ, (…, d), in O(d). With v = M this is M/(ρ + a‖M‖²).

    Args:
        v, M: (…, d).
        rho: ρ.
        floor: f; 0 takes nothing out, and a is 1.
    """
    energy = dot(M, M)
    kept, ratio = _without(floor, energy)
    along = ratio * dot(M, v) / (rho + kept)
    return np.asarray((v - M * along[..., None]) / rho)


def _without(floor: float, energy: FloatArray) -> tuple[FloatArray, FloatArray]:
    """a‖M̂‖² = max(‖M̂‖² − f, 0), and a."""
    kept = np.maximum(energy - floor, 0.0)
    return kept, np.asarray(np.divide(kept, energy, out=np.zeros_like(kept), where=energy > 0))


def step(
    theta: FloatArray,
    M: FloatArray,
    G: FloatArray,
    *,
    learning_rate: float,
    beta: float,
    rho: float,
    mode: Precondition = "gradient",
    correction: float = 1.0,
    floor: float = 0.0,
    out: tuple[FloatArray, FloatArray] | None = None,
) -> tuple[FloatArray, FloatArray]:
    """One server step, fused: θ − η H v and the new M, in two passes over memory and without a temporary of size d.

    Args:
        theta, M, G: (…, d); M before this round.
        learning_rate, beta, rho: η, β, ρ.
        mode: what v is.
        correction: 1 − βᵗ with bias correction, else 1.
        floor: f, taken out of ‖M̂‖²; 0 takes nothing out.
        out: arrays for the results; `out=(theta, M)` works in place. New ones by default.

    Returns:
        θ and M after the round.
    """
    theta_out, M_out = (np.empty_like(theta), np.empty_like(M)) if out is None else out
    d = theta.shape[-1]
    part = np.empty((*theta.shape[:-1], min(d, _BLOCK)))
    squared, along = np.zeros(theta.shape[:-1]), np.zeros(theta.shape[:-1])
    for start in range(0, d, _BLOCK):
        block = (..., slice(start, min(start + _BLOCK, d)))
        m, g = M_out[block], G[block]
        scaled = part[..., : m.shape[-1]]
        np.multiply(M[block], beta, out=m)
        np.multiply(g, 1 - beta, out=scaled)
        m += scaled
        squared += dot(m, m)
        if mode == "gradient":
            along += dot(m, g)
    kept, ratio = _without(floor, squared / correction**2)
    damping = rho + kept
    if mode == "gradient":  # H G = G/ρ − a M̂ (M̂·G)/(ρ(ρ + a‖M̂‖²))
        on_M = learning_rate * ratio * along / (correction**2 * rho * damping)
    else:  # H M̂ = M̂/(ρ + a‖M̂‖²)
        on_M = -learning_rate / (correction * damping)
    for start in range(0, d, _BLOCK):
        block = (..., slice(start, min(start + _BLOCK, d)))
        new, scaled = theta_out[block], part[..., : min(_BLOCK, d - start)]
        np.multiply(M_out[block], on_M[..., None], out=scaled)
        np.add(theta[block], scaled, out=new)
        if mode == "gradient":
            np.multiply(G[block], learning_rate / rho, out=scaled)
            new -= scaled
    return theta_out, M_out


@dataclass(frozen=True, kw_only=True)
class SOFIMSettings(Settings):
    """Settings of DP-FedSOFIM; defaults are the authors'.

    Attributes:
        momentum: β, in [0, 1).
        rho: ρ, above 0; or a multiple of the noise in ‖M̂‖² with `rho_relative`.
        precondition: what H is applied to; see the top of this file.
        bias_correction: M̂ = M/(1 − βᵗ), in H too.
        rho_relative: ρ_t = `rho` · f, the public noise floor of round t. Impossible without noise.
        debias: take f out of ‖M̂‖² in H (of each eigenvalue, with `rank`).
        rank: r, from 1: H = (ρI + mean of G_jG_jᵀ over the last r gradients)⁻¹. Left out, H is made of M̂.
    """

    algorithm: ClassVar[str] = "DP-FedSOFIM"

    learning_rate: float = 0.1
    clip: float = 10.0
    momentum: float = 0.9
    rho: float = 0.5
    precondition: Precondition = "gradient"
    bias_correction: bool = False
    rho_relative: bool = False
    debias: bool = False
    rank: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("momentum", below_one(self.momentum), "at least 0 and below 1")
        self._require("rho", positive(self.rho), "a finite number above 0")
        self._require("precondition", self.precondition in ("gradient", "momentum"), "`gradient` or `momentum`")
        for name in ("bias_correction", "rho_relative", "debias"):
            self._require(name, isinstance(getattr(self, name), bool), "true or false")
        whole = isinstance(self.rank, int) and positive(self.rank)
        self._require("rank", self.rank is None or whole, "a whole number of at least 1")

    def initial_state(self, theta: FloatArray) -> ServerState:
        """M_0 = 0. `noise_variance` is the variance that noise has put into each coordinate of M.

        With `rank` also the last r gradients, and the variance of the noise in each.
        """
        slots = {"momentum": np.zeros_like(theta), "noise_variance": np.zeros(())}
        if self.rank is not None:
            slots["window"] = np.zeros((*theta.shape[:-1], self.rank, theta.shape[-1]))
            slots["window_variance"] = np.zeros(self.rank)
        return ServerState(theta, slots)

    def server_step(self, state: ServerState, gradient: FloatArray, t: int, noise: float) -> ServerState:
        """θ ← θ − η H v."""
        beta, correction = self.momentum, self._correction(t)
        variance = noise_variance(float(state.slots["noise_variance"]), noise, beta)
        if self.rank is not None:
            return self._low_rank_step(state, gradient, t, noise, variance)
        floor = state.theta.shape[-1] * variance / correction**2
        theta, M = step(
            state.theta,
            state.slots["momentum"],
            gradient,
            learning_rate=self.learning_rate,
            beta=beta,
            rho=self._damping(floor),
            mode=self.precondition,
            correction=correction,
            floor=floor if self.debias else 0.0,
        )
        return ServerState(theta, {"momentum": M, "noise_variance": np.asarray(variance)}, t)

    def _low_rank_step(
        self, state: ServerState, gradient: FloatArray, t: int, noise: float, variance: float
    ) -> ServerState:
        M = momentum(state.slots["momentum"], gradient, self.momentum)
        slots = {
            "momentum": M,
            "noise_variance": np.asarray(variance),
            "window": pushed(state.slots["window"], gradient, t),
            "window_variance": pushed(state.slots["window_variance"][:, None], np.array([noise**2]), t)[:, 0],
        }
        W, floor = self._curvature(slots, t)
        v = gradient if self.precondition == "gradient" else M / self._correction(t)
        H_v = curved(v, W, self._damping(floor), floor if self.debias else 0.0)
        return ServerState(state.theta - self.learning_rate * H_v, slots, t)

    def diagnostics(self, state: ServerState, t: int) -> dict[str, float]:
        """Curvature over damping: well below 1 the preconditioner does nothing but scale by 1/ρ. Signal over noise."""
        M, variance = state.slots["momentum"], float(state.slots["noise_variance"])
        if self.rank is None:
            correction = self._correction(t)
            rho = self._damping(M.shape[-1] * variance / correction**2)
            over = {"round/momentum_over_rho": float(dot(M, M)) / correction**2 / rho}
        else:
            W, floor = self._curvature(state.slots, t)
            over = {"round/curvature_over_rho": float(eigen(W)[0][-1]) / self._damping(floor)}
        return over | momentum_over_noise(M, variance)

    def warnings(self, noise: float, dimension: int) -> tuple[str, ...]:
        """Whether the step of `precondition="gradient"` will go uphill: βf > ρ (top of this file)."""
        floor = dimension * noise**2 * (1 - self.momentum) / (1 + self.momentum)
        if self.precondition != "gradient" or self.debias or self.rank is not None or floor == 0:
            return ()
        turned = self.momentum * floor / self._damping(floor)
        if turned <= 1:
            return ()
        return (
            f"The noise turns the steps of {self.algorithm} uphill: what it puts into the curvature is βf = "
            f"{self.momentum * floor:.3g}, {turned:.1f} times ρ, and the part of the gradient that is taken out along "
            "the momentum is larger than the gradient. Use `precondition: momentum`, `debias: true`, or a larger ρ.",
        )

    def _curvature(self, slots: Mapping[str, FloatArray], t: int) -> tuple[FloatArray, float]:
        """W (…, r, d), and what noise adds to each eigenvalue of WᵀW."""
        window = slots["window"]
        m = min(t, window.shape[-2])
        return window / np.sqrt(m), window.shape[-1] * float(slots["window_variance"].sum()) / m**2

    def _correction(self, t: int) -> float:
        return 1 - self.momentum**t if self.bias_correction else 1.0

    def _damping(self, floor: float) -> float:
        if not self.rho_relative:
            return self.rho
        if floor == 0:
            raise ValueError("`rho_relative` measures ρ in noise, and this run has none: give an absolute `rho`.")
        return self.rho * floor


class DPFedSOFIMTrainer(FederatedTrainer):
    """Private federated training with DP-FedSOFIM: the loop of `FederatedTrainer` around `SOFIMSettings.server_step`.

    Example:
        `DPFedSOFIMTrainer(cohort, run, LinearHead(64, 10), SOFIMSettings(rounds=40, clip=1.0), quanta=quanta).fit()`
    """

    settings_type = SOFIMSettings
