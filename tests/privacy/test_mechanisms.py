"""Mechanisms: golden numbers, stated sensitivities against the worst neighbours, refusals in sentences."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpray.platform.privacy import gdp
from dpray.platform.privacy.budget import Budget, split, to_mu
from dpray.platform.privacy.mechanisms import (
    ClippedMean,
    ClippedSum,
    FeatureCovariance,
    Mechanism,
    NoisyMax,
    Regime,
    TopKVotes,
    Unit,
    clip_rows,
    clipped_covariance,
    pack_symmetric,
    top_k_votes,
)
from dpray.platform.privacy.noise import to_grid

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines are shared

EXTREMES = st.sampled_from([math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, -5e-324, 1e-160, 0.0, -0.0, 1.0])
ANYTHING = st.one_of(EXTREMES, st.floats(width=64), st.floats(-10, 10))
ROW = st.lists(ANYTHING, min_size=3, max_size=3)
ROWS = st.lists(ROW, min_size=1, max_size=6)
CLIP = st.floats(1e-3, 1e3)


def golden(section: str) -> list[dict]:
    return json.loads((Path(__file__).parents[1] / "golden" / f"{section}.json").read_text())["rows"]


def apart(first: np.ndarray, second: np.ndarray) -> Fraction:
    """Squared L2 distance, exactly."""
    pairs = zip(np.ravel(first), np.ravel(second), strict=True)
    return sum(((Fraction(float(x)) - Fraction(float(y))) ** 2 for x, y in pairs), Fraction(0))


def within(first: np.ndarray, second: np.ndarray, *bounds: float) -> bool:
    return apart(first, second) <= sum(map(Fraction, bounds)) ** 2


def on_grid_within(mechanism: Mechanism, first: np.ndarray, second: np.ndarray) -> bool:
    """The integers that receive noise are at most Δ' apart, for one noiser and for several."""
    for noisers in (1, 5):
        noise = mechanism.noise(1.0, noisers=noisers)  # at μ = 1, Δ' = σ
        steps = to_grid(first, noise.grid) - to_grid(second, noise.grid)
        if sum(int(each) ** 2 for each in steps.ravel()) * Fraction(noise.grid) ** 2 > Fraction(noise.sigma) ** 2:
            return False
    return True


# --- golden -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", golden("hype_sigma"), ids=str)
def test_vote_noise_golden(row):
    mechanism = TopKVotes(votes=row["k"], candidates=row["p"])
    mu = gdp.mu(row["epsilon"], row["delta"])
    assert mechanism.sensitivity == pytest.approx(row["sensitivity"], rel=1e-15)
    assert mechanism.sigma(mu) == pytest.approx(row["sigma"], rel=1e-9)
    assert mechanism.noise(mu).sigma == pytest.approx(row["sigma"], rel=1e-9)  # votes are integers: Δ' = Δ


@pytest.mark.parametrize("row", golden("sofim_client_noise"), ids=str)
def test_gradient_sum_noise_golden(row):
    mechanism = ClippedSum(row["C"], Unit.RECORD, dimension=5130, records=50_000)
    quanta = Budget(row["epsilon"], row["delta"]).quanta
    assert quanta is not None
    mu = to_mu(split(quanta, row["T"])[-1])
    assert mechanism.sigma(mu) == pytest.approx(row["client_sum_std_local"], rel=1e-9)
    assert mechanism.sigma(mu) < mechanism.noise(mu).sigma < mechanism.sigma(mu) * (1 + 2e-6)


@pytest.mark.parametrize("row", golden("gibo_noise_std"), ids=str)
def test_user_mean_noise_golden(row):
    mechanism = ClippedMean(clip=row["B"], users=row["n"], dimension=22)
    mu = row["mu"] / math.sqrt(row["T"])
    assert mechanism.sigma(mu) == pytest.approx(row["sigma"], rel=1e-12)
    assert mechanism.sigma(mu) < mechanism.noise(mu).sigma < mechanism.sigma(mu) * (1 + 2e-6)


