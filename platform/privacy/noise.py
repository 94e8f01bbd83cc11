"""Gaussian noise that survives floating point: values and noise on one grid, and randomness nobody can predict.

| symbol   | code       | meaning                                                                       |
|----------|------------|-------------------------------------------------------------------------------|
| g        | `grid`     | spacing of the grid, a power of two; values and noise are integers times g     |
| Δ, Δ'    |            | L2 sensitivity of the exact value; of the value as computed and rounded        |
| σ        | `sigma`    | noise std of the whole release, applied: Δ'/μ                                  |
| n        | `noisers`  | how many parties add noise                                                     |
| σ_share  | `share`    | std that one of them adds: σ/√n                                                |
| d        |            | dimension of the release                                                       |

**Why a grid.** A float64 sum x + z shows in its last bits which x it came from (Mironov 2012). Here x is first put on
g·ℤ, and the noise is g·round(z/g), z ~ N(0, σ²). On the grid round(x + z) = x + round(z): the release is the ideal
Gaussian release, rounded, hence post-processing of it, and the set of possible outputs does not depend on the data.
Everything after the rounding is int64 and exact.

**Why Δ'.** Let x, x' be exact values of neighbours, ‖x − x'‖ ≤ Δ. Computed in floating point they are off by at most
e/2 each (e is the *summation error* the mechanism states), and rounding to the grid moves each by at most g/2 per
coordinate, g√d/2 in L2. So the integers that receive noise are at most Δ' = Δ + g√d + e apart, and σ = Δ'/μ gives
μ-GDP exactly. With several noisers each rounds its own part, but only one part differs between neighbours, so the
bound is the same. Values that are integers already (votes) lie on every grid with g ≤ 1: there Δ' = Δ + e.

**Several noisers.** g·Σ round(z_i/g) is post-processing of the ideal Σ z_i up to an aliasing error: given Σ z_i, the
fractional parts of z_i/g would have to be uniform; their leading Fourier coefficients are at most e^(−π²(σ_share/g)²),
n of them per coordinate. The total variation is therefore at most d·n·e^(−π²(σ_share/g)²), `residual_delta`; a release
that is (ε, δ)-DP without it is (ε, δ + (1 + e^ε)·residual)-DP with it. At σ_share/g = 8 that is d·n·10⁻²⁷⁴, and less is
refused. One noiser has none.
"""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from randomgen import AESCounter

from dpray.platform.privacy import checks

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

ONE_NOISER_BITS = 20
"""With one noiser, g ≤ min(σ, Δ/√d) / 2²⁰."""
SHARED_BITS = 10
"""With several, g ≤ min(σ_share, Δ/√d) / 2¹⁰, unless a ring asks for a coarser grid."""
COARSEST = 8
"""σ_share/g below this is refused: rounding would begin to eat the noise."""
_LARGEST_STD = 2.0**56
_LARGEST_VALUE = 2.0**62
_RANGE = 1e100


@dataclass(frozen=True)
class GridNoise:
    """Calibrated noise on a grid; made by `calibrate`. All standard deviations are in the units of the value.

    Attributes:
        sigma: std of the whole release when exactly `noisers` parties add a share: Δ'/μ, rounded up; 0 is not private.
        share: std that one party adds, σ/√noisers.
        grid: spacing g, a power of two.
        noisers: how many parties are counted on. More may answer; fewer must be refused.
        residual_delta: total variation between the release and post-processing of an ideal one.
    """

    sigma: float
    share: float
    grid: float
    noisers: int
    residual_delta: float

    @property
    def private(self) -> bool:
        """Whether any noise is added."""
        return self.sigma > 0

    def std(self, answered: int) -> float:
        """Noise std of the release when `answered` parties added a share: σ√(answered/noisers).

        Raises:
            ValueError: fewer answered than were counted on; the sum would hold too little noise.
        """
        answered = checks.integer("answered", answered, at_least=1)
        if answered < self.noisers:
            raise ValueError(
                f"The noise counts on {self.noisers} parties, but {answered} answered: their shares are too little "
                f"noise for the release. Refuse it, or calibrate for fewer."
            )
        return self.share * math.sqrt(answered)


