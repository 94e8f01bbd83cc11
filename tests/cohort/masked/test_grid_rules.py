"""The grid of shared noise, for votes and for gradients: relative to one share, never eating it, in a ring that holds.

| rule                                   | where it is kept           |
|----------------------------------------|----------------------------|
| g ≤ min(σ_share, Δ/√d)/2¹⁰             | `noise.calibrate`          |
| σ_share/g < 8 is refused               | `noise.calibrate`          |
| residual δ ≤ d·n·e^(−π²(σ_share/g)²)   | `GridNoise.residual_delta` |
| 2^m > 2·(B + 12·σ_share·√n)/g + 2n     | `masked.ring`              |
"""

import math
from dataclasses import replace

import numpy as np
import pytest

from dpray.platform.cohort.errors import CohortError
from dpray.platform.cohort.masked.ring import decode, encode, largest_sum, ring_bits
from dpray.platform.cohort.queries import GradientSum, Terms, Votes
from dpray.platform.privacy.mechanisms import ClippedSum, TopKVotes, Unit

CLIP, MU = 0.5, 0.3
TERMS = Terms(dimension=650, relative_error=0.0, clients=100_000, records=50_000_000)
RELEASES = {
    "votes": (Votes("search", 100, 5), TopKVotes(5, 100), 100_000.0),
    "gradients": (
        GradientSum(np.zeros(650), CLIP),
        ClippedSum(CLIP, Unit.RECORD, dimension=650, records=50_000_000),
        50_000_000 * CLIP,
    ),
}
"""Query, mechanism, and the largest sum without noise: everybody for one candidate, every record along one axis."""


@pytest.fixture(params=RELEASES)
def release(request):
    return RELEASES[request.param]


@pytest.mark.parametrize("n_min", [2, 95, 100_000])
def test_the_grid_is_relative_to_one_clients_share(release, n_min):
    _, mechanism, _ = release
    noise = mechanism.noise(MU, noisers=n_min)
    finest = min(noise.share, mechanism.sensitivity / math.sqrt(mechanism.dimension)) / 2**10
    assert noise.share == pytest.approx(noise.sigma / math.sqrt(n_min))
    assert math.log2(noise.grid).is_integer()
    assert noise.grid <= finest * (1 + 1e-2) < 2.1 * noise.grid  # the rule has the ideal share, Δ/μ/√n
    assert noise.sigma >= mechanism.sensitivity / MU


def test_a_share_of_less_than_eight_steps_is_refused_and_the_residual_of_more_is_stated(release):
    _, mechanism, _ = release
    n, d = 100_000, mechanism.dimension
    share = mechanism.noise(MU, noisers=n).share
    coarsest = 2.0 ** math.floor(math.log2(share / 8))
    with pytest.raises(ValueError, match="at least 8 are needed"):
        mechanism.noise(MU, noisers=n, grid=4 * coarsest)
    noise = mechanism.noise(MU, noisers=n, grid=coarsest)
    ratio = noise.share / noise.grid
    assert ratio >= 8
    assert noise.residual_delta <= d * n * math.exp(-((math.pi * 8) ** 2)) * (1 + 1e-9)
    assert noise.residual_delta == pytest.approx(d * n * math.exp(-((math.pi * ratio) ** 2)), abs=1e-300)


def test_the_largest_sum_is_exact_in_the_ring_and_wraps_in_the_next_smaller_one(release):
    """All n answer at their extreme, noise 12 standard deviations out on either side."""
    query, mechanism, extreme = release
    noise = mechanism.noise(MU, noisers=95_000)
    assert query.largest(TERMS) == extreme
    largest = largest_sum(query.largest(TERMS), noise.share, noise.grid, TERMS.clients)
    assert largest >= (extreme + 12 * noise.std(TERMS.clients)) / noise.grid
    bits = ring_bits(largest)
    assert bits == 64
    for sign in (1, -1):
        parts = sign * np.array([[largest // 3], [largest // 3], [largest - 2 * (largest // 3)]])
        assert decode(sum(encode(part, bits) for part in parts), bits)[0] == sign * largest
        assert decode(sum(encode(part, 32) for part in parts), 32)[0] != sign * largest


def test_a_grid_too_fine_for_every_ring_is_refused_from_public_numbers(release):
    query, mechanism, _ = release
    noise = mechanism.noise(MU, noisers=95_000, grid=2.0**-48)
    most = replace(TERMS, clients=10**6, records=10**9)
    with pytest.raises(CohortError, match="coarser grid"):
        ring_bits(largest_sum(query.largest(most), noise.share, noise.grid, most.clients))
