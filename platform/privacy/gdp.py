"""Gaussian differential privacy, exact: pure functions between μ and (ε, δ).

| symbol | meaning                                                                                   |
|--------|-------------------------------------------------------------------------------------------|
| μ      | GDP parameter; a Gaussian release with L2 sensitivity Δ and noise std σ has μ = Δ/σ         |
| ε, δ   | approximate differential privacy; ε in nats                                                |
| a, b   | −ε/μ + μ/2 and −ε/μ − μ/2                                                                  |
| Φ      | standard normal distribution function                                                      |

    δ(ε) = Φ(a) − e^ε Φ(b)                        (Dong, Roth & Su 2022, corollary 1; Balle & Wang 2018)
    μ_total² = Σ μ_i²                             (Dong, Roth & Su 2022, corollary 2)

Because b² − a² = 2ε, the second term is ½·e^(−a²/2)·erfcx(−b/√2): neither e^ε nor Φ(b) is ever formed, and δ keeps
its relative accuracy down to the smallest float64 and, as a logarithm, far below.

*Guarantee.* Results are rounded to the safe side: `delta(mu, epsilon(mu, delta)) <= delta` and
`delta(mu(epsilon, delta), epsilon) <= delta`, with a margin for the rounding of the evaluation itself. The statements
hold for releases that are μ-GDP (or post-processing of such) under replace-one; nothing here holds for sub-sampled
mechanisms, which have no finite μ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray
from scipy.special import erfcinv, erfcx, erfinv, expit, log_ndtr, ndtr, ndtri_exp

from dpray.platform.privacy import checks

FloatArray = NDArray[np.float64]

_SQRT2 = math.sqrt(2.0)
_NODES, _WEIGHTS = (0.5 * part for part in np.polynomial.legendre.leggauss(24))
_NODES = _NODES + 0.5


def log_delta(mu: float, epsilon: float) -> float:
    """Natural logarithm of the smallest δ for which μ-GDP implies (ε, δ)-DP.

    Args:
        mu: GDP parameter, in [0, ∞].
        epsilon: nats, in [0, ∞].

    Returns:
        log δ ≤ 0; −∞ where δ is zero.

    Raises:
        ValueError: an argument is negative, NaN or not a number.
    """
    mu, epsilon = checks.non_negative("mu", mu), checks.non_negative("epsilon", epsilon)
    if mu == 0 or (math.isinf(epsilon) and not math.isinf(mu)):
        return -math.inf
    if math.isinf(mu):
        return 0.0
    ratio = epsilon / mu
    if math.isinf(ratio):
        return -math.inf
    a, width = mu / 2 - ratio, mu / _SQRT2
    low = -a / _SQRT2
    # δ = ½ e^(−a²/2) [erfcx(low) − erfcx(low + width)], each branch where it does not cancel.
    if width <= 1:
        return _log_times(-a * a / 2, _small_difference(low, width))
    if a <= 0:
        return _log_times(-a * a / 2, float(erfcx(low) - erfcx(low + width)))
    return math.log(float(ndtr(a)) - 0.5 * math.exp(-a * a / 2) * float(erfcx(low + width)))


def _log_times(exponent: float, difference: float) -> float:
    return min(exponent + math.log(difference) - math.log(2), 0.0) if difference > 0 else -math.inf


def _small_difference(low: float, width: float) -> float:
    """erfcx(low) − erfcx(low + width) for a narrow interval, as the integral of −erfcx'(x) = 2/√π − 2x·erfcx(x)."""
    x = low + width * _NODES
    # The difference cancels like 1/(2x²) as x grows; there its asymptotic series does not.
    with np.errstate(over="ignore", invalid="ignore"):  # beyond 1e154 the slope is zero
        slope = np.where(x < 12, 2 / math.sqrt(math.pi) - 2 * x * erfcx(x), _slope_series(np.maximum(x, 12)))
    return float(width * np.dot(_WEIGHTS, slope))


def _slope_series(x: FloatArray) -> FloatArray:
    """2/√π · (y − 3y² + 3·5y³ − …) with y = 1/(2x²); 13 terms give full accuracy from x = 12 on."""
    y = 1 / (2 * x * x)
    series = np.ones_like(y)
    for odd in range(27, 1, -2):
        series = 1 - odd * y * series
    return 2 / math.sqrt(math.pi) * y * series


def delta(mu: float, epsilon: float) -> float:
    """Smallest δ for which μ-GDP implies (ε, δ)-DP: Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2).

    Args:
        mu: GDP parameter, in [0, ∞].
        epsilon: nats, in [0, ∞].

    Returns:
        δ in [0, 1].

    Raises:
        ValueError: an argument is negative, NaN or not a number.
    """
    return math.exp(log_delta(mu, epsilon))


def epsilon(mu: float, delta: float) -> float:
    """Smallest ε (nats) for which μ-GDP implies (ε, δ)-DP, rounded up.

    Args:
        mu: GDP parameter, in [0, ∞].
        delta: in (0, 1).

    Returns:
        ε ≥ 0 with `gdp.delta(mu, ε) <= delta`; ∞ for an infinite μ.

    Raises:
        ValueError: μ is negative, NaN or not a number; δ is outside (0, 1).
    """
    mu, target = checks.non_negative("mu", mu), _target(delta, mu)
    high = _beyond(mu, target)
    return high if high in (0.0, math.inf) else _bisect(lambda value: log_delta(mu, value) <= target, high, 0.0)


