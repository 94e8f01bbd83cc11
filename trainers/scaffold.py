"""DP-SCAFFOLD: local steps, each noised, corrected by control variates made of noised gradients only.

Noble, Bellet, Dieuleveut: "Differentially Private Federated Learning on Heterogeneous Data", AISTATS 2022, Algorithm 1,
with every client in every round, all of its records in every step, and clients weighted by their records.

| symbol | code | meaning | shape |
|---|---|---|---|
| θ | `theta` | parameters at the server | (…, d) |
| K, η_l | `local_steps`, `local_rate` | local steps, and their rate | scalars |
| η_g | `learning_rate` | server rate | scalar |
| C | `clip` | fixed, public bound on a record's gradient, in every step | scalar |
| g̃_i^k | | Σ_x clip(g_x(y^{k−1}))/n_i, noised: client i's gradient in step k | (d,) |
| c_i, c | `controls` | control variates; c = Σ n_i c_i/N | (n, d), (d,) |
| G | `gradient` | Σ n_i Σ_k g̃_i^k/(K N) | (…, d) |

    client   y^k = y^{k−1} − η_l (g̃_i^k − c_i + c),  Δy_i = y^K − θ,  c_i⁺ = c_i − c − Δy_i/(Kη_l)
    server   θ ← θ + η_g Σ n_i Δy_i/N,  c ← c + Σ n_i (c_i⁺ − c_i)/N

Put in, c_i⁺ = Σ_k g̃_i^k/K: a client's new control variate is the mean of its noised gradients. And as Σ n_i c_i/N = c,
the corrections add up to nothing: θ ← θ − η_g η_l K G and c ← G. So a client's message is one vector, Σ_k n_i g̃_i^k:
its update and its control variate are both made of it, and c_i, being made of releases, lives at the server.

With K = 1 corrections cancel before anything is computed at another point than θ: DP-FedGD at rate η_g η_l, and any
regime will do. With K > 1 messages are not linear in the noise, and only `local` keeps them private: T·K compositions.

Privacy: each step of a client is a clipped sum under noise s = 2C√(TK)/μ, independent for each client and step; what it
starts from is made of earlier noised sums. Adaptive composition gives μ-GDP over all rounds (`LocalSteps`).

Guarantee: θ, c and all control variates of all rounds are together μ-GDP for the unit `record` under replace-one; with
K > 1 also against the server, which holds each client's messages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from dpray.platform.cohort.local_steps import LocalDescent
from dpray.platform.cohort.queries import Query
from dpray.platform.cohort.sums import ClientSum
from dpray.platform.privacy.local_steps import LocalSteps
from dpray.platform.privacy.mechanisms import Mechanism, Regime, Unit
from dpray.platform.privacy.noise import GridNoise
from dpray.trainers.base import FederatedTrainer
from dpray.trainers.models import FloatArray
from dpray.trainers.progress import Answer
from dpray.trainers.settings import ServerState, Settings


@dataclass(frozen=True, kw_only=True)
class ScaffoldSettings(Settings):
    """Settings of DP-SCAFFOLD: `learning_rate` is η_g, `local_steps` K, `local_rate` η_l."""

    algorithm: ClassVar[str] = "DP-SCAFFOLD"
    no_rehearsal: ClassVar[str] = (
        "DP-SCAFFOLD cannot be rehearsed: its control variates are about how clients differ, and one client alone does "
        "not. Give its settings, or rehearse DP-FedGD, which it is with one local step."
    )

    learning_rate: float = 1.0

    def server_step(self, state: ServerState, gradient: FloatArray, t: int, noise: float) -> ServerState:
        """θ ← θ − η_g η_l K G."""
        rate = self.learning_rate * self.local_rate * self.local_steps
        return ServerState(state.theta - rate * gradient, state.slots, t)


class DPScaffoldTrainer(FederatedTrainer):
    """Private federated training with DP-SCAFFOLD."""

    settings_type = ScaffoldSettings
    units = (Unit.RECORD,)
    local_steps_on_records = True
    sampled = False

    @property
    def controls(self) -> FloatArray:
        """c_i, (n, d), in the cohort's order; 0 before the first round."""
        empty = np.zeros((len(self.cohort.clients), self.model.dimension))
        return self.state.slots.get("controls", empty)

    def _query(self) -> Query:
        if not self._several:
            return super()._query()
        settings, controls = self.settings, self.controls
        return LocalDescent(
            self.state.theta,
            settings.clip,
            settings.local_steps,
            settings.local_rate,
            controls,
            self._counts @ controls / self._counts.sum(),
            self.cohort.clients,
        )

    def _mechanism(self) -> Mechanism:
        if not self._several:
            return super()._mechanism()
        return LocalSteps(
            self.settings.clip,
            self.settings.local_steps,
            self.model.dimension,
            len(self.cohort.clients),
            sum(self.cohort.counts.values()),
            self.model.relative_error,
        )

    def _answer(self, released: FloatArray, noise: GridNoise) -> Answer:
        if not self._several:
            return super()._answer(released, noise)
        K, counts = self.settings.local_steps, self._counts
        total, records, clients = ClientSum.unpack(released)
        messages = total.reshape(clients, -1)
        sigma = noise.sigma * math.sqrt(clients * K)
        G = messages.sum(axis=0) / (records * K)
        return Answer(G, sigma / (records * K), sigma, clients, records, messages / (K * counts[:, None]))

    def _remember(self, after: ServerState, answer: Answer) -> ServerState:
        if answer.parts is None:
            return after
        return replace(after, slots={**after.slots, "controls": answer.parts})

    @property
    def _several(self) -> bool:
        return self.settings.local_steps > 1

    @property
    def _counts(self) -> FloatArray:
        """n_i, (n,)."""
        return np.array([self.cohort.counts[client] for client in self.cohort.clients], dtype=np.float64)

    def _refuse_misfits(self) -> None:
        super()._refuse_misfits()
        if not self._several:
            return
        K = self.settings.local_steps
        if self.regime is not Regime.LOCAL:
            raise ValueError(
                f"{K} local steps are private in regime `local` only, where each step has the whole noise: their "
                f"message is not linear in it, so that shares do not add up. `{self.regime}` was given; take `local`, "
                "or one local step."
            )
        if self.settings.weighting == "clients":
            raise ValueError(
                f"DP-SCAFFOLD with {K} local steps weighs clients by their records: leave out `weighting`, or take one "
                "local step."
            )
        if self.cohort.quorum < len(self.cohort.clients):
            raise ValueError(
                f"DP-SCAFFOLD with {K} local steps asks every client in every round, or control variates no longer "
                f"add up, and a quorum of {self.cohort.quorum} of {len(self.cohort.clients)} was given: give the "
                "cohort no quorum, or take one local step."
            )
