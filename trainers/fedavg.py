"""DP-FedAvg: clients descend for several steps without noise, and release their whole update, clipped.

McMahan, Ramage, Talwar, Zhang: "Learning Differentially Private Recurrent Language Models", ICLR 2018, with every
client in every round; the server's rate is Reddi et al.'s (ICLR 2021).

| symbol | code | meaning | shape |
|---|---|---|---|
| θ | `theta` | parameters at the server | (…, d) |
| K, η_l | `local_steps`, `local_rate` | full-batch steps of a client, and their rate | scalars |
| Δ_i | | θ_i − θ after K steps, clipped to C as a whole | (d,) |
| n | | clients that answered | scalar |
| G | `gradient` | −Σ Δ_i/n, noised | (…, d) |
| η_s | `learning_rate` | θ ← θ + η_s Σ Δ_i/n | scalar |

Guarantee: the unit is `client`. Replacing everything one client holds moves ΣΔ_i by at most 2C, however many steps it
makes. Records are protected as parts of their client; for accounts of records that is more than was asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dpray.platform.privacy.mechanisms import Unit
from dpray.trainers.base import FederatedTrainer
from dpray.trainers.models import FloatArray
from dpray.trainers.settings import ServerState, Settings


@dataclass(frozen=True, kw_only=True)
class FedAvgSettings(Settings):
    """Settings of DP-FedAvg: `learning_rate` is η_s, `clip` the bound on a client's whole update."""

    algorithm: ClassVar[str] = "DP-FedAvg"

    learning_rate: float = 1.0

    def server_step(self, state: ServerState, gradient: FloatArray, t: int, noise: float) -> ServerState:
        """θ ← θ − η_s G."""
        return ServerState(state.theta - self.learning_rate * gradient, steps=t)


class DPFedAvgTrainer(FederatedTrainer):
    """Private federated training with DP-FedAvg; unit `client`."""

    settings_type = FedAvgSettings
    units = (Unit.CLIENT,)
