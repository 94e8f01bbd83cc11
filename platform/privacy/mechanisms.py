"""Mechanisms: what is released, how far one unit can move it, and the noise that hides that.

| symbol  | meaning                                                                                        |
|---------|------------------------------------------------------------------------------------------------|
| Δ       | ideal L2 sensitivity under replace-one: max ‖f(D) − f(D')‖ over D, D' that differ in one unit    |
| Δ'      | Δ as computed in floating point and rounded to a grid (see `noise`)                              |
| B, C    | clipping bounds of a user's row and of a record's or client's vector, L2                         |
| n, p, k | users or summands; candidates; votes per client                                                |
| μ, σ    | GDP parameter and noise std: `sigma(mu)` = Δ/μ is ideal, `noise(mu).sigma` = Δ'/μ is applied     |

Gaussian releases stand here, those of an index alone in `selection`, what a vote's noise does to it in `voting`.

Assumptions of every *Guarantee* below: neighbours differ by replacing one unit; counts and schema are public; who
holds which record is given; the unit's own values are clipped as `clipping` does it, bad ones contributing zero; timing
is out of scope; the loss of a process, host or network does not depend on data; populations are disjoint; the float64
sampler is ideal.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from dpray.platform.privacy import checks, stated
from dpray.platform.privacy.clipping import (
    UNIT_ROUNDOFF,
    clip_rows,
    clipped_covariance,
    float_sum_error,
    pack_symmetric,
    symmetric_noise,
    top_k_votes,
    unpack_symmetric,
)
from dpray.platform.privacy.noise import GridNoise, calibrate
from dpray.platform.privacy.selection import NoisyMax, Selection, VoteWinner
from dpray.platform.privacy.units import Regime, Unit
from dpray.platform.privacy.voting import vote_failure_bound, winner_failure_bound

__all__ = [
    "ClippedMean",
    "ClippedSum",
    "FeatureCovariance",
    "Mechanism",
    "NoisyMax",
    "Regime",
    "Selection",
    "TopKVotes",
    "Unit",
    "VoteWinner",
    "clip_rows",
    "clipped_covariance",
    "pack_symmetric",
    "symmetric_noise",
    "top_k_votes",
    "unpack_symmetric",
    "vote_failure_bound",
    "winner_failure_bound",
]


class Mechanism(ABC):
    """A Gaussian release with a stated sensitivity. Public and immutable: what it holds goes into request digests."""

    name: ClassVar[str]
    integers: ClassVar[bool] = False
    """Whether the value is made of integers, so that a grid does not move it."""
    unit: Unit
    dimension: int

    @property
    @abstractmethod
    def sensitivity(self) -> float:
        """Ideal L2 sensitivity Δ under replace-one."""

    @property
    def summation_error(self) -> float:
        """How much further than Δ neighbours can be apart because sums are floating point, L2."""
        return 0.0

    def sigma(self, mu: float) -> float:
        """Ideal noise std Δ/μ, rounded up; 0 for an infinite μ (not private)."""
        mu = checks.positive("mu", mu, infinite=True)
        return 0.0 if math.isinf(mu) else stated.up(self.sensitivity / mu)

    def mu(self, sigma: float) -> float:
        """GDP parameter Δ/σ of the ideal release with noise std `sigma`, rounded up; ∞ for σ = 0."""
        sigma = checks.non_negative("sigma", sigma)
        return math.inf if sigma == 0 else stated.up(self.sensitivity / sigma)

    def noise(self, mu: float, *, noisers: int = 1, grid: float | None = None) -> GridNoise:
        """Applied noise for a μ-GDP release: σ = Δ'/μ on a grid, over `noisers` independent shares.

        Raises:
            ValueError: as `noise.calibrate`.
        """
        return calibrate(
            self.sensitivity,
            mu,
            self.dimension,
            noisers=noisers,
            summation_error=self.summation_error,
            integers=self.integers,
            grid=grid,
        )

    def describe(self) -> dict[str, str | int | float]:
        """Public, JSON-able description: the mechanism's name and parameters."""
        return {"mechanism": self.name, **stated.parameters(self)}


