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
)
from dpray.platform.privacy.noise import GridNoise, NoiseSource

__all__ = [
    "Budget",
    "ClippedMean",
    "ClippedSum",
    "FeatureCovariance",
    "GridNoise",
    "Mechanism",
    "NoiseSource",
    "NoisyMax",
    "Regime",
    "TopKVotes",
    "Unit",
    "remaining_epsilon",
]
