"""Audit: what a release can be *seen* to leak, a lower bound on its μ from outputs on two neighbouring data sets.

| symbol | meaning                                                                                    |
|--------|--------------------------------------------------------------------------------------------|
| α, β   | false alarms and misses of a test that tells outputs on D from outputs on D'                 |
| α̂, β̂   | their Clopper-Pearson upper confidence limits                                               |
| μ_low  | Φ⁻¹(1 − α̂) − Φ⁻¹(β̂): every μ-GDP release has β ≥ Φ(Φ⁻¹(1 − α) − μ) (Dong, Roth & Su 2022)   |

The test projects outputs on a direction and compares with a threshold. Direction and threshold are chosen on one half
of the outputs, α and β counted on the other, so that the limits hold whatever was chosen.

*Guarantee.* None for anybody's data: an audit can only refute. If `mu_low` exceeds the claimed μ, the claim is wrong
with the stated confidence; if it does not, nothing follows. It needs thousands of releases on data made for the
purpose, and is never run on protected data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtri
from scipy.stats import beta

from dpray.platform.privacy import checks
from dpray.platform.privacy.noise import FloatArray

SMALLEST_SAMPLE = 100


@dataclass(frozen=True)
class Audit:
    """Result of `audit`.

    Attributes:
        mu_low: lower confidence bound on μ, at least 0.
        false_alarms: upper limit α̂ of the test's false alarms.
        misses: upper limit β̂ of its misses.
        confidence: probability with which both limits hold.
    """

    mu_low: float
    false_alarms: float
    misses: float
    confidence: float

    def refutes(self, mu: float) -> bool:
        """Whether the outputs contradict a claim of μ-GDP. `ValueError` unless μ is positive; ∞ claims nothing."""
        return self.mu_low > checks.positive("mu", mu, infinite=True)

    def epsilon_low(self, delta: float) -> float:
        """Lower confidence bound on ε (nats) at `delta`, from the same test: max(0, ln((1 − δ − β̂)/α̂)).

        Every (ε, δ)-DP release has 1 − β ≤ e^ε α + δ (Kairouz, Oh & Viswanath 2015). `ValueError` unless 0 < δ < 1.
        """
        excess = 1 - checks.probability("delta", delta) - self.misses
        return max(0.0, math.log(excess / self.false_alarms)) if excess > 0 else 0.0


def audit(first: ArrayLike, second: ArrayLike, *, confidence: float = 0.999) -> Audit:
    """Lower confidence bound on the μ of a release from its outputs on two neighbouring data sets.

    Args:
        first: outputs on D, independent releases of the same query; (m,) or (m, d).
        second: outputs on D'; (m',) or (m', d).
        confidence: in (0, 1); 1 − confidence is the chance that a true claim is refuted.

    Returns:
        The bound with the limits it comes from.

    Raises:
        ValueError: fewer than 100 outputs on a side, different widths, or values that are not finite.
    """
    confidence = checks.probability("confidence", confidence)
    x, y = _outputs("first", first), _outputs("second", second)
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"Outputs of one release have one width, but {x.shape[1]} and {y.shape[1]} were given.")
    direction = y[::2].mean(axis=0) - x[::2].mean(axis=0)
    threshold = float((y[::2].mean(axis=0) + x[::2].mean(axis=0)) @ direction) / 2
    false_alarms = _upper_limit(x[1::2] @ direction > threshold, confidence)
    misses = _upper_limit(y[1::2] @ direction <= threshold, confidence)
    mu_low = max(0.0, float(-ndtri(false_alarms) - ndtri(misses)))
    return Audit(mu_low, false_alarms, misses, confidence)


def _upper_limit(events: np.ndarray, confidence: float) -> float:
    """Clopper-Pearson upper limit of a rate, each of the two at half the error probability."""
    count, total = int(np.count_nonzero(events)), events.size
    return 1.0 if count == total else float(beta.isf((1 - confidence) / 2, count + 1, total - count))


def _outputs(name: str, values: ArrayLike) -> FloatArray:
    outputs = np.asarray(values, dtype=np.float64)
    if outputs.ndim == 1:
        outputs = outputs[:, None]
    if outputs.ndim != 2 or len(outputs) < SMALLEST_SAMPLE:
        raise ValueError(
            f"{name} must hold at least {SMALLEST_SAMPLE} outputs, (m,) or (m, d), but {outputs.shape} was given."
        )
    if not np.all(np.isfinite(outputs)):
        raise ValueError(f"{name} holds values that are not finite: an audit needs outputs as they were released.")
    return outputs