def calibrate(
    sensitivity: float,
    mu: float,
    dimension: int,
    *,
    noisers: int = 1,
    summation_error: float = 0.0,
    integers: bool = False,
    grid: float | None = None,
) -> GridNoise:
    """Grid and applied noise std for a μ-GDP release: σ = Δ'/μ, Δ' = Δ + g√d + summation error.

    Args:
        sensitivity: Δ, L2, of the exact value under replace-one.
        mu: GDP parameter the release may cost; ∞ means no noise and no privacy.
        dimension: d, number of coordinates.
        noisers: parties that add a share each; their shares together are the noise.
        summation_error: how much further than Δ neighbours can be apart because sums are floating point, L2.
        integers: True if the value is made of integers by construction, so that putting it on the grid is exact.
        grid: a coarser spacing than the default, where a ring of limited size asks for it; a power of two.

    Raises:
        ValueError: an argument is not what it must be; the given grid is not a power of two, coarser than
            σ_share/8, or coarser than the integers; or so much noise that 64-bit integers cannot hold it.
    """
    sensitivity, mu = checks.positive("sensitivity", sensitivity), checks.positive("mu", mu, infinite=True)
    dimension = checks.integer("dimension", dimension, at_least=1)
    noisers = checks.integer("noisers", noisers, at_least=1)
    error = checks.non_negative("summation_error", summation_error)
    ideal = sensitivity / mu
    if not (1 / _RANGE <= sensitivity <= _RANGE and error <= _RANGE and (ideal == 0 or 1 / _RANGE <= ideal <= _RANGE)):
        raise ValueError(
            f"Sensitivity {sensitivity}, summation error {error} and noise {ideal} must lie between 1e-100 and 1e100: "
            f"rescale the value."
        )
    if grid is None:
        grid = _default_grid(sensitivity, math.inf if ideal == 0 else ideal / math.sqrt(noisers), dimension, noisers)
    else:
        grid = _power_of_two(grid)
    if integers and grid > 1:
        raise ValueError(f"Integers lie on grids of spacing 1 or finer, but a grid of {grid} was given.")
    rounding = 0.0 if integers else grid * math.sqrt(dimension)
    # The factor covers the rounding of this expression itself: Δ', the quotient and the root are rounded up together.
    sigma = (sensitivity + rounding + error) / mu * (1 + 2.0**-50)
    share = sigma if noisers == 1 else sigma / math.sqrt(noisers) * (1 + 2.0**-50)
    if sigma > 0:
        _refuse_bad_ratio(share / grid, sigma / grid, noisers)
    return GridNoise(sigma, share, grid, noisers, _aliasing(share / grid, dimension, noisers))


def _default_grid(sensitivity: float, share: float, dimension: int, noisers: int) -> float:
    finest = min(share, sensitivity / math.sqrt(dimension))
    _, exponent = math.frexp(finest)
    return math.ldexp(1.0, exponent - 1 - (ONE_NOISER_BITS if noisers == 1 else SHARED_BITS))


def _power_of_two(grid: float) -> float:
    grid = checks.positive("grid", grid)
    if math.frexp(grid)[0] != 0.5:
        raise ValueError(f"The grid's spacing must be a power of two, but {grid} was given.")
    return grid


def _refuse_bad_ratio(share: float, sigma: float, noisers: int) -> None:
    if share < COARSEST:
        raise ValueError(
            f"Each of {noisers} shares of the noise is only {share:.3g} grid steps wide, and at least {COARSEST} are "
            f"needed: rounding would remove noise. Use a finer grid, fewer noisers or a smaller mu."
        )
    if sigma > _LARGEST_STD:
        raise ValueError(
            f"The noise is {sigma:.3g} grid steps wide, too much for 64-bit integers: mu is too small for this "
            f"dimension. Spend more on the release, or give a coarser grid."
        )


def _aliasing(ratio: float, dimension: int, noisers: int) -> float:
    if noisers == 1 or ratio == 0:
        return 0.0
    return min(dimension * noisers * math.exp(-((math.pi * ratio) ** 2)), 1.0)


def counted_noisers(quorum: int, colluders: int) -> int:
    """n_min: parties whose noise is counted on, max(quorum − colluders, 1).

    Whoever takes part knows its own share and can subtract it from the released sum, so at least one party is taken for
    a colluder. Where that would leave none, each party's share is the whole noise.

    Args:
        quorum: fewest parties that answer.
        colluders: parties that may pool what they know, at least 1.

    Raises:
        ValueError: a number is not a whole number from 1.
    """
    quorum = checks.integer("quorum", quorum, at_least=1)
    return max(quorum - checks.integer("colluders", colluders, at_least=1), 1)


