"""Selections: the index of the best candidate is released, and nothing else. Pure ε-DP by Gumbel noise, not Gaussian.

| symbol | code          | meaning                                                                             |
|--------|---------------|-------------------------------------------------------------------------------------|
| s_j    | `scores`      | score of candidate j, higher is better                                              |
| Δ      | `sensitivity` | most by which replacing one unit moves any score (L∞)                               |
| ε      | `epsilon`     | pure ε of the release, nats                                                         |
| μ      | `mu_of`       | 2Φ⁻¹(e^ε/(1 + e^ε)): what it costs an account                                       |
| b      | `scale`       | 2Δ/ε: scale of the Gumbel noise G_j on every score, of std πb/√6                    |

**Why 2Δ/ε.** The index argmax_j (s_j + G_j) is j with probability P(j) = e^(s_j/b) / Σ_i e^(s_i/b): the exponential
mechanism (McSherry & Talwar 2007). Let a replaced unit move the scores by δ_j, |δ_j| ≤ Δ. Then

    log P'(j)/P(j) = δ_j/b − log Σ_i P(i) e^(δ_i/b),

and the sum is a mean of the e^(δ_i/b), so the whole lies within ±(max δ − min δ)/b ≤ 2Δ/b = ε, for any number of
candidates. The 2 is needed wherever a unit can raise one score while it lowers another: the bound is approached by a
candidate whose score rises by Δ while those that hold nearly all probability lose Δ.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from dpray.platform.privacy import checks, gdp, stated
from dpray.platform.privacy.units import Unit


class Selection(ABC):
    """A release of the index of the best of several candidates by report-noisy-max. Public and immutable."""

    name: ClassVar[str]
    unit: Unit
    candidates: int

    @property
    @abstractmethod
    def sensitivity(self) -> float:
        """Δ: most by which replacing one unit moves any score."""

    def scale(self, epsilon: float) -> float:
        """Gumbel scale 2Δ/ε, rounded up; 0 for an infinite ε (not private)."""
        epsilon = checks.positive("epsilon", epsilon, infinite=True)
        return 0.0 if math.isinf(epsilon) else stated.up(2 * self.sensitivity / epsilon)

    def mu_of(self, epsilon: float) -> float:
        """GDP parameter of the ε-DP release, exact: `gdp.mu_from_pure`."""
        return gdp.mu_from_pure(epsilon)

    def epsilon_of(self, mu: float) -> float:
        """Largest pure ε that costs no more than μ, the inverse of `mu_of`: `gdp.pure_epsilon`."""
        return gdp.pure_epsilon(mu)

    def describe(self) -> dict[str, str | int | float]:
        """Public, JSON-able description: the mechanism's name and parameters."""
        return {"mechanism": self.name, **stated.parameters(self)}


@dataclass(frozen=True)
class NoisyMax(Selection):
    """Report-noisy-max over candidates by mean user score in [0, c], with Gumbel noise. Pure ε-DP, not Gaussian.

    Sensitivity: replacing a user moves every mean score by at most c/n: Δ = c/n, scale 2c/(nε).

    *Guarantee.* The index of the winner, and nothing else, is ε-DP for the unit `user` under replace-one, and enters an
    account as μ = 2Φ⁻¹(e^ε/(1 + e^ε)). The noisy scores themselves must not be shown. Candidates are drawn without
    data, and models trained on other people's data are charged where they were trained.

    Args:
        bound: c, largest score.
        users: n, public.
        candidates: number of candidates.

    Raises:
        ValueError: the bound is not finite and positive, or a count is not a whole number from 1.
    """

    name: ClassVar[str] = "noisy max"
    bound: float
    users: int
    candidates: int
    unit: Unit = field(default=Unit.USER, init=False)

    def __post_init__(self) -> None:
        bound = checks.positive("bound", self.bound)
        if not 1e-100 <= bound <= 1e100:
            raise ValueError(f"The bound of a score must lie between 1e-100 and 1e100, but {bound} was given: rescale.")
        stated.keep(
            self,
            bound=bound,
            users=checks.integer("users", self.users, at_least=1),
            candidates=checks.integer("candidates", self.candidates, at_least=1),
        )

    @property
    def sensitivity(self) -> float:
        """Δ = c/n."""
        return self.bound / self.users


@dataclass(frozen=True)
class VoteWinner(Selection):
    """Index of the candidate with the most votes, of ballots with exactly k ones among p, with Gumbel noise on counts.

    Sensitivity: replacing a client replaces one ballot of zeros and ones by another, so every count moves by at most 1,
    some upwards and as many downwards: Δ = 1 and the scale is 2/ε, whatever k and p are. Counts are integers and exact.

    *Guarantee.* The index of the winner, and nothing else, is ε-DP for the unit `client` under replace-one, whatever
    the candidates were trained on inside the client, and enters an account as μ = 2Φ⁻¹(e^ε/(1 + e^ε)). The counts meet
    at an aggregator, who is trusted with them: against it nothing is promised. Neither counts nor noise may be shown.
    A client must always send exactly k ones, a random ballot if its scores fail; who took part is not protected.

    Args:
        votes: k, ones on a ballot.
        candidates: p, public and chosen without data.

    Raises:
        ValueError: k or p is not a whole number from 1, or k ≥ p (such a vote says nothing).
    """

    name: ClassVar[str] = "vote winner"
    votes: int
    candidates: int
    unit: Unit = field(default=Unit.CLIENT, init=False)

    def __post_init__(self) -> None:
        votes, candidates = stated.ballot(self.votes, self.candidates)
        stated.keep(self, votes=votes, candidates=candidates)

    @property
    def sensitivity(self) -> float:
        """Δ = 1."""
        return 1.0

    @property
    def dimension(self) -> int:
        """p: length of the sum of ballots, which stays with the aggregator."""
        return self.candidates


def noisy_argmax(scores: ArrayLike, scale: float, generator: np.random.Generator) -> int:
    """argmax_j (s_j + G_j), G_j independent Gumbel of this scale; ties are broken at random.

    G = −b·log E with E a standard exponential in float64. Its support is finite: a lead of more than some 36 scales is
    never overcome, where an ideal one would be with probability below e⁻³⁶.

    *Guarantee.* With integer-exact scores and the scale of a `Selection`, ε-DP for ideal Gumbel noise; without noise
    (scale 0) none.

    Args:
        scores: (p,) finite, higher is better.
        scale: b ≥ 0, in units of a score.
        generator: of an unseeded `NoiseSource`.
    """
    values = np.asarray(scores, dtype=np.float64)
    if scale > 0:
        with np.errstate(divide="ignore"):
            values = values - scale * np.log(generator.standard_exponential(len(values)))
    best = np.flatnonzero(values == values.max())
    return int(best[0] if len(best) == 1 else generator.choice(best))
