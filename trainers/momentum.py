"""DP-FedGD with momentum, plain and normalised: the controls that every other server step has to beat.

| symbol | meaning | shape |
|---|---|---|
| θ | parameters | (…, d) |
| G | noised mean gradient of round t | (…, d) |
| M | momentum, M_t = β M_{t−1} + (1−β) G_t, M_0 = 0 (Polyak 1964, averaged form) | (…, d) |
| M̂ | M_t / (1 − βᵗ) with bias correction, else M_t | (…, d) |
| β | momentum coefficient | scalar |
| η | learning rate; of the normalised step, its length | scalar |
| s | std of the noise on each coordinate of G | scalar |

- `dp_momentum`: θ ← θ − η M̂
- `dp_normalised_momentum`: θ ← θ − η M̂/‖M̂‖ (Cutkosky & Mehta 2020): every step has the length η, whatever the noise.

Guarantee: everything here is post-processing of released gradients; it costs no privacy and gives none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dpray.trainers.base import FederatedTrainer
from dpray.trainers.models import FloatArray
from dpray.trainers.settings import ServerState, Settings, below_one


def momentum(M: FloatArray, G: FloatArray, beta: float) -> FloatArray:
    """M_t = β M_{t−1} + (1−β) G_t, (…, d)."""
    return beta * M + (1 - beta) * G


def noise_variance(variance: float, noise: float, beta: float) -> float:
    """Variance that noise has put into each coordinate of M_t, from that of M_{t−1}: β²v + (1−β)²s²."""
    return beta**2 * variance + (1 - beta) ** 2 * noise**2


def dot(a: FloatArray, b: FloatArray) -> FloatArray:
    """Inner products over the last axis, (…)."""
    return np.asarray(np.einsum("...i,...i->...", a, b))


def momentum_noise_energy(dimension: int, noise: float, beta: float, t: int, *, bias_correction: bool = False) -> float:
    """E‖M_noise‖² = d s² (1−β)(1−β²ᵗ)/(1+β): what noise alone puts into ‖M_t‖², or into ‖M̂_t‖² with bias correction.

    Args:
        dimension: d.
        noise: s.
        beta: β.
        t: steps made, at least 1.
    """
    energy = dimension * noise**2 * (1 - beta) * (1 - beta ** (2 * t)) / (1 + beta)
    return energy / (1 - beta**t) ** 2 if bias_correction else energy


def momentum_over_noise(M: FloatArray, variance: float) -> dict[str, float]:
    """√max(‖M‖² − E‖M_noise‖², 0) / √E‖M_noise‖²: an estimate of the signal in the momentum over its noise.

    Args:
        M: (d,).
        variance: what noise has put into each coordinate of M; without any the ratio is infinite.
    """
    energy = M.shape[-1] * variance
    ratio = math.sqrt(max(float(dot(M, M)) - energy, 0.0) / energy) if energy else math.inf
    return {"round/momentum_signal_to_noise": ratio}


@dataclass(frozen=True, kw_only=True)
class MomentumSettings(Settings):
    """Settings of DP-FedGD with momentum.

    Attributes:
        momentum: β, in [0, 1).
        bias_correction: M̂ = M/(1 − βᵗ).
    """

    algorithm: ClassVar[str] = "DP-Momentum"

    momentum: float = 0.9
    bias_correction: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("momentum", below_one(self.momentum), "at least 0 and below 1")
        self._require("bias_correction", isinstance(self.bias_correction, bool), "true or false")

    def initial_state(self, theta: FloatArray) -> ServerState:
        """M_0 = 0. `noise_variance` is the variance that noise has put into each coordinate of M."""
        return ServerState(theta, {"momentum": np.zeros_like(theta), "noise_variance": np.zeros(())})

    def server_step(self, state: ServerState, gradient: FloatArray, t: int, noise: float) -> ServerState:
        """θ ← θ − η M̂, or the normalised step."""
        M = momentum(state.slots["momentum"], gradient, self.momentum)
        variance = noise_variance(float(state.slots["noise_variance"]), noise, self.momentum)
        step = self.learning_rate * self._direction(M, t)
        return ServerState(state.theta - step, {"momentum": M, "noise_variance": np.asarray(variance)}, t)

    def diagnostics(self, state: ServerState, t: int) -> dict[str, float]:
        """Signal over noise in the momentum."""
        return momentum_over_noise(state.slots["momentum"], float(state.slots["noise_variance"]))

    def _direction(self, M: FloatArray, t: int) -> FloatArray:
        return M / (1 - self.momentum**t) if self.bias_correction else M


@dataclass(frozen=True, kw_only=True)
class NormalisedMomentumSettings(MomentumSettings):
    """Settings of normalised momentum; `learning_rate` is the length of every step. Bias correction changes nothing."""

    algorithm: ClassVar[str] = "DP-NormalisedMomentum"

    def _direction(self, M: FloatArray, t: int) -> FloatArray:
        """M/‖M‖, whose length is 1; 0 for M = 0."""
        norm = np.sqrt(dot(M, M))[..., None]
        return np.asarray(np.divide(M, norm, out=np.zeros_like(M), where=norm > 0))


class DPMomentumTrainer(FederatedTrainer):
    """Private federated training with momentum."""

    settings_type = MomentumSettings


class DPNormalisedMomentumTrainer(FederatedTrainer):
    """Private federated training with normalised momentum."""

    settings_type = NormalisedMomentumSettings