@dataclass(frozen=True)
class ClippedMean(Mechanism):
    """Mean over users of rows clipped to L2 norm B: (1/n) Σ clip(g_i). DP-GIBO's release.

    Sensitivity: replacing a user replaces one clipped row, ‖clip(g) − clip(g')‖ ≤ 2B, and n is public: Δ = 2B/n.

    *Guarantee.* With noise Δ'/μ on every coordinate the mean is μ-GDP for the unit `user` under replace-one. Protected
    are the users whose rows are averaged; data the rows' models were trained on is not, nor is n.

    Args:
        clip: B, in the unit of a row.
        users: n, public.
        dimension: d, length of a row.

    Raises:
        ValueError: a bound is not finite and positive, or a count is not a whole number from 1.
    """

    name: ClassVar[str] = "clipped mean"
    clip: float
    users: int
    dimension: int
    unit: Unit = field(default=Unit.USER, init=False)

    def __post_init__(self) -> None:
        stated.keep(
            self,
            clip=checks.positive("clip", self.clip),
            users=checks.integer("users", self.users, at_least=1),
            dimension=checks.integer("dimension", self.dimension, at_least=1),
        )

    @property
    def sensitivity(self) -> float:
        """Δ = 2B/n."""
        return 2 * self.clip / self.users

    @property
    def summation_error(self) -> float:
        """`float_sum_error` of n rows, over n: in units of Δ about n²·2⁻⁵³, which is 1e-4 for a million users."""
        return self.clip * float_sum_error(self.users, self.dimension) / self.users


@dataclass(frozen=True)
class ClippedSum(Mechanism):
    """Sum of vectors clipped to L2 norm C: record gradients (unit record) or whole client updates (unit client).

    Sensitivity: replacing a unit replaces one clipped vector, ‖clip(x) − clip(x')‖ ≤ 2C: Δ = 2C. The number of summands
    is public and does not change. A record that is clipped in the global norm over all parameters counts once.

    *Guarantee.* With noise Δ'/μ on every coordinate the sum is μ-GDP for `unit` under replace-one. For unit `record`
    each vector must depend on its record and public values only: a scaler, class weight or batch statistic fitted on
    a client's records breaks 2C. For unit `client` the *whole* update is clipped. Not protected: counts, and who took
    part.

    Args:
        clip: C, in the unit of a summand.
        unit: record or client.
        dimension: d.
        records: public upper bound on the number of summands; it only enters through the error of float64 sums.
        relative_error: how far, in units of Δ, the task's own arithmetic may move neighbours beyond Δ (float32 modules
            state 1e-4 and clip to C/(1 + 1e-4)); 0 for float64 throughout.

    Raises:
        ValueError: the bound is not finite and positive, a count is not a whole number from 1, the unit is `user`, or
            the relative error is not in [0, 1).
    """

    name: ClassVar[str] = "clipped sum"
    clip: float
    unit: Unit
    dimension: int
    records: int
    relative_error: float = 0.0

    def __post_init__(self) -> None:
        unit = Unit(self.unit)
        if unit is Unit.USER:
            raise ValueError("A clipped sum protects a record or a client; for users of a search use ClippedMean.")
        error = checks.non_negative("relative_error", self.relative_error)
        if error >= 1:
            raise ValueError(f"relative_error must be below 1, but {error} was given.")
        stated.keep(
            self,
            clip=checks.positive("clip", self.clip),
            unit=unit,
            dimension=checks.integer("dimension", self.dimension, at_least=1),
            records=checks.integer("records", self.records, at_least=1),
            relative_error=error,
        )

    @property
    def sensitivity(self) -> float:
        """Δ = 2C."""
        return 2 * self.clip

    @property
    def summation_error(self) -> float:
        """`float_sum_error` of the summands, plus the task's own margin."""
        return self.clip * float_sum_error(self.records, self.dimension) + self.sensitivity * self.relative_error


