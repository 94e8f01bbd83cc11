"""DP-FedGD: gradient descent on the noised mean gradient, θ ← θ − ηG. The smallest algorithm, and the baseline.

| symbol | meaning | shape |
|---|---|---|
| θ | parameters | (…, d) |
| G | noised mean gradient of the round | (…, d) |
| η | learning rate | scalar |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dpray.trainers.base import FederatedTrainer
from dpray.trainers.models import FloatArray
from dpray.trainers.settings import ServerState, Settings


@dataclass(frozen=True, kw_only=True)
class FedGDSettings(Settings):
    """Settings of DP-FedGD."""

    algorithm: ClassVar[str] = "DP-FedGD"

    def server_step(self, state: ServerState, gradient: FloatArray, t: int, noise: float) -> ServerState:
        """θ ← θ − ηG."""
        return ServerState(state.theta - self.learning_rate * gradient, steps=t)


class DPFedGDTrainer(FederatedTrainer):
    """Private federated training with DP-FedGD."""

    settings_type = FedGDSettings
