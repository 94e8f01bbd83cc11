"""Ways to choose a candidate from clients' local scores: DP-HYPE's vote, and what it is compared with.

| symbol   | meaning                                                                    | shape  |
|----------|----------------------------------------------------------------------------|--------|
| s        | local scores, higher is better, row i stays with client i; NaN is worst    | (n, p) |
| m_i      | message of client i                                                        | (p,)   |
| S        | Σ m_i plus noise of std σ = Δ'/μ in every coordinate                       | (p,)   |
| Δ        | L2 sensitivity of Σ m_i to replacing one client                            |        |
| n_j      | clients that were given candidate j (subsets), public                      | (p,)   |

| method        | m_i                                                  | Δ              | chosen          |
|---------------|------------------------------------------------------|----------------|-----------------|
| k=5, k=1      | ones at the k best                                   | √(2 min(k, p−k)) | argmax S      |
| winner only   | ones at the k best, at a trusted aggregator          | 1 (L∞)         | argmax S, alone |
| top scores    | the scores of the k best, 0 elsewhere                | √min(2k, p)    | argmax S        |
| all scores    | all scores                                           | √p             | argmax S        |
| subsets       | the score of the one candidate that i was given      | 1              | argmax S_j/n_j  |

"top scores" and "subsets" are the authors' ablations *RawLosses* and *Subsets*. Noise is calibrated by the product's
own `Mechanism.noise` and drawn on its grid, in shares of n clients of which one is taken for a colluder, as in a
cohort: σ_S is σ√(n/(n−1)). It is seeded, so that a table can be made again: NOT PRIVATE, public data only.

The authors' noise, against the sensitivities derived below:

- Votes: σ is 103, 46, 24, 12.5, 4.7 at ε = .1, .25, .5, 1, 3, from 6 to 9 % more than k = 5 asks for.
- RawLosses: the same, and Δ = √(2k) is right there.
- Subsets: σ is 45, 25, 10.7, 5.5, 2.08 on the *mean* of a subset, what Δ = √2 asks for, and more. But a client moves
  one coordinate only, by 1/n_j at most: with one client a candidate (n = p = 100) that is √2 times too much noise, with
  two or three (n = 250) 2.8 to 4.2 times.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from dpray.platform.privacy import gdp
from dpray.platform.privacy.clipping import float_sum_error
from dpray.platform.privacy.mechanisms import Mechanism, TopKVotes, top_k_votes
from dpray.platform.privacy.noise import NoiseSource, counted_noisers, from_grid, to_grid
from dpray.platform.privacy.selection import VoteWinner, noisy_argmax
from dpray.platform.privacy.units import Unit

FloatArray = NDArray[np.float64]
Score = Literal["accuracy", "loss"]

DELTA = 1e-5


@cache
def _mu(epsilon: float) -> float:
    return gdp.mu(epsilon, DELTA)


@cache
def _pure(epsilon: float) -> float:
    """Pure ε that costs an account what ε at δ does."""
    return gdp.pure_epsilon(_mu(epsilon))


@dataclass(frozen=True)
class TopScores(Mechanism):
    """Sum over clients of vectors with at most k entries in [0, 1] that are not zero.

    Sensitivity: let two such vectors have o places in common where neither is zero. They differ by 1 at most in each of
    2k − o places, and there are no more than p of those: Δ = √min(2k, p), attained by k ones against k others for
    2k ≤ p, and approached by ones against numbers close to 0 otherwise.

    *Guarantee.* With noise Δ'/μ on every coordinate the sum is μ-GDP for the unit `client` under replace-one, whatever
    the scores were computed from inside the client.

    Args:
        votes: k.
        candidates: p.
        clients: n, public; it enters through the error of float64 sums.
    """

    name: ClassVar[str] = "top scores"
    votes: int
    candidates: int
    clients: int
    unit: Unit = field(default=Unit.CLIENT, init=False)
    dimension: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dimension", self.candidates)

    @property
    def sensitivity(self) -> float:
        """Δ = √min(2k, p)."""
        return math.sqrt(min(2 * self.votes, self.candidates))

    @property
    def summation_error(self) -> float:
        """A message's norm is √k at most."""
        return math.sqrt(self.votes) * float_sum_error(self.clients, self.candidates)


@dataclass(frozen=True)
class OneScore(Mechanism):
    """Sum over clients of vectors with one entry in [0, 1], at a place that is public and fixed for each client.

    Sensitivity: a client that is replaced keeps its place, so one coordinate moves, by at most 1: Δ = 1. Means over the
    n_j clients of a place are post-processing.

    *Guarantee.* As `TopScores`. Who has which place must not depend on data.

    Args:
        candidates: p.
        clients: n, public.
    """

    name: ClassVar[str] = "one score"
    candidates: int
    clients: int
    unit: Unit = field(default=Unit.CLIENT, init=False)
    dimension: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dimension", self.candidates)

    @property
    def sensitivity(self) -> float:
        """Δ = 1."""
        return 1.0

    @property
    def summation_error(self) -> float:
        """A message's norm is 1 at most."""
        return float_sum_error(self.clients, self.candidates)


def _bounded(scores: FloatArray) -> FloatArray:
    """Scores clipped to [0, 1] before they are sent; a missing one is 0."""
    return np.asarray(np.nan_to_num(np.clip(scores, 0.0, 1.0), nan=0.0))


