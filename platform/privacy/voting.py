"""How often a noisy vote names a bad candidate, at most: bounds for both ways to release it.

| symbol   | code        | meaning                                                                    |
|----------|-------------|----------------------------------------------------------------------------|
| γ        | `gap`       | votes by which every good candidate leads every bad one, before noise      |
| σ_S      | `sigma_sum` | std of Gaussian noise on a count: σ√(n_answered/n_min)                     |
| b        | `scale`     | scale of Gumbel noise on a count: 2/ε                                      |
| #bad     | `bad`       | candidates that must not win                                               |
| #good    | `good`      | candidates that may                                                        |
"""

from __future__ import annotations

import math

from scipy.special import expit, ndtr

from dpray.platform.privacy import checks


def vote_failure_bound(gap: float, sigma_sum: float, bad: int) -> float:
    """Bound on the probability that a bad candidate wins a noisy vote: min(1, #bad · Φ(−γ/(√2 σ_S))).

    Union bound over the bad candidates against one good one: a difference of two noisy counts has std √2·σ_S.

    Args:
        gap: γ, votes by which every good candidate leads every bad one.
        sigma_sum: σ_S = σ√(n_answered/n_min), noise std of a count; `GridNoise.std(answered)`.
        bad: number of bad candidates.

    Raises:
        ValueError: the gap is NaN or infinite, σ_S is negative or infinite, or `bad` is not a whole number from 0.
    """
    gap, sigma_sum, bad = _checked(gap, "sigma_sum", sigma_sum, bad)
    if sigma_sum == 0:
        return 0.0 if gap > 0 or bad == 0 else 1.0
    return min(1.0, bad * float(ndtr(-gap / (math.sqrt(2) * sigma_sum))))


def winner_failure_bound(gap: float, scale: float, bad: int, good: int = 1) -> float:
    """Bound on the probability that a released winner is bad: #bad / (#bad + #good · e^(γ/b)).

    Candidate j wins with probability e^(c_j/b) / Σ_i e^(c_i/b). That a bad one does grows with every bad count and
    falls with every good one, so it is largest where all good counts are equal and all bad ones γ below: there it is
    this. The bound is attained, and no union bound.

    Args:
        gap: γ, votes by which every good candidate leads every bad one.
        scale: b, Gumbel scale on a count; `VoteWinner.scale(epsilon)`.
        bad: number of bad candidates.
        good: number of good ones.

    Raises:
        ValueError: the gap is NaN or infinite, the scale is negative or infinite, `bad` is not a whole number from 0,
            or `good` not one from 1.
    """
    gap, scale, bad = _checked(gap, "scale", scale, bad)
    good = checks.integer("good", good, at_least=1)
    if bad == 0:
        return 0.0
    if scale == 0:
        return 0.0 if gap > 0 else 1.0
    return float(expit(math.log(bad / good) - gap / scale))


def _checked(gap: float, name: str, noise: float, bad: int) -> tuple[float, float, int]:
    gap, noise = checks.real("gap", gap), checks.non_negative(name, noise)
    bad = checks.integer("bad", bad, at_least=0)
    if math.isinf(gap) or math.isinf(noise):
        raise ValueError(f"The gap and the noise must be finite, but {gap} and {noise} were given.")
    return gap, noise, bad
