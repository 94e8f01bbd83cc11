"""Bounded contributions, whatever the data are: NaN, infinities, the largest and the smallest floats."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from dpray.platform.privacy.clipping import (
    clip_rows,
    clipped_covariance,
    float_sum_error,
    pack_symmetric,
    symmetric_noise,
    top_k_votes,
    unpack_symmetric,
)
from dpray.platform.privacy.noise import NoiseSource, calibrate

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines are shared

EXTREMES = st.sampled_from([math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, -5e-324, 1e-160, 0.0, -0.0, 1.0])
ANYTHING = st.one_of(EXTREMES, st.floats(width=64), st.floats(-10, 10))
BOUND = st.one_of(st.floats(1e-3, 1e3), st.sampled_from([1e-100, 1e100]))
ROW = st.lists(ANYTHING, min_size=3, max_size=3)


def squared_norm(values: np.ndarray) -> Fraction:
    return sum((Fraction(float(each)) ** 2 for each in values.ravel()), Fraction(0))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@RELAXED
@given(rows=st.lists(ROW, min_size=1, max_size=5), bound=BOUND)
def test_norms_never_exceed_the_bound(rows, bound):
    clipped = clip_rows(rows, bound)
    slack = 1 + Fraction(3 + 16, 2**53)
    for row in clipped:
        assert squared_norm(row) <= (Fraction(bound) * slack) ** 2


@RELAXED
@given(row=ROW, bound=BOUND)
def test_a_row_that_is_not_finite_becomes_zero_and_others_keep_their_direction(row, bound):
    clipped = clip_rows([row], bound)[0]
    if not np.all(np.isfinite(row)):
        assert not clipped.any()
        return
    norm = math.sqrt(squared_norm(np.array(row))) if max(map(abs, row)) < 1e150 else math.inf
    if norm <= bound * (1 - 1e-12):
        assert np.array_equal(clipped, row)
    else:
        assert math.sqrt(squared_norm(clipped)) == pytest.approx(bound, rel=1e-12)
        largest = int(np.argmax(np.abs(row)))
        assert clipped / clipped[largest] == pytest.approx(np.array(row) / row[largest], rel=1e-9, abs=1e-12)


@RELAXED
@given(rows=st.lists(ROW, min_size=2, max_size=5), other=ROW, bound=BOUND)
def test_a_row_depends_on_nothing_but_itself(rows, other, bound):
    before, after = clip_rows(rows, bound), clip_rows([other, *rows[1:]], bound)
    assert np.array_equal(before[1:], after[1:])


def test_one_nan_coordinate_does_not_switch_clipping_off():
    assert clip_rows([[math.nan, 1e6], [3.0, 4.0]], 1.0) == pytest.approx(np.array([[0.0, 0.0], [0.6, 0.8]]))


def test_zero_rows_stay_zero_and_the_input_stays_as_it_was():
    rows = np.array([[0.0, 0.0], [30.0, 40.0]])
    assert np.array_equal(clip_rows(rows, 5.0), [[0.0, 0.0], [3.0, 4.0]])
    assert rows[1, 0] == 30.0


@pytest.mark.filterwarnings("error")
def test_extreme_rows_raise_no_warning_that_could_reach_a_log():
    rows = [[1e308, 1e308], [math.nan, 1.0], [math.inf, 0.0], [5e-324, 0.0], [0.0, 0.0]]
    expected = [[math.sqrt(0.5), math.sqrt(0.5)], [0, 0], [0, 0], [5e-324, 0], [0, 0]]
    assert clip_rows(rows, 1.0) == pytest.approx(np.array(expected), rel=1e-15)


def test_empty_and_integer_and_float32_rows():
    assert clip_rows(np.zeros((0, 4)), 1.0).shape == (0, 4)
    assert clip_rows(np.zeros((2, 0)), 1.0).shape == (2, 0)
    assert clip_rows(np.array([[3, 4]]), 1.0) == pytest.approx(np.array([[0.6, 0.8]]))
    assert clip_rows(np.array([[3, 4]], dtype=np.float32), 1.0).dtype == np.float64


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, True, "1", 1e-101, 1e101])
def test_bad_bounds_are_refused(bad):
    with pytest.raises(ValueError, match="clipping bound"):
        clip_rows([[1.0]], bad)


@pytest.mark.parametrize("bad", [[1.0, 2.0], 1.0, np.zeros((1, 1, 1)), [["a"]], [[1j]]])
def test_what_is_not_a_real_matrix_is_refused(bad):
    with pytest.raises(ValueError, match="must be a real matrix"):
        clip_rows(bad, 1.0)


@settings(RELAXED, max_examples=50)
@given(n=st.integers(1, 2000), d=st.integers(1, 20), seed=st.integers(0, 2**32))
def test_float_sums_stay_within_their_stated_error(n, d, seed):
    rows = clip_rows(rng(seed).standard_normal((n, d)) * 100, 1.0)
    computed = rows.sum(axis=0)
    exact = [sum((Fraction(float(each)) for each in column), Fraction(0)) for column in rows.T]
    off = sum(((Fraction(float(c)) - e) ** 2 for c, e in zip(computed, exact, strict=True)), Fraction(0))
    assert off <= (Fraction(float_sum_error(n, d)) / 2) ** 2


def test_aligned_records_move_a_float32_sum_too_far_but_not_a_float64_sum():
    n, clip = 10_000, np.float32(0.7)
    error = float_sum_error(n, 1)

    def moved(dtype: type) -> float:
        rows = np.full(n, clip, dtype=dtype)
        neighbour = rows.copy()
        neighbour[0] = -rows[0]
        return float(np.add.accumulate(rows)[-1]) - float(np.add.accumulate(neighbour)[-1])

    assert abs(moved(np.float64)) <= (2 + error) * clip
    assert abs(moved(np.float32)) > (2 + error) * clip


def test_sums_beyond_what_can_be_bounded_are_refused():
    assert float_sum_error(10_000, 5130) < 1e-7
    with pytest.raises(ValueError, match="beyond what float64 bounds can state"):
        float_sum_error(2**46, 1)


# --- votes ------------------------------------------------------------------------------------------------------------


@RELAXED
@given(scores=st.lists(ANYTHING, min_size=1, max_size=12), data=st.data())
def test_a_ballot_has_exactly_k_ones_at_the_best_scores(scores, data):
    k = data.draw(st.integers(1, len(scores)))
    ballot = top_k_votes(scores, k, rng(data.draw(st.integers(0, 2**32))))
    assert ballot.dtype == np.int64
    assert ballot.shape == (len(scores),)
    assert sorted(set(ballot) | {0, 1}) == [0, 1]
    assert ballot.sum() == k
    rank = [(-2, 0.0) if math.isnan(each) else (-1, each) for each in scores]
    chosen = [each for each, vote in zip(rank, ballot, strict=True) if vote]
    left = [each for each, vote in zip(rank, ballot, strict=True) if not vote]
    assert not left or min(chosen) >= max(left)


def test_nan_loses_even_against_minus_infinity():
    assert np.array_equal(top_k_votes([math.nan, -math.inf, math.nan], 1, rng()), [0, 1, 0])


def test_ties_are_broken_at_random_and_not_by_index():
    # χ² over ten equal candidates, level 1e-6; the control is the lowest index, which always wins an argsort.
    generator, draws = rng(3), 5_000
    counts = sum(top_k_votes([1.0] * 8 + [-0.0, 0.0], 1, generator) for _ in range(draws))
    assert not counts[8:].any()
    assert stats.chisquare(counts[:8]).pvalue > 1e-6
    by_index = np.zeros(8)
    by_index[0] = draws
    assert stats.chisquare(by_index).pvalue < 1e-6


def test_failed_scores_make_a_random_ballot():
    generator = rng(4)
    counts = sum(top_k_votes([math.nan] * 6, 2, generator) for _ in range(3_000))
    assert counts.sum() == 6_000
    assert stats.chisquare(counts).pvalue > 1e-6


def test_ballots_repeat_for_the_same_generator_state():
    assert np.array_equal(top_k_votes([0.0] * 9, 3, rng(1)), top_k_votes([0.0] * 9, 3, rng(1)))


@pytest.mark.parametrize("k", [0, -1, 4, True, 1.0, None])
def test_bad_numbers_of_votes_are_refused(k):
    with pytest.raises(ValueError, match=r"k must|too many"):
        top_k_votes([1.0, 2.0, 3.0], k, rng())


@pytest.mark.parametrize("scores", [[[1.0]], ["a"], [1j], 1.0])
def test_bad_scores_are_refused(scores):
    with pytest.raises(ValueError, match="real vector"):
        top_k_votes(scores, 1, rng())


# --- symmetric matrices -----------------------------------------------------------------------------------------------


@RELAXED
@given(f=st.integers(1, 6), seed=st.integers(0, 2**32))
def test_packing_keeps_the_frobenius_norm_and_comes_back(f, seed):
    matrix = rng(seed).standard_normal((f, f))
    matrix = matrix + matrix.T
    packed = pack_symmetric(matrix)
    assert packed.shape == (f * (f + 1) // 2,)
    assert np.linalg.norm(packed) == pytest.approx(np.linalg.norm(matrix), rel=1e-14)
    back = unpack_symmetric(packed, f)
    assert back == pytest.approx(matrix, rel=1e-15)
    assert np.array_equal(back, back.T)


@pytest.mark.parametrize("bad", [[[1.0, 2.0], [3.0, 4.0]], [[math.nan]], [[1.0, 2.0]], [1.0]])
def test_what_is_not_symmetric_is_refused(bad):
    with pytest.raises(ValueError, match=r"symmetric"):
        pack_symmetric(bad)


def test_packings_of_another_width_are_refused():
    with pytest.raises(ValueError, match="3 features pack into 6 numbers"):
        unpack_symmetric(np.zeros(5), 3)


def test_clipped_covariance_is_that_of_the_clipped_rows():
    rows = rng(2).standard_normal((50, 4)) * 3
    rows[7, 2] = math.nan
    clipped = np.array([row * min(1, 2.0 / np.linalg.norm(row)) for row in np.delete(rows, 7, axis=0)])
    covariance = clipped_covariance(rows, 2.0)
    assert covariance == pytest.approx(clipped.T @ clipped, rel=1e-12)
    assert np.array_equal(covariance, covariance.T)


def test_symmetric_noise_has_full_variance_on_the_diagonal_and_half_beside_it():
    # Two-sided χ² tests, level 1e-6 each; the control mistakes one variance for the other.
    noise = calibrate(1.0, 1.0, 10)
    source = NoiseSource()
    drawn = np.array([symmetric_noise(noise, 4, source.generator()) for _ in range(5_000)])
    assert np.array_equal(drawn, drawn.transpose(0, 2, 1))
    diagonal = drawn[:, range(4), range(4)].ravel()
    beside = drawn[:, *np.triu_indices(4, 1)].ravel()

    def has_variance(samples: np.ndarray, variance: float) -> bool:
        statistic = float(np.sum(samples**2)) / variance
        tail = stats.chi2(samples.size)
        return min(tail.cdf(statistic), tail.sf(statistic)) > 5e-7

    assert has_variance(diagonal, noise.sigma**2)
    assert has_variance(beside, noise.sigma**2 / 2)
    assert not has_variance(beside, noise.sigma**2)
    assert not has_variance(diagonal, noise.sigma**2 / 2)
