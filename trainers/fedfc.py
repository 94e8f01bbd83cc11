"""DP-FedFC: descent preconditioned by the inverse covariance of the clients' features, released once.

The federated form of DP-FC: Mehta, Krichene, Thakurta, Kurakin, Cutkosky, "Differentially Private Image Classification
from Features", TMLR 2023. The covariance's noise goes on the sum, and its cost is composed with the gradients'.

| symbol | code | meaning | shape |
|---|---|---|---|
| θ | `theta` | a linear head's weights, bias in the last row | (…, (f+1)·K) |
| G | `gradient` | noised mean gradient of a round | (…, (f+1)·K) |
| x̃ | | features with a 1 appended, clipped to C_c | (f+1,) |
| C_c | `covariance_clip` | bound on ‖x̃‖ | scalar |
| S | | Σ x̃x̃ᵀ + E over all records; E = (A+Aᵀ)/2, A_ij ~ N(0, s²) | (f+1, f+1) |
| N | | records in S, public | scalar |
| γ | `gamma` | damping | scalar |
| P | `preconditioner` | (S₊/N + γI)⁻¹, S₊ the nearest positive semidefinite matrix to S | (f+1, f+1) |
| η | `learning_rate` | θ ← θ − η P G, for each class's column of G | scalar |

The Hessian of a linear head's cross-entropy is Σ x̃x̃ᵀ ⊗ (diag(p) − ppᵀ), p the record's probabilities: P is the inverse
of its factor of the features, and leaves out that of the classes. It needs no θ, so one release does for all rounds.

Privacy: replacing a record replaces one x̃x̃ᵀ, ‖x̃x̃ᵀ − ỹỹᵀ‖_F² = ‖x̃‖⁴ + ‖ỹ‖⁴ − 2(x̃·ỹ)² ≤ 2C_c⁴, so S costs
μ = √2·C_c²/s. It is a release of its own: `covariance_share` of the training's μ² pays for it, the rest for the
gradients, and the two add up to the training's quanta exactly.

Guarantee: S, all gradients and everything made of them are together μ-GDP for the unit `record` under replace-one.
Features must come from public constants and the record alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from dpray.platform.cohort.covariance import CovarianceSum
from dpray.platform.cohort.sums import ClientSum
from dpray.platform.privacy.budget import share
from dpray.platform.privacy.ledger import Attempt, Plan, PlannedRelease, ReleaseKey, ReleaseLost
from dpray.platform.privacy.mechanisms import FeatureCovariance, Unit, unpack_symmetric
from dpray.trainers.base import FederatedTrainer
from dpray.trainers.models import FloatArray, LinearHead
from dpray.trainers.settings import ServerState, Settings, positive

COVARIANCE = "covariance"
"""Name of the release in the ledger: (label + " covariance", "covariance", step 1)."""


def covariance_label(label: str) -> str:
    """Phase in the ledger of the covariance that belongs to a training."""
    return f"{label} covariance"


def preconditioner(S: FloatArray, records: int, gamma: float) -> FloatArray:
    """P = (S₊/N + γI)⁻¹, (f+1, f+1), symmetric, with eigenvalues in (0, 1/γ].

    Args:
        S: noised Σ x̃x̃ᵀ, symmetric.
        records: N.
        gamma: γ > 0.
    """
    eigenvalues, U = np.linalg.eigh(S)
    P = (U / (np.maximum(eigenvalues, 0.0) / records + gamma)) @ U.T
    return np.asarray((P + P.T) / 2)


def on_columns(P: FloatArray, G: FloatArray) -> FloatArray:
    """P applied to each class's column of G, (…, (f+1)·K)."""
    return np.asarray(P @ G.reshape(*G.shape[:-1], len(P), -1)).reshape(G.shape)