# --- sensitivity ------------------------------------------------------------------------------------------------------


@RELAXED
@given(rows=ROWS, other=ROW, clip=CLIP, unit=st.sampled_from([Unit.RECORD, Unit.CLIENT]))
def test_replacing_one_moves_a_clipped_sum_by_its_stated_sensitivity_at_most(rows, other, clip, unit):
    mechanism = ClippedSum(clip, unit, dimension=3, records=len(rows))
    first = clip_rows(rows, clip).sum(axis=0)
    second = clip_rows([other, *rows[1:]], clip).sum(axis=0)
    assert within(first, second, mechanism.sensitivity, mechanism.summation_error)
    assert on_grid_within(mechanism, first, second)


@RELAXED
@given(rows=ROWS, other=ROW, clip=CLIP)
def test_replacing_one_user_moves_a_clipped_mean_by_its_stated_sensitivity_at_most(rows, other, clip):
    mechanism = ClippedMean(clip, users=len(rows), dimension=3)
    first = clip_rows(rows, clip).mean(axis=0)
    second = clip_rows([other, *rows[1:]], clip).mean(axis=0)
    assert within(first, second, mechanism.sensitivity, mechanism.summation_error)
    assert on_grid_within(mechanism, first, second)


@RELAXED
@given(rows=ROWS, other=ROW, clip=CLIP)
def test_replacing_one_record_moves_a_covariance_by_its_stated_sensitivity_at_most(rows, other, clip):
    mechanism = FeatureCovariance(clip, features=3, records=len(rows))
    first = pack_symmetric(clipped_covariance(rows, clip))
    second = pack_symmetric(clipped_covariance([other, *rows[1:]], clip))
    assert within(first, second, mechanism.sensitivity, mechanism.summation_error)
    assert on_grid_within(mechanism, first, second)


@RELAXED
@given(scores=st.lists(st.lists(ANYTHING, min_size=7, max_size=7), min_size=2, max_size=5), k=st.integers(1, 6))
def test_replacing_one_client_moves_the_votes_by_their_stated_sensitivity_at_most(scores, k):
    mechanism = TopKVotes(k, 7)
    generator = np.random.default_rng(0)
    ballots = [top_k_votes(each, k, generator) for each in scores]
    first, second = np.sum(ballots[1:], axis=0), np.sum([ballots[0], *ballots[2:]], axis=0)
    assert apart(first, second) <= 2 * min(k, 7 - k)
    noise = mechanism.noise(1.0, noisers=4)
    assert np.array_equal(to_grid(first, noise.grid) * noise.grid, first)  # the grid holds votes exactly


def test_sensitivities_are_attained():
    assert within(clip_rows([[9.0]], 2.0), clip_rows([[-9.0]], 2.0), ClippedSum(2.0, Unit.RECORD, 1, 1).sensitivity)
    assert apart(clip_rows([[9.0]], 2.0), clip_rows([[-9.0]], 2.0)) == 16
    covariances = [pack_symmetric(clipped_covariance([row], 3.0)) for row in ([5.0, 0.0], [0.0, 5.0])]
    assert math.sqrt(apart(*covariances)) == pytest.approx(FeatureCovariance(3.0, 2, 1).sensitivity, rel=1e-14)
    for k, p in ((1, 5), (2, 5), (3, 5), (4, 5)):
        ballots = [top_k_votes(scores, k, np.random.default_rng(0)) for scores in (range(p), range(p, 0, -1))]
        assert math.sqrt(apart(*ballots)) == pytest.approx(TopKVotes(k, p).sensitivity)


def test_the_property_tests_would_catch_what_they_are_there_for():
    mechanism = ClippedSum(1.0, Unit.RECORD, dimension=2, records=2)
    stated = (mechanism.sensitivity, mechanism.summation_error)
    rows, other = np.array([[1e6, 0.0], [1.0, 0.0]]), np.array([[-1e6, 0.0], [1.0, 0.0]])
    assert within(clip_rows(rows, 1.0).sum(0), clip_rows(other, 1.0).sum(0), *stated)
    assert not within(rows.sum(0), other.sum(0), *stated)  # no clipping
    per_coordinate = [np.clip(each, -1, 1).sum(0) for each in (np.ones((2, 2)), np.array([[-1.0, -1.0], [1.0, 1.0]]))]
    assert not within(*per_coordinate, *stated)  # a global bound applied to each part