class Rule(ABC):
    """How clients' scores become a choice.

    Attributes:
        score: what clients judge by, `accuracy` or `loss` on their hold-outs; higher is better for both.
    """

    score: Score = "accuracy"

    @property
    @abstractmethod
    def name(self) -> str:
        """As in the tables."""

    @abstractmethod
    def mechanism(self, clients: int, candidates: int) -> Mechanism:
        """Of the sum of messages."""

    @abstractmethod
    def messages(self, scores: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Row i depends on client i's scores, on `rng` and on what is public.

        Args:
            scores: s, (n, p).
            rng: for ties, and for what is drawn in public.
        """

    def standing(self, total: FloatArray, clients: int) -> FloatArray:
        """What is compared, (p,), from the released sum."""
        return total

    def choose(self, scores: FloatArray, epsilons: Sequence[float], source: NoiseSource, *key: str | int) -> list[int]:
        """Number of the chosen candidate at each ε: the same ballots for all of them, noise of its own for each.

        Args:
            scores: s, (n, p).
            epsilons: of the release, at δ = 1e-5; ∞: without noise.
            source: seeded: the same key gives the same ballots and the same noise.
            key: names the repetition.
        """
        total = self.messages(scores, source.generator(*key, "ballots")).sum(axis=0)
        return [self.winner(total, len(scores), epsilon, source, *key, f"{epsilon:g}") for epsilon in epsilons]

    def winner(self, total: FloatArray, clients: int, epsilon: float, source: NoiseSource, *key: str | int) -> int:
        """Number of the candidate that wins the sum of messages, (p,), with the clients' shares of noise."""
        released = total
        if math.isfinite(epsilon):
            noise = self.mechanism(clients, len(total)).noise(_mu(epsilon), noisers=counted_noisers(clients, 1))
            shares = source.draw(noise, (clients, len(total)), *key)
            released = from_grid(to_grid(total, noise.grid) + shares.sum(axis=0), noise.grid)
        return noisy_argmax(self.standing(released, clients), 0.0, source.generator(*key, "tie"))


@dataclass(frozen=True)
class Votes(Rule):
    """DP-HYPE: ones at the k best, ties broken at random."""

    k: int
    score: Score = "accuracy"

    @property
    def name(self) -> str:
        """See `Rule`."""
        return f"k={self.k}" + (", by loss" if self.score == "loss" else "")

    def mechanism(self, clients: int, candidates: int) -> Mechanism:
        """See `Rule`."""
        return TopKVotes(self.k, candidates)

    def messages(self, scores: FloatArray, rng: np.random.Generator) -> FloatArray:
        """See `Rule`."""
        return np.array([top_k_votes(row, self.k, rng) for row in scores], dtype=np.float64)


@dataclass(frozen=True)
class WinnerOnly(Votes):
    """The same ballots at a trusted aggregator that tells the winner and nothing else: the product's `VoteWinner`.

    Args:
        k: votes of a client.
        pure: it is ε-DP with the ε of the others; else with what their μ buys, so that accounts are charged alike.
    """

    pure: bool = False

    @property
    def name(self) -> str:
        """See `Rule`."""
        return f"winner only, {'pure ε' if self.pure else 'same μ'}"

    def winner(self, total: FloatArray, clients: int, epsilon: float, source: NoiseSource, *key: str | int) -> int:
        """By Gumbel noise on counts that are never told."""
        pure = epsilon if self.pure or math.isinf(epsilon) else _pure(epsilon)
        return noisy_argmax(total, VoteWinner(self.k, len(total)).scale(pure), source.generator(*key))


@dataclass(frozen=True)
class Scores(Rule):
    """The scores of the k best themselves, or all of them with `k=None`; a missing score counts as 0."""

    k: int | None

    @property
    def name(self) -> str:
        """See `Rule`."""
        return "all scores" if self.k is None else "top scores"

    def mechanism(self, clients: int, candidates: int) -> Mechanism:
        """See `Rule`."""
        return TopScores(candidates if self.k is None else self.k, candidates, clients)

    def messages(self, scores: FloatArray, rng: np.random.Generator) -> FloatArray:
        """See `Rule`."""
        known = _bounded(scores)
        if self.k is None:
            return known
        return np.asarray(known * [top_k_votes(row, self.k, rng) for row in scores], dtype=np.float64)


@dataclass(frozen=True)
class Subsets(Rule):
    """Every client trains one candidate only, dealt to it at random; for p ≤ n."""

    @property
    def name(self) -> str:
        """See `Rule`."""
        return "subsets"

    def mechanism(self, clients: int, candidates: int) -> Mechanism:
        """See `Rule`."""
        return OneScore(candidates, clients)

    def messages(self, scores: FloatArray, rng: np.random.Generator) -> FloatArray:
        """See `Rule`.

        Raises:
            ValueError: fewer clients than candidates.
        """
        n, p = scores.shape
        if n < p:
            raise ValueError(f"{n} clients cannot be dealt over {p} candidates: each needs one at least.")
        dealt = rng.permutation(np.arange(n) % p)
        sent = np.zeros((n, p))
        sent[np.arange(n), dealt] = _bounded(scores[np.arange(n), dealt])
        return sent

    def standing(self, total: FloatArray, clients: int) -> FloatArray:
        """S_j/n_j."""
        p = len(total)
        return np.asarray(total / np.bincount(np.arange(clients) % p, minlength=p))


RULES: tuple[Rule, ...] = (
    Votes(5),
    Votes(1),
    Votes(5, "loss"),
    WinnerOnly(5),
    WinnerOnly(5, pure=True),
    Scores(5),
    Scores(None),
    Subsets(),
)
"""All of them, DP-HYPE as in the paper first."""