@dataclass(frozen=True, kw_only=True)
class FedFCSettings(Settings):
    """Settings of DP-FedFC.

    Attributes:
        covariance_clip: C_c, in units of the features.
        covariance_share: part of the training's μ² that the covariance costs, in (0, 1).
        gamma: γ, in units of a squared feature.
    """

    algorithm: ClassVar[str] = "DP-FedFC"
    no_rehearsal: ClassVar[str] = (
        "DP-FedFC cannot be rehearsed: it starts from a covariance that all clients release together, which one client "
        "alone does not have. Give its settings, or search with another algorithm."
    )

    covariance_clip: float
    covariance_share: float = 0.2
    gamma: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("covariance_clip", "gamma"):
            self._require(name, positive(getattr(self, name)), "a finite number above 0")
        whole = positive(self.covariance_share) and self.covariance_share < 1
        self._require("covariance_share", whole, "a number above 0 and below 1")

    def server_step(self, state: ServerState, gradient: FloatArray, t: int, noise: float) -> ServerState:
        """θ ← θ − η P G."""
        if "preconditioner" not in state.slots:
            raise ValueError(
                "DP-FedFC steps from a state that holds its `preconditioner`: release the covariance first."
            )
        step = self.learning_rate * on_columns(state.slots["preconditioner"], gradient)
        return ServerState(state.theta - step, state.slots, t)


class DPFedFCTrainer(FederatedTrainer):
    """Private federated training with DP-FedFC; for a `LinearHead`.

    Raises, beside what every trainer does:
        ReleaseLost: the covariance is lost. Its charge stands, and nothing can be trained under this label any more.
    """

    settings_type = FedFCSettings
    settings: FedFCSettings
    model: LinearHead
    units = (Unit.RECORD,)
    sampled = False

    @property
    def plan(self) -> Plan:
        """The covariance, then the rounds."""
        return Plan((self.planned_covariance, self.planned))

    @property
    def planned_covariance(self) -> PlannedRelease:
        """The covariance's line of the plan."""
        label = covariance_label(self.label)
        return PlannedRelease(label, COVARIANCE, Unit.RECORD, self._covariance_quanta, 1)

    @property
    def covariance(self) -> FeatureCovariance:
        """The mechanism of the extra release."""
        features, records = self.model.features + 1, sum(self.cohort.counts.values())
        return FeatureCovariance(self.settings.covariance_clip, features, records)

    @property
    def _covariance_quanta(self) -> int | None:
        return None if self.quanta is None else share(self.quanta, self.settings.covariance_share)

    def _rounds_quanta(self, quanta: int) -> int:
        return quanta - share(quanta, self.settings.covariance_share)

    def _begin(self) -> None:
        if "preconditioner" in self.state.slots:
            return
        total, records, _ = ClientSum.unpack(self._released())
        S = unpack_symmetric(total, self.model.features + 1)
        P = preconditioner(S, records, self.settings.gamma)
        self.state = replace(self.state, slots={**self.state.slots, "preconditioner": P})

    def _released(self) -> FloatArray:
        """The covariance as the ledger has it, released if it was not."""
        mechanism = self.covariance
        query = CovarianceSum(mechanism.clip, mechanism.features)
        request: Mapping[str, Any] = self._request(query)

        def compute(attempt: Attempt) -> FloatArray:
            return self.cohort.sum(attempt, query, mechanism, self.regime).pack()

        key = ReleaseKey(covariance_label(self.label), COVARIANCE, 1)
        trust = self.cohort.trust(self.regime)
        try:
            return self.run.release(key, request, mechanism, self._covariance_quanta, compute, trust=trust).value
        except ReleaseLost as lost:
            raise ReleaseLost(
                f"{lost} DP-FedFC cannot begin without its covariance: train in another run, charged anew."
            ) from None

    def _refuse_misfits(self) -> None:
        super()._refuse_misfits()
        if not isinstance(self.model, LinearHead):
            raise ValueError(
                f"DP-FedFC preconditions a linear head by the covariance of its features, and a "
                f"{type(self.model).__name__} was given: train it with another algorithm."
            )
