"""Poisson sampling: the sampler and its accounting as one object, so that neither is ever used without the other.

| symbol | meaning                                                                              |
|--------|--------------------------------------------------------------------------------------|
| q      | `rate`: every unit is in a sample with probability q, independently of everything    |
| C      | bound on the norm of a unit's contribution; nothing (0) where it is not sampled      |
| T      | releases, each over a sample of its own                                              |
| μ      | what one of them would cost without sampling: σ = 2C/μ                               |
| q·n    | expected size of a sample, public: what sums are divided by                          |

**Relation.** Replace-one, as everywhere: the pair that dominates, and the proof, stand in `pld`. Removing or adding one
unit is dominated by the same pair (a contribution of 0 lies in the ball of radius C, and the proposition there holds
for any two points of it), so the stronger relation is the one that is stated.

**The coin.** `draw` compares a 53-bit uniform number with ⌊q·2⁵³⌋/2⁵³ = q' ≤ q. Sampling at q' is dominated by sampling
at q: P_{q'} = (1 − q'/q)·N(0) + (q'/q)·P_q and the same for Q, hockey-stick divergences are jointly convex, and that of
N(0) from itself is the smallest there is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from dpray.platform.privacy import checks, gdp, pld
from dpray.platform.privacy.budget import Budget, Quanta, floor_quanta, upper_mu
from dpray.platform.privacy.mechanisms import ClippedSum, Mechanism
from dpray.platform.privacy.pld import PoissonSampled
from dpray.platform.privacy.units import Unit

SMALLEST_RATE = 1e-9
_BITS = 2.0**53
_DIGITS = 30
"""Binary digits of a calibrated charge: few enough that the ledger's rounding of sampled charges leaves it alone."""
_CLOSE = 2e-3
_TRIES = 24
_STRIDE = 0.15


@dataclass(frozen=True)
class PoissonSampling:
    """Samples of records or of clients, drawn where the data is.

    *Guarantee.* Releases of `mechanism(sum)` over samples drawn by `draw`, afresh for every release, with randomness
    that nobody else has, cost what `epsilon` says, for `unit` under replace-one. That rests on the sample being secret:
    neither who is in it nor how many are may be seen, sums are divided by q·n, and a unit that is not in it must look
    like one that is. They have no finite μ: only accounts of kind `pld` can be charged.

    Args:
        rate: q, in [1e-9, 1).
        unit: `record` or `client`: what is sampled, and whose replacement is hidden.

    Raises:
        ValueError: a rate outside [1e-9, 1), or the unit `user`.
    """

    rate: float
    unit: Unit = Unit.RECORD

    def __post_init__(self) -> None:
        rate, unit = pld.sampling(self.rate), Unit(self.unit)
        if not SMALLEST_RATE <= rate < 1:
            raise ValueError(
                f"A sampling rate is at least {SMALLEST_RATE:g} and below 1, and {rate:g} was given: to train on "
                "everybody, leave sampling out."
            )
        if unit is Unit.USER:
            raise ValueError("Records or clients are sampled; users belong to searches with a curator.")
        object.__setattr__(self, "rate", rate)
        object.__setattr__(self, "unit", unit)

    def draw(self, units: int, generator: np.random.Generator) -> NDArray[np.bool_]:
        """Which of some units are in a sample, (units,); the generator must be as good as that of noise."""
        return np.asarray(generator.random(units) < math.floor(self.rate * _BITS) / _BITS)

    def mechanism(self, inner: Mechanism) -> PoissonSampled:
        """The clipped sum over a sample.

        Raises:
            ValueError: another mechanism than a `ClippedSum`, or one that protects another unit.
        """
        sampled = PoissonSampled(cast(ClippedSum, inner), self.rate)  # which refuses any other
        if sampled.unit is not self.unit:
            raise ValueError(
                f"{self.unit.capitalize()}s are sampled, and the sum protects the unit `{sampled.unit}`: one is "
                "amplified by sampling the other no further. Sample the unit that is protected."
            )
        return sampled

    def epsilon(self, quanta: Quanta, steps: int, delta: float) -> float:
        """ε at `delta` of `steps` releases of `quanta` each (μ² without sampling), rounded up."""
        event = pld.PoissonGaussian(math.nextafter(1 / upper_mu(quanta), 0.0), self.rate, steps)
        return pld.epsilon([event], delta)

    def calibrate(self, budget: Budget, steps: int) -> Quanta:
        """Quanta of `steps` releases together, μ² without sampling: their ε is at most the budget's, and close to it.

        Within .2 %. Takes some seconds, or some tens of them where sums are hardly noisier than one contribution.

        Raises:
            ValueError: a budget without limit; not a whole number of steps.
        """
        steps = checks.integer("steps", steps, at_least=1)
        if budget.quanta is None:
            raise ValueError("A budget without limit calibrates nothing: give a finite ε, or train without sampling.")
        low, high, at_low, at_high = self._bracket(budget, steps)
        for _ in range(_TRIES):
            if at_low >= -_CLOSE:
                break
            # Regula falsi towards a point just below the target, kept off the ends.
            share = (-_CLOSE / 4 - at_low) / (at_high - at_low) if math.isfinite(at_high) else 0.5
            middle = low + min(max(share, 0.02), 0.98) * (high - low)
            at_middle = self._excess(middle, steps, budget)
            if at_middle <= 0:
                low, at_low = middle, at_middle
            else:
                high, at_high = middle, at_middle
        return _short(math.exp(low)) * steps

    def _bracket(self, budget: Budget, steps: int) -> tuple[float, float, float, float]:
        """log μ below and above the budget, and `_excess` at both."""
        whole = gdp.mu(budget.epsilon, budget.delta)
        # Without sampling they would cost the budget to the quantum, and sampling never adds to that.
        least = math.log(whole / math.sqrt(steps)) - 2.0**-40
        # T·4q²(e^{μ²/4} − 1) is about the μ² of T sampled releases.
        guess = math.log(2 * math.sqrt(math.log1p(whole**2 / (4 * self.rate**2 * steps))))
        low = high = max(guess, least)
        at_low = at_high = self._excess(low, steps, budget)
        while at_high <= 0:
            low, at_low = high, at_high
            high += _STRIDE
            at_high = self._excess(high, steps, budget)
        while at_low > 0:
            high, at_high = low, at_low
            low -= _STRIDE
            at_low = self._excess(low, steps, budget)
        return low, high, at_low, at_high

    def _excess(self, log_mu: float, steps: int, budget: Budget) -> float:
        """log ε of releases of this μ, over log of the budget's ε: 0 where it is met."""
        epsilon = self.epsilon(_short(math.exp(log_mu)), steps, budget.delta)
        return math.log(epsilon / budget.epsilon) if epsilon > 0 else -math.inf

    def describe(self) -> dict[str, str | float]:
        """Public, JSON-able description."""
        return {"sampling": self.rate, "sampled": str(self.unit)}


def _short(mu: float) -> Quanta:
    """μ² in quanta, rounded down to `_DIGITS` binary digits."""
    quanta = floor_quanta(mu)
    shift = max(0, quanta.bit_length() - _DIGITS)
    return quanta >> shift << shift
