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

The step is θ ← θ − η H v. By Sherman-Morrison it needs two inner products and no matrix:

- `precondition="gradient"`, v = G (the paper): H G = (G − M̂ (M̂·G)/(ρ + ‖M̂‖²)) / ρ: plain descent at rate η/ρ, with the
  part along the momentum damped.
- `precondition="momentum"`, v = M̂ (the authors' code): H M̂ = M̂ / (ρ + ‖M̂‖²): a momentum step whose length cannot exceed
  η/(2√ρ), and no anisotropy at all.

Guarantee: everything here is post-processing of released gradients; it costs no privacy and gives none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from dpray.trainers.base import FederatedTrainer
from dpray.trainers.models import FloatArray
from dpray.trainers.momentum import dot
from dpray.trainers.settings import ServerState, Settings, below_one, positive

Precondition = Literal["gradient", "momentum"]

_BLOCK = 32768  # coordinates updated together: a few blocks of float64 stay in the cache


def precondition(v: FloatArray, M: FloatArray, rho: float) -> FloatArray:
    """H v = (v − M (M·v)/(ρ + ‖M‖²)) / ρ, (…, d), in O(d). With v = M this is M/(ρ + ‖M‖²)."""
    along = dot(M, v) / (rho + dot(M, M))
    return np.asarray((v - M * along[..., None]) / rho)


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
    out: tuple[FloatArray, FloatArray] | None = None,
) -> tuple[FloatArray, FloatArray]:
    """One server step, fused: θ − η H v and the new M, in two passes over memory and without a temporary of size d.

    Args:
        theta, M, G: (…, d); M before this round.
        learning_rate, beta, rho: η, β, ρ.
        mode: what v is.
        correction: 1 − βᵗ with bias correction, else 1.
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
    damping = rho + squared / correction**2
    if mode == "gradient":  # H G = G/ρ − M̂ (M̂·G)/(ρ(ρ + ‖M̂‖²))
        on_M = learning_rate * along / (correction**2 * rho * damping)
    else:  # H M̂ = M̂/(ρ + ‖M̂‖²)
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
        rho_relative: ρ_t = `rho` · E‖M̂_noise‖², the public noise floor of round t. Impossible without noise.
    """

    algorithm: ClassVar[str] = "DP-FedSOFIM"

    learning_rate: float = 0.1
    clip: float = 10.0
    momentum: float = 0.9
    rho: float = 0.5
    precondition: Precondition = "gradient"
    bias_correction: bool = False
    rho_relative: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("momentum", below_one(self.momentum), "at least 0 and below 1")
        self._require("rho", positive(self.rho), "a finite number above 0")
        self._require("precondition", self.precondition in ("gradient", "momentum"), "`gradient` or `momentum`")
        for name in ("bias_correction", "rho_relative"):
            self._require(name, isinstance(getattr(self, name), bool), "true or false")

    def initial_state(self, theta: FloatArray) -> ServerState:
        """M_0 = 0. `noise_variance` is the variance that noise has put into each coordinate of M."""
        return ServerState(theta, {"momentum": np.zeros_like(theta), "noise_variance": np.zeros(())})

    def server_step(self, state: ServerState, gradient: FloatArray, t: int, noise: float) -> ServerState:
        """θ ← θ − η H v."""
        beta = self.momentum
        correction = self._correction(t)
        variance = beta**2 * state.slots["noise_variance"] + (1 - beta) ** 2 * noise**2
        theta, M = step(
            state.theta,
            state.slots["momentum"],
            gradient,
            learning_rate=self.learning_rate,
            beta=beta,
            rho=self._damping(state.theta.shape[-1], float(variance), correction),
            mode=self.precondition,
            correction=correction,
        )
        return ServerState(theta, {"momentum": M, "noise_variance": np.asarray(variance)}, t)

    def diagnostics(self, state: ServerState, t: int) -> dict[str, float]:
        """‖M̂‖²/ρ: well below 1 the preconditioner does nothing but scale by 1/ρ."""
        M, correction = state.slots["momentum"], self._correction(t)
        rho = self._damping(M.shape[-1], float(state.slots["noise_variance"]), correction)
        return {"round/momentum_over_rho": float(dot(M, M)) / correction**2 / rho}

    def _correction(self, t: int) -> float:
        return 1 - self.momentum**t if self.bias_correction else 1.0

    def _damping(self, dimension: int, variance: float, correction: float) -> float:
        if not self.rho_relative:
            return self.rho
        if variance == 0:
            raise ValueError("`rho_relative` measures ρ in noise, and this run has none: give an absolute `rho`.")
        return self.rho * dimension * variance / correction**2


class DPFedSOFIMTrainer(FederatedTrainer):
    """Private federated training with DP-FedSOFIM: the loop of `FederatedTrainer` around `SOFIMSettings.server_step`.

    Example:
        `DPFedSOFIMTrainer(cohort, run, LinearHead(64, 10), SOFIMSettings(rounds=40, clip=1.0), quanta=quanta).fit()`
    """

    settings_type = SOFIMSettings