def to_grid(x: ArrayLike, grid: float) -> IntArray:
    """Nearest grid points of `x`, as int64 multiples of `grid`; same shape.

    Raises:
        ValueError: a value is not finite (bad records contribute zero *before* this), or beyond 2⁶² grid steps.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        steps = np.rint(np.asarray(x, dtype=np.float64) / _power_of_two(grid))
        fits = np.abs(steps) <= _LARGEST_VALUE
    if not np.all(fits):  # NaN compares false
        raise ValueError(
            f"{np.size(steps) - np.count_nonzero(fits)} of {np.size(steps)} values are not finite or too large for a "
            f"grid of {grid}: clip them, and let records with non-finite values contribute zero."
        )
    return np.asarray(steps, dtype=np.int64)


def from_grid(k: IntArray, grid: float) -> FloatArray:
    """Grid points as float64 values, k·g; same shape. Post-processing: beyond 2⁵³ steps the float is the nearest."""
    return np.asarray(k).astype(np.float64) * _power_of_two(grid)


def draw(noise: GridNoise, shape: int | tuple[int, ...], generator: np.random.Generator) -> IntArray:
    """One noiser's share in grid steps: round(z/g), z ~ N(0, σ_share²), independent over `shape`; int64.

    *Guarantee.* Added to a value on the grid of a mechanism with the calibrated Δ', this is μ-GDP if `noisers` parties
    do it with independent generators of an unseeded `NoiseSource`, assuming that the float64 sampler is ideal. Nothing
    is promised for a seeded source, for fewer parties, or for a second draw under the same release.
    """
    z = generator.standard_normal(shape, dtype=np.float64)
    z *= noise.share / noise.grid
    return np.asarray(np.rint(z, out=z), dtype=np.int64)


SEEDED = "NOT PRIVATE (seeded noise)"
"""Stamp of every release whose noise is seeded."""


class NoiseSource:
    """Where the randomness of noise, and of nothing else, comes from.

    Without a seed every generator is AES-128 in counter mode under a fresh key of the operating system. With one, for
    simulation and tests, each generator depends on (seed, key) only, through BLAKE2b and not through a running stream:
    a resumed run draws what an uninterrupted one would, and two clients or two rounds never share noise.

    *Guarantee.* Unseeded: generators are independent of each other and of everything else, up to the security of AES.
    Seeded: **not private**; whoever knows the seed can subtract the noise. `reproducible` must be shown wherever the
    release is. The seed is never part of `repr`, and a source does not belong in a saved state.

    Args:
        seed: a whole number from 0, or None.
        exact: draw noise with OpenDP's exact discrete Gaussian (`exact`), slow and without assumptions about floats.

    Raises:
        ValueError: the seed is negative, a float, a boolean or not a number; or exact noise with a seed.
        ImportError: exact noise without OpenDP.
    """

    def __init__(self, seed: int | None = None, *, exact: bool = False) -> None:
        self._seed = None if seed is None else checks.integer("seed", seed, at_least=0)
        if exact and self.reproducible:
            raise ValueError("Exact noise cannot be seeded: leave out the seed, or give exact=False.")
        self._exact = exact
        if exact:
            from dpray.platform.privacy.exact import load_opendp

            load_opendp()

    @property
    def reproducible(self) -> bool:
        """True for a seeded source, whose releases are not private."""
        return self._seed is not None

    def generator(self, *key: str | int) -> np.random.Generator:
        """A fresh generator: for the release and party named by `key` if seeded, else from the operating system.

        Raises:
            ValueError: a part of the key is neither text nor a whole number, or a seeded source gets no key.
        """
        encoded = b"".join(_encode(part) for part in key)
        if self._seed is None:
            secret = os.urandom(16)
        elif not key:
            raise ValueError("A seeded noise source needs a key (run, step, client), or all noise would be the same.")
        else:
            secret = hashlib.blake2b(_encode(self._seed) + encoded, digest_size=16, person=b"dpray noise").digest()
        return np.random.Generator(AESCounter(key=int.from_bytes(secret, "little")))

    def draw(self, noise: GridNoise, shape: int | tuple[int, ...], *key: str | int) -> IntArray:
        """One noiser's share in grid steps for the release and party named by `key`: `draw`, exact if so chosen."""
        if not self._exact:
            return draw(noise, shape, self.generator(*key))
        from dpray.platform.privacy.exact import draw_exact

        return draw_exact(noise, shape)

    def __repr__(self) -> str:
        exact = "exact=True" if self._exact else ""
        return "NoiseSource(seed=…, NOT PRIVATE)" if self.reproducible else f"NoiseSource({exact})"


def _encode(part: str | int) -> bytes:
    """Type and length first, so that ("ab", "c"), ("a", "bc") and ("1", 1) are different keys."""
    if isinstance(part, str):
        kind, body = b"s", part.encode()
    else:
        number = checks.integer("A part of a noise key that is not text", part, at_least=-(2**4096))
        kind, body = b"i", number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return kind + len(body).to_bytes(8, "little") + body