def test_summation_error_grows_with_what_is_summed_and_stays_small():
    small, large = (ClippedSum(1.0, Unit.RECORD, 5130, records) for records in (100, 100_000))
    assert 0 < small.summation_error < large.summation_error < 1e-5
    assert ClippedMean(1.0, 9_000, 103).summation_error < 1e-11
    assert TopKVotes(2, 5).summation_error == 0.0
    assert ClippedSum(1.0, Unit.RECORD, 5, 10, relative_error=1e-4).summation_error == pytest.approx(2e-4, rel=1e-9)


# --- one interface ----------------------------------------------------------------------------------------------------

GAUSSIAN = [
    ClippedMean(0.5, 9_000, 103),
    ClippedSum(10.0, Unit.RECORD, 5130, 50_000),
    ClippedSum(1.0, Unit.CLIENT, 10, 100, relative_error=1e-4),
    TopKVotes(5, 100),
    FeatureCovariance(2.0, 8, 1_000),
]


@pytest.mark.parametrize("mechanism", GAUSSIAN, ids=lambda each: f"{each.name} {each.unit}")
class TestEveryGaussianMechanism:
    @pytest.mark.parametrize("mu", [1e-3, 0.3, 4.0])
    def test_sigma_and_mu_invert_each_other_on_the_safe_side(self, mechanism, mu):
        sigma = mechanism.sigma(mu)
        assert Fraction(sigma) * Fraction(mu) >= Fraction(mechanism.sensitivity)
        assert mechanism.mu(sigma) == pytest.approx(mu, rel=1e-14)
        assert Fraction(mechanism.mu(sigma)) * Fraction(sigma) >= Fraction(mechanism.sensitivity)

    @pytest.mark.parametrize("noisers", [1, 20])
    def test_applied_noise_is_never_less_than_the_ideal(self, mechanism, noisers):
        noise = mechanism.noise(0.3, noisers=noisers)
        grid = 0.0 if mechanism.integers else noise.grid * math.sqrt(mechanism.dimension)
        assert noise.noisers == noisers
        assert noise.sigma >= (mechanism.sensitivity + grid + mechanism.summation_error) / 0.3
        assert noise.sigma == pytest.approx(mechanism.sigma(0.3), rel=2e-3)

    def test_infinite_mu_is_no_noise_and_says_so(self, mechanism):
        assert mechanism.sigma(math.inf) == 0.0
        assert mechanism.mu(0.0) == math.inf
        assert not mechanism.noise(math.inf).private

    @pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, True, "1", None])
    def test_bad_mu_is_refused(self, mechanism, bad):
        for call in (mechanism.sigma, mechanism.noise):
            with pytest.raises(ValueError, match="mu must"):
                call(bad)

    @pytest.mark.parametrize("bad", [-1.0, math.nan, True, None])
    def test_bad_sigma_is_refused(self, mechanism, bad):
        with pytest.raises(ValueError, match="sigma must"):
            mechanism.mu(bad)

    def test_its_description_is_plain_json_that_identifies_it(self, mechanism):
        described = mechanism.describe()
        assert json.loads(json.dumps(described)) == described
        assert described["mechanism"] == mechanism.name
        assert described["unit"] == mechanism.unit.value
        assert [other.describe() for other in GAUSSIAN].count(described) == 1

    def test_it_is_an_immutable_value(self, mechanism):
        arguments = {each.name: getattr(mechanism, each.name) for each in fields(mechanism) if each.init}
        again = type(mechanism)(**arguments)
        assert again == mechanism
        assert hash(again) == hash(mechanism)
        with pytest.raises(AttributeError):
            mechanism.unit = Unit.RECORD


