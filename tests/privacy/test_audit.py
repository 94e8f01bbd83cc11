"""Audits: a true claim stands, half the noise is caught, and bad input is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dpray.platform.privacy import gdp
from dpray.platform.privacy.audit import audit
from dpray.platform.privacy.mechanisms import ClippedSum, TopKVotes, Unit, clip_rows
from dpray.platform.privacy.noise import NoiseSource, draw, from_grid, to_grid

CONFIDENCE = 1 - 1e-6
"""The chance that a test below refutes a true claim is 1e-6."""
RELEASES = 40_000


def releases(
    mechanism, value: np.ndarray, mu: float, *, noisers: int = 1, shares: int | None = None, factor: float = 1
):
    """Outputs (m, d) of the mechanism on one data set, each with the shares that were added and a noise factor."""
    noise, source = mechanism.noise(mu, noisers=noisers), NoiseSource()
    shape = (RELEASES, mechanism.dimension)
    steps = sum(draw(noise, shape, source.generator()) for _ in range(noisers if shares is None else shares))
    return from_grid(to_grid(value, noise.grid) + np.rint(factor * steps).astype(np.int64), noise.grid)


def worst_sums() -> tuple[ClippedSum, np.ndarray, np.ndarray]:
    """A clipped sum on the worst neighbours: one record replaced by its opposite, both far too long."""
    rows = np.random.default_rng(0).standard_normal((20, 5)) * 7
    other = rows.copy()
    other[0] = -1e9 * rows[0]
    mechanism = ClippedSum(1.0, Unit.RECORD, dimension=5, records=20)
    return mechanism, clip_rows(rows, 1.0).sum(axis=0), clip_rows(other, 1.0).sum(axis=0)


@pytest.mark.parametrize("mu", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("noisers", [1, 4])
def test_a_clipped_sum_leaks_what_it_says_and_half_the_noise_is_caught(mu, noisers):
    mechanism, first, second = worst_sums()
    honest = audit(
        releases(mechanism, first, mu, noisers=noisers),
        releases(mechanism, second, mu, noisers=noisers),
        confidence=CONFIDENCE,
    )
    assert not honest.refutes(mu)
    assert honest.mu_low > 0.4 * mu  # the bound is not vacuous
    halved = audit(
        releases(mechanism, first, mu, noisers=noisers, factor=0.5),
        releases(mechanism, second, mu, noisers=noisers, factor=0.5),
        confidence=CONFIDENCE,
    )
    assert halved.refutes(mu)


def test_votes_leak_what_they_say_and_missing_shares_are_caught():
    mechanism, mu = TopKVotes(2, 6), 1.0
    first, second = np.array([5, 5, 0, 0, 0, 0]), np.array([4, 4, 1, 1, 0, 0])
    honest = audit(
        releases(mechanism, first, mu, noisers=8), releases(mechanism, second, mu, noisers=8), confidence=CONFIDENCE
    )
    assert not honest.refutes(mu)
    few = audit(
        releases(mechanism, first, mu, noisers=8, shares=4),
        releases(mechanism, second, mu, noisers=8, shares=4),
        confidence=CONFIDENCE,
    )
    assert few.refutes(mu)


def test_epsilon_is_bounded_from_below_too():
    mechanism, first, second = worst_sums()
    mu = gdp.mu(1.0, 1e-5)
    result = audit(releases(mechanism, first, mu), releases(mechanism, second, mu), confidence=CONFIDENCE)
    assert 0 <= result.epsilon_low(1e-5) <= 1.0
    naked = audit(releases(mechanism, first, 50.0), releases(mechanism, second, 50.0), confidence=CONFIDENCE)
    assert naked.epsilon_low(1e-5) > 1.0
    assert naked.epsilon_low(1 - 1e-9) == 0.0


def test_identical_outputs_show_nothing_and_disjoint_ones_show_all_there_is():
    same = audit(np.zeros(1000), np.zeros(1000))
    assert same.mu_low == 0.0
    assert same.misses == 1.0
    assert not same.refutes(0.1)
    apart = audit(np.zeros(1000), np.ones(1000))
    assert apart.mu_low > 4
    assert not apart.refutes(math.inf)


def test_limits_hold_with_the_stated_confidence():
    # 400 audits of a 1-GDP release at 90 %: wrong ones are binomial(400, ≤ .1); more than 73 has probability < 1e-6.
    generator = np.random.default_rng(5)
    wrong = sum(
        audit(generator.normal(0, 1, 400), generator.normal(1, 1, 400), confidence=0.9).refutes(1.0) for _ in range(400)
    )
    assert wrong <= 73
    caught = sum(
        audit(generator.normal(0, 0.5, 400), generator.normal(1, 0.5, 400), confidence=0.9).refutes(1.0)
        for _ in range(400)
    )
    assert caught > 73  # the control


def test_one_side_may_hold_more_outputs():
    generator = np.random.default_rng(6)
    assert audit(generator.normal(0, 1, (300, 2)), generator.normal(3, 1, (901, 2))).mu_low > 1


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        (np.zeros(99), np.zeros(200), "at least 100 outputs"),
        (np.zeros(200), np.zeros((200, 1, 1)), "at least 100 outputs"),
        (np.zeros((200, 2)), np.zeros((200, 3)), "one width"),
        (np.zeros(200), np.full(200, math.nan), "not finite"),
        (np.full(200, math.inf), np.zeros(200), "not finite"),
    ],
)
def test_bad_outputs_are_refused(first, second, sentence):
    with pytest.raises(ValueError, match=sentence):
        audit(first, second)


@pytest.mark.parametrize("bad", [0.0, 1.0, -1.0, math.nan, True])
def test_bad_confidence_delta_and_claims_are_refused(bad):
    outputs = np.arange(200.0)
    with pytest.raises(ValueError, match="confidence must"):
        audit(outputs, outputs, confidence=bad)
    with pytest.raises(ValueError, match="delta must"):
        audit(outputs, outputs).epsilon_low(bad)
    if bad != 1.0 or bad is True:
        with pytest.raises(ValueError, match="mu must"):
            audit(outputs, outputs).refutes(bad)
