"""How much noise a training has, as its trainer would calibrate it, and where a table's normals come from.

| symbol | code       | meaning                                                                     |
|--------|------------|-----------------------------------------------------------------------------|
| n, T   |            | clients, who all answer; rounds                                             |
| K      |            | local steps of DP-SCAFFOLD                                                  |
| σ      |            | std of the noise on each coordinate of a round's sum over all clients        |
| σ_1    |            | DP-SCAFFOLD, K > 1: std on each coordinate of one client's sum in one step    |
| z      | `Normals`  | standard normals; the noise is σz                                           |

A sum of n clients' independent shares is one Gaussian, and is drawn as one. All methods, ε, regimes and n of a seed
have the same z, so that differences between methods are not differences of luck.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from dpray.platform.cohort.request import noise_of
from dpray.platform.privacy.budget import Budget, share, split, to_mu
from dpray.platform.privacy.local_steps import LocalSteps
from dpray.platform.privacy.mechanisms import ClippedSum, FeatureCovariance, Mechanism, Regime, Unit
from dpray.platform.privacy.noise import NoiseSource, counted_noisers
from dpray.trainers.fedfc import FedFCSettings
from dpray.trainers.momentum import momentum_noise_energy
from dpray.trainers.settings import Settings
from dpray.trainers.sofim import SOFIMSettings

FloatArray = NDArray[np.float64]

DELTA = 1e-5


@dataclass(frozen=True)
class Condition:
    """What a training may spend, and who adds its noise.

    Attributes:
        epsilon: of the whole training at δ = 1e-5, unit record; ∞ is no noise.
        regime: `local`: the server sees each client's message. `distributed`: it sees sums.
        clients: n.
    """

    epsilon: float
    regime: Regime = Regime.LOCAL
    clients: int = 1

    @property
    def quanta(self) -> int | None:
        """μ² of the whole training; None without noise."""
        return Budget(self.epsilon, DELTA, non_private=bool(np.isinf(self.epsilon))).quanta


def gradient_std(settings: Settings, condition: Condition, dimension: int, records: int, margin: float) -> FloatArray:
    """σ of every round, (T,); with several local steps σ_1.

    Args:
        settings: of the algorithm.
        condition: ε, regime and n.
        dimension: d.
        records: N.
        margin: the model's `relative_error`.
    """
    T, K, n = settings.rounds, settings.local_steps, condition.clients
    if condition.quanta is None:
        return np.zeros(T)
    quanta = condition.quanta
    if isinstance(settings, FedFCSettings):
        quanta -= share(quanta, settings.covariance_share)
    if K == 1:
        one: Mechanism = ClippedSum(settings.clip, Unit.RECORD, dimension, records, margin)
    else:
        one = LocalSteps(settings.clip, K, dimension, n, records, margin)
    return np.array([_std(one, each, condition.regime, n) for each in split(quanta, T)])


def covariance_std(settings: FedFCSettings, condition: Condition, features: int, records: int) -> float:
    """Std of the noise on each number of DP-FedFC's packed covariance; `features` counts the 1."""
    if condition.quanta is None:
        return 0.0
    mechanism = FeatureCovariance(settings.covariance_clip, features, records)
    quanta = share(condition.quanta, settings.covariance_share)
    return _std(mechanism, quanta, condition.regime, condition.clients)


def reversal(settings: SOFIMSettings, s: float, dimension: int) -> float:
    """βf/ρ, f = E‖M_noise‖² after many rounds: above 1, H G points uphill where noise is most of G. Public.

    M holds (1−β) of this very round's noise, and H takes the part along M out of G: with G = g + z and noise most of
    both, M·G ≈ (1−β)‖z‖² ≈ (1−β)ds², ‖M‖² ≈ f = ds²(1−β)/(1+β), so that

        H G ≈ (G − aM)/ρ,  a = (1+β)f/(ρ + f)

    M's signal is g, too, once g hardly changes: on average the step goes by (1 − a)g/ρ, which is uphill as soon as
    a > 1, that is, βf > ρ, and goes to −βg/ρ. With `debias` a goes to (1+β)‖g‖²/(ρ + ‖g‖²) instead: uphill only
    where β‖g‖² > ρ, too. With v = M̂ nothing of the kind happens: the step is along M̂, whatever its length.

    Args:
        settings: β and ρ, `precondition="gradient"`.
        s: std of the noise on each coordinate of G.
        dimension: d.
    """
    f = momentum_noise_energy(dimension, s, settings.momentum, 1_000_000)
    return settings.momentum * f / settings.rho


@cache
def _std(mechanism: Mechanism, quanta: int, regime: Regime, n: int) -> float:
    noise = noise_of(mechanism, to_mu(quanta), regime, counted_noisers(n, 1))
    if isinstance(mechanism, LocalSteps):
        return noise.sigma
    return noise.std(n)


class Normals:
    """z of a seed, by round; equal for all who ask. Seeded: NOT PRIVATE."""

    def __init__(self, seed: int, dimension: int) -> None:
        self._source, self._dimension = NoiseSource(seed), dimension

    def gradient(self, t: int) -> FloatArray:
        """(d,) of round t."""
        return self._source.generator("gradient", t).standard_normal(self._dimension)

    def covariance(self, numbers: int) -> FloatArray:
        """Of the packed covariance."""
        return self._source.generator("covariance").standard_normal(numbers)

    def step(self, t: int, k: int, clients: int) -> FloatArray:
        """(n, d) of round t and local step k: independent for each client."""
        return self._source.generator("step", t, k).standard_normal((clients, self._dimension))