def test_a_coarser_grid_is_passed_on():
    assert TopKVotes(5, 100).noise(0.3, noisers=4, grid=2.0**-4).grid == 2.0**-4


def test_dimensions():
    assert TopKVotes(5, 100).dimension == 100
    assert FeatureCovariance(1.0, 8, 10).dimension == 36


def test_names_are_distinct_and_numpy_numbers_become_plain_ones():
    assert len({each.name for each in GAUSSIAN} | {NoisyMax.name}) == 5
    described = ClippedSum(np.float64(1.0), "record", np.int64(3), np.int32(7)).describe()
    assert json.dumps(described)
    assert described == {
        "mechanism": "clipped sum",
        "clip": 1.0,
        "unit": "record",
        "dimension": 3,
        "records": 7,
        "relative_error": 0.0,
    }


# --- refusals ---------------------------------------------------------------------------------------------------------

BAD_BOUNDS = [0.0, -1.0, math.nan, math.inf, True, "1", None]
BAD_COUNTS = [0, -1, 1.5, 2.0, True, "3", None, math.nan]


@pytest.mark.parametrize("bad", BAD_BOUNDS)
@pytest.mark.parametrize(
    "make",
    [
        lambda x: ClippedMean(x, 10, 3),
        lambda x: ClippedSum(x, Unit.RECORD, 3, 10),
        lambda x: FeatureCovariance(x, 3, 10),
        lambda x: NoisyMax(x, 10, 3),
    ],
)
def test_bad_bounds_are_refused(make, bad):
    with pytest.raises(ValueError, match=r"(clip|bound) must"):
        make(bad)


@pytest.mark.parametrize("bad", BAD_COUNTS)
@pytest.mark.parametrize(
    "make",
    [
        lambda n: ClippedMean(1.0, n, 3),
        lambda n: ClippedMean(1.0, 10, n),
        lambda n: ClippedSum(1.0, Unit.RECORD, n, 10),
        lambda n: ClippedSum(1.0, Unit.RECORD, 3, n),
        lambda n: TopKVotes(n, 10),
        lambda n: TopKVotes(1, n),
        lambda n: FeatureCovariance(1.0, n, 10),
        lambda n: FeatureCovariance(1.0, 3, n),
        lambda n: NoisyMax(1.0, n, 3),
        lambda n: NoisyMax(1.0, 3, n),
    ],
)
def test_bad_counts_are_refused(make, bad):
    with pytest.raises(ValueError, match=r"must be a(t least| whole number)"):
        make(bad)


@pytest.mark.parametrize(("votes", "candidates"), [(5, 5), (6, 5), (1, 1)])
def test_a_vote_that_chooses_nothing_is_refused(votes, candidates):
    with pytest.raises(ValueError, match="choose nothing"):
        TopKVotes(votes, candidates)


@pytest.mark.parametrize("bad", [-0.1, 1.0, math.nan, math.inf, True])
def test_bad_relative_errors_are_refused(bad):
    with pytest.raises(ValueError, match="relative_error must"):
        ClippedSum(1.0, Unit.RECORD, 3, 10, relative_error=bad)


def test_units_a_sum_cannot_protect_are_refused():
    with pytest.raises(ValueError, match="use ClippedMean"):
        ClippedSum(1.0, Unit.USER, 3, 10)
    with pytest.raises(ValueError, match="not a valid Unit"):
        ClippedSum(1.0, "household", 3, 10)  # type: ignore[arg-type]


# --- units ------------------------------------------------------------------------------------------------------------


def test_finer_units_are_covered_by_what_protects_coarser_ones():
    covers = {(mine, other) for mine in Unit for other in Unit if mine.covers(other)}
    order = [Unit.RECORD, Unit.USER, Unit.CLIENT]
    assert covers == {(mine, other) for i, mine in enumerate(order) for other in order[i:]}


def test_regimes_are_the_three_of_the_documentation():
    assert [str(each) for each in Regime] == ["local", "distributed", "central"]
