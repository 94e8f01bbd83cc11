"""Budgets, and exact arithmetic on what is composed: μ² as an integer number of quanta.

| symbol | meaning                                                                      |
|--------|------------------------------------------------------------------------------|
| μ      | GDP parameter of a release or of several; μ_total² = Σ μ_i²                   |
| q      | quanta: an integer, the spend μ² = q · 2⁻⁶⁰                                   |
| μ_B    | the budget's μ: the largest with which μ-GDP implies (ε, δ)-DP                |

Sums of floats refuse the last planned step in about half of all cases; integers add up exactly. A budget is rounded
down to whole quanta, a charge up, and the μ handed to a mechanism down (its noise up): charged ≥ spent ≥ revealed.
What is shown as spent is rounded up, what is shown as left down.
`None` in the place of quanta means an infinite spend: not private.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from dpray.platform.privacy import checks, gdp
from dpray.platform.privacy.figures import significant

Quanta = int
"""A spend μ² in units of 2⁻⁶⁰."""

QUANTA_BITS = 60
_UNIT = 1 << QUANTA_BITS


def _exact(mu: float) -> Fraction:
    return Fraction(checks.positive("mu", mu)) ** 2 * _UNIT


def floor_quanta(mu: float) -> Quanta:
    """μ² in quanta, rounded down: for budgets. `ValueError` unless μ is finite and positive."""
    return math.floor(_exact(mu))


def ceil_quanta(mu: float) -> Quanta:
    """μ² in quanta, rounded up: for charges. `ValueError` unless μ is finite and positive."""
    return math.ceil(_exact(mu))


def to_mu(quanta: Quanta) -> float:
    """Largest float64 μ with μ² ≤ q · 2⁻⁶⁰, exactly: for the noise a charge pays for. `ValueError` if q < 1."""
    quanta = checks.integer("quanta", quanta, at_least=1)
    # ⌊√(q·4^shift)⌋ has at least 54 bits; the top 53 of them are the root rounded down.
    shift = max(0, 55 - quanta.bit_length() // 2)
    root = math.isqrt(quanta << 2 * shift)
    excess = root.bit_length() - 53
    return math.ldexp(root >> excess, excess - shift - QUANTA_BITS // 2)


def upper_mu(quanta: Quanta) -> float:
    """Smallest float64 μ with μ² ≥ q · 2⁻⁶⁰, exactly, 0.0 for nothing: for what is shown as spent.

    `ValueError` if q < 0.
    """
    if checks.integer("quanta", quanta, at_least=0) == 0:
        return 0.0
    mu = to_mu(quanta)
    return mu if Fraction(mu) ** 2 * _UNIT == quanta else math.nextafter(mu, math.inf)


def part_of(quanta: Quanta, whole: Quanta, *, up: bool = True) -> float:
    """quanta / whole as the next float64 above (what is spent), or below (what is left), where it is none itself."""
    ratio = quanta / whole
    exact = Fraction(quanta, whole)
    if up and ratio < exact:
        return math.nextafter(ratio, math.inf)
    return math.nextafter(ratio, -math.inf) if not up and ratio > exact else ratio


def split(quanta: Quanta, parts: int) -> tuple[Quanta, ...]:
    """`quanta` in `parts` integers that differ by one at most, the larger ones first, and add up exactly.

    Raises:
        ValueError: parts < 1, or fewer quanta than parts (a step would spend nothing, which no mechanism can honour).
    """
    quanta, parts = checks.integer("quanta", quanta, at_least=1), checks.integer("parts", parts, at_least=1)
    if quanta < parts:
        raise ValueError(f"{quanta} quanta cannot be split over {parts} releases: give fewer releases or more budget.")
    each, rest = divmod(quanta, parts)
    return (each + 1,) * rest + (each,) * (parts - rest)


def share(quanta: Quanta, fraction: float) -> Quanta:
    """`fraction` of `quanta`, rounded down; what is left is `quanta - share(…)`.

    Raises:
        ValueError: the fraction is outside (0, 1], or so small that not one quantum is left.
    """
    quanta, fraction = checks.integer("quanta", quanta, at_least=1), checks.positive("fraction", fraction)
    if fraction > 1:
        raise ValueError(f"A share of a budget must not exceed 1, but {fraction} was given.")
    part = math.floor(Fraction(fraction) * quanta)
    if part < 1:
        raise ValueError(f"The fraction {fraction} of {quanta} quanta is nothing: give a larger share or budget.")
    return part


@dataclass(frozen=True)
class Budget:
    """What an account may spend over its lifetime, as (ε, δ); kept as μ_B² in quanta, rounded down.

    *Guarantee.* Releases whose quanta add up to at most `quanta` are together (ε, δ)-DP under replace-one for the
    account's unit, also when each is chosen after seeing the earlier ones (Smith & Thakurta 2022; Koskela et al.
    2023), provided the budget was fixed before the first of them. A budget raised later is a new claim.

    Attributes:
        epsilon: nats, above 0; ∞ only together with `non_private`.
        delta: in (0, 1).
        non_private: an account that may be charged without limit. It protects nobody, and everything says so.

    Raises:
        ValueError: ε is zero, negative, NaN or not a number, or infinite without `non_private` (or the reverse); δ is
            outside (0, 1); the budget is less than one quantum.
    """

    epsilon: float
    delta: float
    non_private: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.non_private, bool):
            raise ValueError(f"non_private must be True or False, but {self.non_private!r} was given.")
        object.__setattr__(self, "epsilon", checks.positive("epsilon", self.epsilon, infinite=True))
        object.__setattr__(self, "delta", checks.probability("delta", self.delta))
        if math.isinf(self.epsilon) and not self.non_private:
            raise ValueError("An infinite epsilon protects nobody: say so with Budget(..., non_private=True).")
        if self.non_private and not math.isinf(self.epsilon):
            raise ValueError(
                f"A budget of epsilon {self.epsilon} is private: leave out non_private, or give epsilon=math.inf."
            )
        if self.quanta == 0:
            raise ValueError(
                f"A budget of epsilon {self.epsilon} at delta {self.delta} is too small to spend anything."
            )

    @cached_property
    def quanta(self) -> Quanta | None:
        """μ_B² in quanta, rounded down; None if not private."""
        return None if self.non_private else floor_quanta(gdp.mu(self.epsilon, self.delta))

    @property
    def mu(self) -> float:
        """μ_B, rounded down; ∞ if not private."""
        return math.inf if self.quanta is None else to_mu(self.quanta)

    def __str__(self) -> str:
        name = "ε=∞ NOT PRIVATE" if self.non_private else f"ε={significant(self.epsilon, 6)}"
        return f"{name}, δ={significant(self.delta, 6)}"


def remaining_epsilon(budget: Budget, spent: Quanta) -> float:
    """ε (nats) that the unspent part of a budget is worth on its own, rounded down: ε(√(μ_B² − μ²)) at its δ.

    ε does not subtract: this is not `budget.epsilon` less the ε spent, and shares of μ² are what adds up.

    Returns:
        the budget's ε when nothing is spent, 0.0 when nothing is left; ∞ for a budget that is not private.

    Raises:
        ValueError: `spent` is negative or not a whole number.
    """
    spent = checks.integer("spent", spent, at_least=0)
    if budget.quanta is None:
        return math.inf
    if spent == 0:
        return budget.epsilon
    if spent >= budget.quanta:
        return 0.0
    return min(gdp.lower_epsilon(to_mu(budget.quanta - spent), budget.delta), budget.epsilon)
