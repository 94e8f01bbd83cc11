"""DP-FedAdam and DP-FedYogi: adaptive server steps on the noised mean gradient.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: "Adaptive Federated Optimization", ICLR 2021,
Algorithm 2 with Δ = −G.

| symbol | code | meaning | shape |
|---|---|---|---|
| θ | `theta` | parameters | (…, d) |
| G | `gradient` | noised mean gradient of round t | (…, d) |
| m | `momentum` | m ← β₁ m + (1−β₁) G, m_0 = 0 | (…, d) |
| v | `second` | Adam: v ← β₂ v + (1−β₂) G²; Yogi: v ← v − (1−β₂) G² sign(v − G²); v_0 = τ² | (…, d) |
| β₁, β₂ | `momentum`, `second_momentum` | coefficients, in [0, 1) | scalars |
| τ | `adaptivity` | degree of adaptivity, in units of a coordinate of G | scalar |
| η | `learning_rate` | θ ← θ − η m/(√v + τ) | scalar |

Noise of std s on every coordinate puts s² into v: where τ and the gradients are both below s, every coordinate is
scaled alike, and what is left is momentum with a rate of about η/(s + τ).

Guarantee: everything here is post-processing of released gradients; it costs no privacy and gives none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dpray.trainers.base import FederatedTrainer
from dpray.trainers.models import FloatArray
from dpray.trainers.momentum import momentum, momentum_over_noise, noise_variance
from dpray.trainers.settings import ServerState, Settings, below_one, positive


@dataclass(frozen=True, kw_only=True)
class FedAdamSettings(Settings):
    """Settings of DP-FedAdam; defaults are the paper's.

    Attributes:
        momentum: β₁.
        second_momentum: β₂.
        adaptivity: τ.
    """

    algorithm: ClassVar[str] = "DP-FedAdam"

    momentum: float = 0.9
    second_momentum: float = 0.99
    adaptivity: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("momentum", "second_momentum"):
            self._require(name, below_one(getattr(self, name)), "at least 0 and below 1")
        self._require("adaptivity", positive(self.adaptivity), "a finite number above 0")

    def initial_state(self, theta: FloatArray) -> ServerState:
        """m_0 = 0, v_0 = τ². `noise_variance` is the variance that noise has put into each coordinate of m."""
        second = np.full_like(theta, self.adaptivity**2)
        return ServerState(theta, {"momentum": np.zeros_like(theta), "second": second, "noise_variance": np.zeros(())})

    def server_step(self, state: ServerState, gradient: FloatArray, t: int, noise: float) -> ServerState:
        """θ ← θ − η m/(√v + τ)."""
        m = momentum(state.slots["momentum"], gradient, self.momentum)
        v = self._second(state.slots["second"], gradient**2)
        variance = noise_variance(float(state.slots["noise_variance"]), noise, self.momentum)
        theta = state.theta - self.learning_rate * m / (np.sqrt(v) + self.adaptivity)
        return ServerState(theta, {"momentum": m, "second": v, "noise_variance": np.asarray(variance)}, t)

    def diagnostics(self, state: ServerState, t: int) -> dict[str, float]:
        """Signal over noise in m."""
        return momentum_over_noise(state.slots["momentum"], float(state.slots["noise_variance"]))

    def _second(self, v: FloatArray, squares: FloatArray) -> FloatArray:
        """v of this round; squares is G², (…, d)."""
        return self.second_momentum * v + (1 - self.second_momentum) * squares


@dataclass(frozen=True, kw_only=True)
class FedYogiSettings(FedAdamSettings):
    """Settings of DP-FedYogi, whose v forgets large gradients by additive steps."""

    algorithm: ClassVar[str] = "DP-FedYogi"

    def _second(self, v: FloatArray, squares: FloatArray) -> FloatArray:
        return np.asarray(v - (1 - self.second_momentum) * squares * np.sign(v - squares))


class DPFedAdamTrainer(FederatedTrainer):
    """Private federated training with DP-FedAdam."""

    settings_type = FedAdamSettings


class DPFedYogiTrainer(FederatedTrainer):
    """Private federated training with DP-FedYogi."""

    settings_type = FedYogiSettings
