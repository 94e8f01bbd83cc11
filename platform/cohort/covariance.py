"""What clients are asked for second moments of their features: Σ x̃x̃ᵀ over their records.

| symbol | code | meaning | shape |
|---|---|---|---|
| x̃ | | a record's features with a 1 appended, clipped to C in L2; zero if a feature is not finite | (f,) |
| C | `clip` | bound on ‖x̃‖ | |
| f | `features` | width of x̃, the 1 included | |
| v_i | | client i's Σ x̃x̃ᵀ, packed (`pack_symmetric`: off-diagonal entries times √2) | (f(f+1)/2,) |

**Why packed.** Independent noise of std s on the packed vector is, on the matrix, variance s² on the diagonal and s²/2
beside it, mirrored: the law of (A + Aᵀ)/2 with A_ij ~ N(0, s²). And ‖pack(S)‖₂ = ‖S‖_F, so that the sensitivity of
the vector is the matrix's, √2·C² (`FeatureCovariance`). So a covariance goes through the same sums, grids, shares of
noise and masks as any vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpray.platform.cohort.client import FloatArray, Records
from dpray.platform.cohort.errors import CohortError
from dpray.platform.cohort.queries import HostedClients, Query, Terms
from dpray.platform.privacy.mechanisms import (
    FeatureCovariance,
    Mechanism,
    VoteWinner,
    clipped_covariance,
    pack_symmetric,
)


@dataclass(frozen=True)
class CovarianceSum(Query):
    """Packed sums of outer products of clipped features, unit record, `FeatureCovariance(C, f, N)`.

    Labels play no part. No user code runs: features are taken from the records as they are, so they must be made of
    public constants and the record alone.

    Args:
        clip: C.
        features: f, one more than a record has.
    """

    clip: float
    features: int

    def check(self, mechanism: Mechanism | VoteWinner, terms: Terms) -> None:
        """As `Query.check`: a FeatureCovariance with this C and f, over at least the cohort's records."""
        fits = isinstance(mechanism, FeatureCovariance) and (mechanism.clip, mechanism.features) == (
            self.clip,
            self.features,
        )
        if not isinstance(mechanism, FeatureCovariance) or not fits:
            raise CohortError(
                f"A CovarianceSum with clip {self.clip} of {self.features} features is released by FeatureCovariance("
                f"clip={self.clip}, features={self.features}, …); {mechanism.describe()} was given."
            )
        if mechanism.records < terms.records:
            raise CohortError(
                f"The mechanism bounds its rounding for {mechanism.records} records, and the cohort sums "
                f"{terms.records}."
            )

    def messages(self, clients: HostedClients) -> FloatArray:
        """(clients, f(f+1)/2) float64."""
        schema = clients.shards.x.shape[1:]
        if schema != (self.features - 1,):
            raise CohortError(
                f"A covariance of {self.features} features, the appended 1 included, was asked for, and a record's "
                f"features have the shape {schema}: {self.features - 1} in a row are needed."
            )
        return np.stack([self._packed(records) for records in clients.shards])

    def largest(self, terms: Terms) -> float:
        """N·C²: an entry of the diagonal; off it √2·|x̃_i x̃_j| ≤ C²/√2."""
        return terms.records * self.clip**2

    def _packed(self, records: Records) -> FloatArray:
        rows = np.ones((len(records), self.features))
        rows[:, :-1] = records.x
        return pack_symmetric(clipped_covariance(rows, self.clip))
