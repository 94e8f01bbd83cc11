"""The privacy core: exact accounting, budgets, noise, mechanisms. Knows nothing of Ray, MLflow or torch."""

from dpray.platform.privacy.budget import Budget, remaining_epsilon
from dpray.platform.privacy.mechanisms import (
    ClippedMean,
    ClippedSum,
    FeatureCovariance,
    Mechanism,
    NoisyMax,
    Regime,
    TopKVotes,
    Unit,
    VoteWinner,
)
from dpray.platform.privacy.noise import SEEDED, GridNoise, NoiseSource
from dpray.platform.privacy.pld import PoissonSampled
from dpray.platform.privacy.sampling import PoissonSampling

__all__ = [
    "SEEDED",
    "Budget",
    "ClippedMean",
    "ClippedSum",
    "FeatureCovariance",
    "GridNoise",
    "Mechanism",
    "NoiseSource",
    "NoisyMax",
    "PoissonSampled",
    "PoissonSampling",
    "Regime",
    "TopKVotes",
    "Unit",
    "VoteWinner",
    "remaining_epsilon",
]
