"""How the clients' vote leaves the cohort: as noisy counts of all candidates, or as the winner alone.

| release  | what is seen                        | mechanism    | aggregator                | noise on a count     |
|----------|-------------------------------------|--------------|---------------------------|----------------------|
| `votes`  | S, (p,): the paper's                | `TopKVotes`  | as the regime says        | Gaussian, √(2k)/μ    |
| `winner` | argmax_j (c_j + G_j), one index     | `VoteWinner` | trusted: regime `central` | Gumbel, scale b = 2/ε |

**The trade.** A winner needs no δ, and its noise depends neither on k nor on p. Stated alone, at the same ε, it is far
better where ε is small: n = 100 clients, p = 100, five good candidates 40 votes ahead, ε = .25: a good one wins with
probability .88, against .32 by votes with k = 5 at δ = 10⁻⁵. That takes a trusted aggregator and leaves no counts to
plot. In an account that pays for other releases too it is *not* better: pure ε costs μ = 2Φ⁻¹(e^ε/(1 + e^ε)), some
1.25·ε, which is four times what votes at (ε, 10⁻⁵) cost there. For the same share of μ² a count has Gumbel noise of std
3.2/μ, or Gaussian noise of √(2k)/μ: .15 against .32 above. There a winner pays for k above 5 only.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dpray.platform.privacy.mechanisms import Regime, TopKVotes, VoteWinner
from dpray.searchers.errors import SearchError

if TYPE_CHECKING:
    from dpray.platform.cohort import Cohort, Votes
    from dpray.platform.privacy.ledger import Attempt


@dataclass(frozen=True)
class VoteRelease(ABC):
    """One way to release a vote of a cohort's clients.

    Attributes:
        name: of the release in the ledger: (label, name, step 0).
        cohort, votes_per_client, regime: whose vote, k, who adds noise.
    """

    name: ClassVar[str]
    cohort: Cohort
    votes_per_client: int
    regime: Regime

    @abstractmethod
    def mechanism(self, p: int) -> TopKVotes | VoteWinner:
        """The release of a vote on p candidates; ValueError for a k that does not fit."""

    @abstractmethod
    def compute(self, attempt: Attempt, ballots: Votes) -> NDArray[Any]:
        """Hold the vote: what is stored."""

    @abstractmethod
    def counts(self, value: NDArray[Any], p: int) -> NDArray[np.float64]:
        """S, (p,), of a stored value."""

    @abstractmethod
    def best(self, value: NDArray[Any], p: int) -> int:
        """Index of the winner, of a stored value."""

    @abstractmethod
    def spread(self, p: int, mu: float) -> float:
        """Std of the noise in the difference of two counts if all clients answer, in votes."""

    def sigma(self, p: int, mu: float) -> float:
        """Std of Gaussian noise in S if exactly n_min clients answer, in votes."""
        raise self._without("Gaussian noise")

    def sigma_votes(self, p: int, mu: float) -> float:
        """The same if all clients answer."""
        raise self._without("Gaussian noise")

    def epsilon(self, p: int, mu: float) -> float:
        """Pure ε of the release."""
        raise self._without("pure epsilon")

    def scale(self, p: int, mu: float) -> float:
        """Gumbel scale on a count, in votes."""
        raise self._without("Gumbel noise")

    def _without(self, what: str) -> SearchError:
        return SearchError(f"This vote has no {what}: it was built with release={self.name!r}.")


@dataclass(frozen=True)
class NoisyCounts(VoteRelease):
    """S = Σ ṽ_i: counts of all candidates under Gaussian noise, by clients or server as the regime says."""

    name: ClassVar[str] = "votes"

    def mechanism(self, p: int) -> TopKVotes:
        """Sum of ballots with k ones among p."""
        return TopKVotes(self.votes_per_client, p)

    def compute(self, attempt: Attempt, ballots: Votes) -> NDArray[Any]:
        """S = Σ ṽ_i over the clients that answer. Ballots and noise are made at the clients."""
        mechanism = self.mechanism(ballots.candidates)
        packed: NDArray[Any] = self.cohort.sum(attempt, ballots, mechanism, self.regime).pack()
        return packed

    def counts(self, value: NDArray[Any], p: int) -> NDArray[np.float64]:
        """The value without the numbers packed behind it."""
        return np.asarray(value[:p], dtype=np.float64)

    def best(self, value: NDArray[Any], p: int) -> int:
        """Argmax S."""
        return int(np.argmax(self.counts(value, p)))

    def sigma(self, p: int, mu: float) -> float:
        """√(2k)/μ."""
        return float(self.cohort.noise_for(self.mechanism(p), mu, self.regime).sigma)

    def sigma_votes(self, p: int, mu: float) -> float:
        """σ_S = σ√(n/n_min)."""
        noise = self.cohort.noise_for(self.mechanism(p), mu, self.regime)
        return float(noise.std(1 if self.regime is Regime.CENTRAL else len(self.cohort.clients)))

    def spread(self, p: int, mu: float) -> float:
        """√2·σ_S."""
        return math.sqrt(2) * self.sigma_votes(p, mu)


@dataclass(frozen=True)
class WinnerAlone(VoteRelease):
    """The index of the candidate with the most votes under Gumbel noise; counts stay inside the cohort's sum.

    Raises:
        ValueError: another regime than central, or a cohort whose sums are masked.
    """

    name: ClassVar[str] = "winner"

    def __post_init__(self) -> None:
        if self.regime is not Regime.CENTRAL:
            raise ValueError(
                f"release='winner' needs an aggregator that is trusted with the counts, regime='central', and "
                f"{str(self.regime)!r} was given. Where the aggregator must not see them, release='votes'."
            )
        if self.cohort.masked:
            raise ValueError(
                "release='winner' needs an aggregator that is trusted with the counts, and this cohort's sums are "
                "masked from it. Give release='votes', or a cohort with secure_sum='trusted'."
            )

    def mechanism(self, p: int) -> VoteWinner:
        """Index of the most votes, of ballots with k ones among p."""
        return VoteWinner(self.votes_per_client, p)

    def compute(self, attempt: Attempt, ballots: Votes) -> NDArray[Any]:
        """The index and nothing else, (1,) int64."""
        index = self.cohort.winner(attempt, ballots, self.mechanism(ballots.candidates))
        return np.array([index], dtype=np.int64)

    def counts(self, value: NDArray[Any], p: int) -> NDArray[np.float64]:
        """There are none outside."""
        raise SearchError(
            "release='winner' gives out the index of the winner and nothing else: there are no noisy votes to look at. "
            "Take best_candidate, or search with release='votes'."
        )

    def best(self, value: NDArray[Any], p: int) -> int:
        """The value."""
        return int(value[0])

    def epsilon(self, p: int, mu: float) -> float:
        """The largest whose exact μ is within what is spent; ∞ without noise."""
        return self.mechanism(p).epsilon_of(mu)

    def scale(self, p: int, mu: float) -> float:
        """2/ε; 0 without noise."""
        return self.mechanism(p).scale(self.epsilon(p, mu))

    def spread(self, p: int, mu: float) -> float:
        """Std of a logistic variable, the difference of two Gumbels: πb/√3."""
        return math.pi * self.scale(p, mu) / math.sqrt(3)


def release_of(name: str, cohort: Cohort, votes_per_client: int, regime: Regime | None) -> VoteRelease:
    """The way of this name; without a regime, `distributed` for votes and `central`, the only one, for a winner.

    Raises:
        ValueError: there is none of the name, or it does not go with the regime or the cohort.
    """
    ways: dict[str, tuple[type[VoteRelease], Regime]] = {
        NoisyCounts.name: (NoisyCounts, Regime.DISTRIBUTED),
        WinnerAlone.name: (WinnerAlone, Regime.CENTRAL),
    }
    if name not in ways:
        raise ValueError(f"release is 'votes' (noisy counts) or 'winner' (the index alone); {name!r} was given.")
    way, usual = ways[name]
    return way(cohort, votes_per_client, usual if regime is None else Regime(regime))
