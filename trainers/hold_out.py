"""A score of a trained model on records that nobody may see: how many it predicts right, noised and charged.

| symbol | meaning | shape |
|---|---|---|
| θ | parameters that are scored; released | (d,) |
| s(x) | 1 if the class predicted for record x is its label, else 0 | |
| m | records held out at the clients that answered, public | |
| c | Σ_x (s(x) − ½) + N(0, σ²), in the first coordinate of a vector of length d | |
| | c/m + ½: the noised accuracy, std σ/m | |

**Sensitivity.** A record contributes a vector of norm ½, whatever it holds, so this is a clipped sum with C = ½:
replacing one record moves it by at most Δ = 2C = 1, and μ = 1/σ. A bad record (not finite, no class as its label, one
the model raises on) counts as wrong. The other coordinates are zeros with noise: a cohort's sums are as long as θ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpray.platform.cohort.client import ClientTask, Records
from dpray.platform.cohort.queries import GradientSum
from dpray.platform.cohort.sums import ClientSum
from dpray.platform.privacy.budget import to_mu
from dpray.platform.privacy.ledger import PlannedRelease, ReleaseKey
from dpray.platform.privacy.mechanisms import ClippedSum, Regime, Unit
from dpray.trainers.models import BoolArray, FloatArray, Model

if TYPE_CHECKING:
    from dpray.platform.cohort import Cohort
    from dpray.platform.privacy.ledger import Attempt, Run

LABEL, MECHANISM = "score", "correct"
"""The release in the ledger: (`score`, `correct`, step 0)."""
_HALF = 0.5


class Correct(ClientTask):
    """Counts right predictions: the task of a cohort of held-out records.

    Args:
        model: whose predictions.

    *Guarantee.* Replacing one record of a client by anything moves `clipped_sum` by at most 1, and no other record's
    part of it: a bad record is replaced by zeros in its place, so that the others are predicted as they were. Asked of
    the model: a prediction depends on its record alone, as those of `LinearHead` and `TorchModule` do.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.dimension = model.dimension

    def check_records(self, shape: tuple[int, ...]) -> None:
        """As the model does it."""
        self.model.check_records(shape)

    def clipped_sum(self, theta: FloatArray, records: Records, clip: float) -> FloatArray:
        """Σ_x (s(x) − ½) in the first of d coordinates."""
        if clip != _HALF:
            raise ValueError(f"Right predictions are counted with a clip of {_HALF}, and {clip} was given.")
        good = self.model.usable(records)
        try:
            predicted = self.model.predict(theta, _zeroed(records.x, ~good))
        except Exception:  # at this θ the model raises on a record: each is tried alone, and those are bad, too
            good = good & np.array(
                [self._answers(theta, records.x[j : j + 1]) for j in range(len(records))], dtype=bool
            )
            predicted = self.model.predict(theta, _zeroed(records.x, ~good))
        right = (predicted == records.y.reshape(-1)) & good
        total = np.zeros(self.dimension)
        total[0] = np.where(right, _HALF, -_HALF).sum()
        return total

    def _answers(self, theta: FloatArray, x: NDArray[Any]) -> bool:
        try:
            self.model.predict(theta, x)
        except Exception:
            return False
        return True


def _zeroed(x: NDArray[Any], bad: BoolArray) -> NDArray[Any]:
    """Features with bad records replaced by zeros in their places."""
    return np.where(bad.reshape(-1, *[1] * (x.ndim - 1)), 0, x)


@dataclass(frozen=True)
class HoldOut:
    """Held-out records at the clients, and what one score of them costs.

    Args:
        cohort: of the held-out records, with the task `Correct(model)`; the same population as the training's.
        quanta: μ² of one score.
        regime: who adds the noise.

    *Guarantee.* A score is μ-GDP for one held-out record replaced by another; it adds to what the training costs, on
    every account of the population.
    """

    cohort: Cohort
    quanta: int
    regime: Regime = Regime.DISTRIBUTED

    def __post_init__(self) -> None:
        object.__setattr__(self, "regime", Regime(self.regime))

    @property
    def mechanism(self) -> ClippedSum:
        """C = ½ over the cohort's records."""
        return ClippedSum(_HALF, Unit.RECORD, self.cohort.terms.dimension, sum(self.cohort.counts.values()))

    @property
    def planned(self) -> PlannedRelease:
        """Its line in a plan."""
        return PlannedRelease(LABEL, MECHANISM, Unit.RECORD, self.quanta, 1)

    def score(self, run: Run, theta: FloatArray) -> tuple[float, float]:
        """The noised accuracy of θ, around [0, 1], and the std of its noise; the same value whenever it is asked again.

        Raises:
            BudgetExceeded: the run's plan has no line for it, and the account not that much left.
            QuorumLost, ReleaseLost: as of any sum.
        """
        query, mechanism, trust = GradientSum(theta, _HALF), self.mechanism, self.cohort.trust(self.regime)

        def compute(attempt: Attempt) -> FloatArray:
            return self.cohort.sum(attempt, query, mechanism, self.regime).pack()

        key = ReleaseKey(LABEL, MECHANISM, 0)
        released = run.release(
            key, {**query.describe(), "score": "correct"}, mechanism, self.quanta, compute, trust=trust
        )
        total, records, clients = ClientSum.unpack(released.value)
        noise = self.cohort.noise_for(mechanism, to_mu(self.quanta), self.regime)
        sigma = noise.std(1 if self.regime is Regime.CENTRAL else clients)
        return float(total[0] / records + _HALF), sigma / records