def lower_epsilon(mu: float, delta: float) -> float:
    """`epsilon`, rounded down: `gdp.delta(mu, ε) >= delta` for what is returned, unless that is 0.

    For what is left of a budget, which must not be shown as more. No guarantee is stated with it.
    """
    mu, target = checks.non_negative("mu", mu), _target(delta, mu, lower=True)
    high = _beyond(mu, target)
    return high if high in (0.0, math.inf) else _bisect(lambda value: log_delta(mu, value) >= target, 0.0, high)


def _beyond(mu: float, target: float) -> float:
    """An ε at which log δ is at most the target: 0 if it is there, ∞ if it is nowhere below the largest float."""
    if math.isinf(mu):
        return math.inf
    if log_delta(mu, 0.0) <= target:
        return 0.0
    high = max(mu, mu * mu / 2)
    while math.isfinite(high) and log_delta(mu, high) > target:
        high *= 2
    return high


def mu(epsilon: float, delta: float) -> float:
    """Largest μ for which μ-GDP implies (ε, δ)-DP, rounded down.

    Args:
        epsilon: nats, in [0, ∞].
        delta: in (0, 1).

    Returns:
        μ > 0 with `gdp.delta(μ, epsilon) <= delta`; ∞ for an infinite ε.

    Raises:
        ValueError: ε is negative, NaN or not a number; δ is outside (0, 1).
    """
    epsilon = checks.non_negative("epsilon", epsilon)
    if math.isinf(epsilon):
        _target(delta, 1.0)
        return math.inf
    high = 1.0
    while log_delta(high, epsilon) <= _target(delta, high):
        high *= 2
    low = high / 2
    while log_delta(low, epsilon) > _target(delta, low):
        low /= 2
    target = _target(delta, high)
    return _bisect(lambda value: log_delta(value, epsilon) <= target, safe=low, unsafe=high)


def _target(delta: float, mu: float, *, lower: bool = False) -> float:
    """Logarithm of δ less a margin for the rounding of `log_delta`, whose `a` carries an error that grows with μ.

    `lower`: more by the margin, for an ε rounded down.
    """
    margin = min(1e-12 * max(1.0, mu), 0.5) if math.isfinite(mu) else 0.5
    return math.log(checks.probability("delta", delta)) + (margin if lower else -margin)


def _bisect(accepts: Callable[[float], bool], safe: float, unsafe: float) -> float:
    """The accepted number next to the border between `safe` (accepted) and `unsafe` (not), to the last bits."""
    while True:
        middle = safe + (unsafe - safe) / 2
        if middle in {safe, unsafe} or abs(unsafe - safe) <= 4e-16 * abs(safe):
            return safe
        if accepts(middle):
            safe = middle
        else:
            unsafe = middle


def compose(mus: Iterable[float]) -> float:
    """μ of several releases together: √(Σ μ_i²); 0 for none, ∞ as soon as one is not private.

    Budgets are not kept with this (float sums refuse the last planned step half of the time) but in the integer quanta
    of `budget`; this is for plans and reports.

    Raises:
        ValueError: a μ is negative, NaN or not a number.
    """
    return math.hypot(*(checks.non_negative("mu", each) for each in mus))


def mu_from_pure(epsilon: float) -> float:
    """μ of a pure ε-DP release: 2Φ⁻¹(e^ε/(1 + e^ε)), rounded up.

    *Guarantee.* Every ε-DP mechanism is μ-GDP with this μ, and with no smaller one that depends on ε only: its
    trade-off curve lies above the two lines of slope −e^±ε, which the Gaussian curve touches where they cross
    (Dong, Roth & Su 2022, propositions 3 and 10). The zCDP number ε²/8 does **not** give a μ.

    Args:
        epsilon: nats, in (0, ∞].

    Raises:
        ValueError: ε is zero, negative, NaN or not a number.
    """
    epsilon = checks.positive("epsilon", epsilon, infinite=True)
    if math.isinf(epsilon):
        return math.inf
    if epsilon <= 1:
        # 1 − tanh(ε/2) = 2/(1 + e^ε); near ½ the quantile cancels, the error function's inverse does not.
        result = 2 * _SQRT2 * float(erfinv(math.tanh(epsilon / 2)))
    elif epsilon <= 700:
        result = 2 * _SQRT2 * float(erfcinv(2 * expit(-epsilon)))
    else:
        result = -2 * float(ndtri_exp(-epsilon))
    return result * (1 + 2.0**-45)


def pure_epsilon(mu: float) -> float:
    """Largest ε whose pure ε-DP release costs no more than μ: log(Φ(μ/2)/Φ(−μ/2)), the inverse of `mu_from_pure`.

    Args:
        mu: GDP parameter, in (0, ∞].

    Returns:
        ε > 0 (nats), rounded down: `mu_from_pure(ε) <= mu`; ∞ for an infinite μ.

    Raises:
        ValueError: μ is zero, negative, NaN or not a number; or so small that no ε is left.
    """
    mu = checks.positive("mu", mu, infinite=True)
    if math.isinf(mu):
        return math.inf
    exact = 2 * math.atanh(math.erf(mu / (2 * _SQRT2))) if mu < 1 else float(log_ndtr(mu / 2) - log_ndtr(-mu / 2))
    safe = exact * (1 - 2.0**-44)
    while safe > 0 and mu_from_pure(safe) > mu:
        safe *= 1 - 2.0**-44
    return checks.positive("The pure epsilon of this mu", safe)
