"""Sub-sampled releases: accounting by privacy loss distributions, where no finite μ exists.

| symbol | meaning                                                                                         |
|--------|-------------------------------------------------------------------------------------------------|
| C      | bound on the L2 norm of one unit's contribution to a sum; nothing (0) when it is not sampled      |
| Δ      | sensitivity of the sum without sampling, replace-one: Δ = 2C                                     |
| σ      | noise std; σ/Δ is the `noise_multiplier` of an event (a μ-GDP Gaussian has 1/μ)                  |
| q      | sampling probability: each unit is in the sample independently (Poisson)                         |
| H_α    | hockey-stick divergence ∫ (P − αQ)₊; δ(ε) is its supremum over neighbours at α = e^ε             |

**Relation.** Neighbours differ by replacing one unit, as everywhere in dpray. For a Poisson-sampled Gaussian of noise
multiplier s, dp-accounting knows three relations:

* ADD_OR_REMOVE_ONE: N(0, s²) against (1 − q)·N(0, s²) + q·N(1, s²). A neighbour under replace-one is two such steps
  away, so this understates ε, by up to a half.
* REPLACE_SPECIAL: the same pair (a unit replaced by one that contributes nothing). The same understatement.
* REPLACE_ONE: (1 − q)·N(0, s²) + q·N(−1, s²) against (1 − q)·N(0, s²) + q·N(+1, s²): two opposite contributions of norm
  1. The accountant takes s relative to the norm C of *one contribution*, half of what replacing it changes.

Used here is REPLACE_ONE with s = σ/C = 2·noise_multiplier, for unsampled Gaussians too: N(−C, σ²) against N(C, σ²) is
the Gaussian at distance Δ (what ADD_OR_REMOVE_ONE gives for σ/Δ, the accountant's default). It is exact:

**Proposition.** Let ‖x‖, ‖x'‖ ≤ C and let the rest of the sum be common to both. For every α ≥ 0,
P = (1 − q)N(0, σ²I) + qN(x, σ²I) and Q = (1 − q)N(0, σ²I) + qN(x', σ²I), each shifted by the rest, have H_α(P‖Q) ≤
H_α(P*‖Q*), P* and Q* being that pair in one dimension for contributions −C and C.

*Proof.* Who of the rest is sampled is drawn alike on both sides; hockey-stick divergences are jointly convex, so it may
be held fixed and shifted away. Replacing is symmetric and H_α(P‖Q) = 1 − α + α·H_{1/α}(Q‖P), so α ≥ 1 is enough.

1. *Away from what the two share* (Balle, Barthe & Gaboardi 2018, Theorem 2). For α = 1 + q(γ − 1) and β = α/γ,
   H_α(P‖Q) = q·H_γ(N(x) ‖ (1 − β)N(0) + βN(x')), γ ≥ 1, β ∈ [q, 1], an identity. Call the right side q·F(x, x').
2. *Into line.* Put the origin at x. N(x) is then radial, and on each sphere N(0) and N(x') are increasing functions of
   the inner products with −x and with x' − x. t ↦ (p − γt)₊ is convex, and a sum of two functions of given distribution
   is largest in convex order when they increase together: F does not fall when x' is turned about x until x' − x points
   along −x, which puts x' on the line of 0 and x at x − ‖x' − x‖·x/‖x‖. Its coordinate there, ‖x‖ − ‖x' − x‖, is at
   least −‖x'‖ ≥ −C and at most ‖x‖. The directions across the line are the same in all three: one dimension is left,
   with 0 ≤ x ≤ C and −C ≤ x' ≤ x.
3. *Apart.* There p_x/((1 − β)p_0 + βp_{x'}) increases along the line, so F = N(x)(S) − γ(1 − β)N(0)(S) − γβN(x')(S)
   with a half-line S = (t, ∞). On that S, moving x up to C raises the first term and moving x' down to −C lowers the
   last; the supremum over S is no smaller. So F(x, x') ≤ F(C, −C), the value of the pair (P*, Q*) mirrored. ∎

A pair that dominates at every α ≥ 0 composes, adaptively too (Zhu, Dong & Wang 2022, Theorem 10). Under
ADD_OR_REMOVE_ONE no single one of the two directions dominates the other at every α; under REPLACE_ONE the pair is
symmetric and that question does not arise (cf. Lebeda et al. 2024).

**Rounding.** Discretised losses are rounded towards more loss ("connect the dots", pessimistic), cut-off tails count as
infinite loss, and δ is asked 0.1 % stricter than given, which covers the round-off of the Fourier transforms (hence no
δ below 1e-9). ε is too large rather than too small.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, ClassVar

from dpray.platform.privacy import checks, gdp
from dpray.platform.privacy.mechanisms import ClippedSum, Mechanism
from dpray.platform.privacy.noise import GridNoise, calibrate
from dpray.platform.privacy.units import Unit

SMALLEST_DELTA = 1e-9
_STRICTER = 1 - 1e-3
_INTERVAL, _POINTS = 1e-4, 2e5
_LEAST_SEEN = 1e9
"""More noise than this many Δ counts as this much."""
_LARGEST_MU = 30.0
"""Beyond this (ε of about 700) a composition is not computed: ε = ∞."""


@dataclass(frozen=True)
class Gaussian:
    """`count` releases with Gaussian noise, without sampling.

    Attributes:
        noise_multiplier: σ/Δ = 1/μ of each, Δ the true sensitivity under replace-one.
        count: how many, from 1.

    Raises:
        ValueError: the multiplier is not finite and positive, or the count not a whole number from 1.
    """

    noise_multiplier: float
    count: int = 1

    def __post_init__(self) -> None:
        _check(self, noise_multiplier=checks.positive("noise_multiplier", self.noise_multiplier))
        _check(self, count=checks.integer("count", self.count, at_least=1))


@dataclass(frozen=True)
class PoissonGaussian:
    """`count` sums with Gaussian noise over Poisson samples, in which an unsampled unit contributes nothing.

    Attributes:
        noise_multiplier: σ/Δ of each, Δ = 2C the sensitivity *without* sampling; C bounds every contribution's norm.
        sampling_probability: q in (0, 1].
        count: how many, from 1.

    Raises:
        ValueError: as `Gaussian`; the probability is outside (0, 1].
    """

    noise_multiplier: float
    sampling_probability: float
    count: int = 1

    def __post_init__(self) -> None:
        _check(self, noise_multiplier=checks.positive("noise_multiplier", self.noise_multiplier))
        _check(self, sampling_probability=sampling(self.sampling_probability))
        _check(self, count=checks.integer("count", self.count, at_least=1))


Event = Gaussian | PoissonGaussian


@dataclass(frozen=True)
class PoissonSampled(Mechanism):
    """A clipped sum over a Poisson sample: the mechanism and its sampler's probability, charged as one object.

    Sensitivity: a unit contributes a vector of norm C or nothing, so Δ = 2C and the proposition above applies. Other
    mechanisms are not accepted: a ballot of k ones, or an outer product, may be longer than Δ/2.

    *Guarantee.* With the noise of `noise(mu)` on every coordinate the sum is dominated by one
    `PoissonGaussian(1/mu, sampling_probability)` for `unit` under replace-one. The sample must be drawn afresh for
    every release, independently for every unit, and stay secret: neither who is in it nor how many are may be shown,
    and sums are divided by public numbers only (q·n). It has no finite μ: only accounts of kind `pld` can be charged.

    Args:
        mechanism: the sum; its `records` bound the summands of any sample.
        sampling_probability: q in (0, 1].

    Raises:
        ValueError: another mechanism than a `ClippedSum`; the probability is outside (0, 1].
    """

    name: ClassVar[str] = "poisson-sampled"
    mechanism: ClippedSum
    sampling_probability: float
    unit: Unit = field(default=Unit.RECORD, init=False)
    dimension: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.mechanism, ClippedSum):
            raise ValueError(
                f"Only a ClippedSum can be sampled, and a {type(self.mechanism).__name__} was given: the accounting "
                "needs contributions whose norm is at most half of the sensitivity."
            )
        _check(
            self,
            sampling_probability=sampling(self.sampling_probability),
            unit=self.mechanism.unit,
            dimension=self.mechanism.dimension,
        )

    @property
    def sensitivity(self) -> float:
        """Δ = 2C of the sum without sampling; `mu` and `sigma` are those of that sum, too."""
        return self.mechanism.sensitivity

    @property
    def summation_error(self) -> float:
        """That of the sum without sampling."""
        return self.mechanism.summation_error

    def event(self, mu: float) -> PoissonGaussian:
        """What one release with the noise of `noise(mu)` is charged as."""
        return PoissonGaussian(_down(1 / checks.positive("mu", mu)), self.sampling_probability)

    def noise(self, mu: float, *, noisers: int = 1, grid: float | None = None) -> GridNoise:
        """Applied noise with σ = 2C'/μ, C' = C + g√d + e: `mu` is what the sum would cost without sampling.

        Floating point and the grid move a sum with a unit *and* one without it, which Δ' counts for neighbours only
        once: C', not Δ'/2, is how far they are apart.

        Raises:
            ValueError: as `noise.calibrate`.
        """
        inner = self.mechanism
        plain = inner.noise(mu, noisers=noisers, grid=grid)
        error = 2 * inner.summation_error + plain.grid * math.sqrt(inner.dimension)
        return calibrate(
            inner.sensitivity, mu, inner.dimension, noisers=noisers, summation_error=error, grid=plain.grid
        )

    def describe(self) -> dict[str, str | int | float]:
        """Public, JSON-able description: that of the sum, and the probability."""
        inner = self.mechanism.describe()
        return {**inner, "mechanism": f"{self.name} {inner['mechanism']}", "sampling": self.sampling_probability}


def epsilon(events: Iterable[Event], delta: float) -> float:
    """ε (nats) at `delta` of everything in `events` together, in any order and adaptively chosen; rounded up.

    Returns:
        0.0 for no events; ∞ where the composition protects nobody any more (ε in the hundreds), unmeasured.

    Raises:
        ValueError: δ is outside [1e-9, 1).
        RuntimeError: the installed dp-accounting means something else by REPLACE_ONE.
    """
    delta = checks.probability("delta", delta)
    if delta < SMALLEST_DELTA:
        raise ValueError(
            f"Privacy loss distributions are computed for delta from {SMALLEST_DELTA:g}, but {delta:g} was given."
        )
    plain, sampled = 0.0, Counter[tuple[float, float]]()
    for event in events:
        if isinstance(event, Gaussian) or event.sampling_probability == 1:
            plain += event.count * _square(1 / min(event.noise_multiplier, _LEAST_SEEN))
        else:
            sampled[min(event.noise_multiplier, _LEAST_SEEN), event.sampling_probability] += event.count
    return _composed(plain, tuple(sorted((*key, count) for key, count in sampled.items())), delta)


def to_json(event: Event) -> dict[str, str | int | float]:
    """Plain JSON value of an event."""
    if isinstance(event, Gaussian):
        return {"event": "gaussian", "noise_multiplier": event.noise_multiplier, "count": event.count}
    return {
        "event": "poisson gaussian",
        "noise_multiplier": event.noise_multiplier,
        "sampling_probability": event.sampling_probability,
        "count": event.count,
    }


def from_json(value: Mapping[str, Any]) -> Event:
    """Inverse of `to_json`. `ValueError` for anything else."""
    given = dict(value)
    kind = given.pop("event", None)
    made = {"gaussian": Gaussian, "poisson gaussian": PoissonGaussian}.get(kind) if isinstance(kind, str) else None
    try:
        if made is None:
            raise TypeError(f"unknown event {kind!r}")
        event: Event = made(**given)
    except TypeError as error:
        raise ValueError(f"{dict(value)!r} is not an event ({error}).") from None
    return event


def sampling(value: object) -> float:
    """A sampling probability in (0, 1]; `ValueError` otherwise."""
    probability = checks.positive("sampling_probability", value)
    if probability > 1:
        raise ValueError(f"sampling_probability must not exceed 1, but {probability} was given.")
    return probability


@lru_cache(maxsize=256)
def _composed(plain: float, sampled: tuple[tuple[float, float, int], ...], delta: float) -> float:
    """`plain` is Σ 1/multiplier² of the unsampled Gaussians: one Gaussian, exactly."""
    if not plain and not sampled:
        return 0.0
    reach = _reach(plain, sampled)
    if not reach <= _LARGEST_MU:
        return math.inf
    _refuse_other_meaning()
    interval = _INTERVAL * 2 ** max(0, math.ceil(math.log2((reach**2 / 2 + 8 * reach) / _INTERVAL / _POINTS)))
    accountant = _accountant(interval)
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

    if plain:
        accountant.compose(GaussianDpEvent(_down(2 / math.sqrt(plain) * (1 - 2.0**-40))))
    for multiplier, probability, count in sampled:
        event = PoissonSampledDpEvent(probability, GaussianDpEvent(_down(2 * multiplier)))
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta * _STRICTER))


def _reach(plain: float, sampled: tuple[tuple[float, float, int], ...]) -> float:
    """About the μ of the composition (or more), and at least that of any one event: how wide a grid is needed."""
    total, largest = plain, plain
    for multiplier, probability, count in sampled:
        single = _square(1 / multiplier)
        largest = max(largest, single)
        if single <= _LARGEST_MU**2:
            total += count * min(single, 4 * probability**2 * math.expm1(single / 4))
    return math.sqrt(max(total, largest))


def _accountant(interval: float) -> Any:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import PLDAccountant

    return PLDAccountant(NeighboringRelation.REPLACE_ONE, interval)


@cache
def _refuse_other_meaning() -> None:
    """REPLACE_ONE has to double the sensitivity of a Gaussian, or everything here would be understated."""
    from dp_accounting import GaussianDpEvent

    accountant = _accountant(1e-3)
    accountant.compose(GaussianDpEvent(2.0))
    if not math.isclose(float(accountant.get_epsilon(1e-5)), gdp.epsilon(1.0, 1e-5), rel_tol=1e-3):
        raise RuntimeError(
            "The installed dp-accounting measures REPLACE_ONE otherwise than by two opposite contributions, which the "
            "accounting of sampled releases relies on: install dp-accounting 0.6."
        )


def _square(value: float) -> float:
    return value * value  # ∞ where ** would raise


def _down(value: float) -> float:
    return math.nextafter(value, 0.0)


def _check(event: object, **values: object) -> None:
    for name, value in values.items():
        object.__setattr__(event, name, value)