@dataclass(frozen=True)
class TopKVotes(Mechanism):
    """Sum over clients of 0/1 ballots of length p with exactly k ones each. DP-HYPE's release.

    Sensitivity: two ballots differ most where as few ones as possible coincide. They differ in 2·min(k, p − k) places
    by 1, so Δ = √(2·min(k, p − k)) ≤ √(2k). Ballots are integers, so grid and sums are exact and Δ' = Δ.

    *Guarantee.* With noise Δ/μ on every coordinate the sum of ballots, hence its argmax and every plot of it, is μ-GDP
    for the unit `client` under replace-one, whatever the candidates were trained on inside the client. A client must
    always send exactly k ones, a random ballot if its scores fail; who took part is not protected.

    Args:
        votes: k, ones on a ballot.
        candidates: p, public and chosen without data.

    Raises:
        ValueError: k or p is not a whole number from 1, or k ≥ p (such a vote says nothing).
    """

    name: ClassVar[str] = "top-k votes"
    integers: ClassVar[bool] = True
    votes: int
    candidates: int
    unit: Unit = field(default=Unit.CLIENT, init=False)
    dimension: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        votes, candidates = stated.ballot(self.votes, self.candidates)
        stated.keep(self, votes=votes, candidates=candidates, dimension=candidates)

    @property
    def sensitivity(self) -> float:
        """Δ = √(2·min(k, p − k))."""
        return math.sqrt(2 * min(self.votes, self.candidates - self.votes))


@dataclass(frozen=True)
class FeatureCovariance(Mechanism):
    """Sum of outer products Σ x̃x̃ᵀ of feature rows clipped to L2 norm C. DP-FedFC's release.

    The symmetric f × f matrix is released as its isometric packing (`pack_symmetric`: off-diagonal entries times √2, so
    that L2 norm = Frobenius norm), d = f(f + 1)/2. Noise of std s there is the noise (A + Aᵀ)/2, A_ij ~ N(0, s²), on
    the matrix: variance s² on the diagonal, s²/2 beside it, mirrored.

    Sensitivity: ‖xxᵀ − yyᵀ‖_F² = ‖x‖⁴ + ‖y‖⁴ − 2(x·y)² ≤ 2C⁴, attained by orthogonal x, y: Δ = √2·C².

    *Guarantee.* With packed noise Δ'/μ the matrix is μ-GDP for the unit `record` under replace-one, and so is every
    function of it (projection to PSD, inverse). Its μ composes with that of the gradients; it is a release of its own.
    Features must come from public constants and the record alone.

    Args:
        clip: C, bound of a feature row (bias column included).
        features: f, width of a row.
        records: public upper bound on the number of rows; it only enters through the error of float64 sums.

    Raises:
        ValueError: the bound is not finite and positive, or a count is not a whole number from 1.
    """

    name: ClassVar[str] = "feature covariance"
    clip: float
    features: int
    records: int
    unit: Unit = field(default=Unit.RECORD, init=False)
    dimension: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        features = checks.integer("features", self.features, at_least=1)
        stated.keep(
            self,
            clip=checks.positive("clip", self.clip),
            features=features,
            records=checks.integer("records", self.records, at_least=1),
            dimension=features * (features + 1) // 2,
        )

    @property
    def sensitivity(self) -> float:
        """Δ = √2·C², Frobenius."""
        return math.sqrt(2) * self.clip**2

    @property
    def summation_error(self) -> float:
        """`float_sum_error` of outer products, whose norms are at most C²; clipping enters each of them twice."""
        return self.clip**2 * (float_sum_error(self.records, self.dimension) + 4 * (self.features + 16) * UNIT_ROUNDOFF)
