"""Intervals and pairing, on numbers whose answer is known in closed form."""

import math

import numpy as np
import pytest
from scipy import stats

from dpray.experiments.papers.intervals import geometric, paired, plain


def test_the_mean_is_geometric():
    found = geometric([1.0, 4.0])
    assert found.mean == pytest.approx(2.0)
    # Logs 0 and log 4: standard error log(4)/2, Student's t with one degree of freedom at 95 %: tan(.475 π).
    assert found.high / found.mean == pytest.approx(math.exp(math.tan(0.475 * math.pi) * math.log(4) / 2))
    assert found.mean / found.low == pytest.approx(found.high / found.mean)


def test_the_interval_is_that_of_scipys_t_test():
    logs = np.random.default_rng(0).normal(size=12)
    low, high = stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
    found = geometric(np.exp(logs))
    assert (found.low, found.high) == pytest.approx((math.exp(low), math.exp(high)))


def test_accuracies_are_averaged_as_they_are():
    found = plain([0.7, 0.9])
    assert found.mean == pytest.approx(0.8)
    # Standard error .1, Student's t with one degree of freedom at 95 %: tan(.475 π).
    assert found.high - found.mean == found.mean - found.low == pytest.approx(0.1 * math.tan(0.475 * math.pi))
    assert math.isnan(plain([0.0]).high)
    with pytest.raises(ValueError, match="all finite"):
        plain([0.5, math.nan])


def test_it_covers_the_truth_as_often_as_it_says():
    """2 000 intervals of 8 seeds: 95 % ± 1.9 points (4 standard errors; false alarm 1e-4)."""
    draws = np.random.default_rng(1).normal(size=(2000, 8))
    covered = np.mean([found.low <= 1.0 <= found.high for found in (geometric(np.exp(row)) for row in draws)])
    assert abs(covered - 0.95) < 0.02


def test_an_interval_that_ignores_the_small_number_of_seeds_would_not():
    """Negative control: ±1.96 standard errors of 8 seeds cover less."""
    draws = np.random.default_rng(1).normal(size=(2000, 8))
    half = 1.96 * draws.std(axis=1, ddof=1) / math.sqrt(8)
    assert np.mean(np.abs(draws.mean(axis=1)) < half) < 0.93


def test_pairs_are_made_by_seed():
    found = paired({1: 2.0, 2: 6.0, 9: 1.0}, {2: 3.0, 1: 1.0, 7: 5.0})
    assert found.ratio.mean == pytest.approx(2.0)
    assert (found.ratio.low, found.ratio.high) == pytest.approx((2.0, 2.0))
    assert (found.worse, found.seeds) == (2, 2)


def test_pairing_takes_the_spread_between_seeds_out():
    spread = {seed: 10.0**seed for seed in range(6)}
    better = {seed: loss / 1.1 for seed, loss in spread.items()}
    ratio = paired(spread, better).ratio
    assert ratio.low == pytest.approx(1.1)
    own = geometric(list(spread.values()))
    assert own.high / own.low > 1000


def test_one_seed_has_no_interval():
    found = geometric([0.5])
    assert (found.mean, str(found)) == (0.5, "0.5")
    assert math.isnan(found.low)


@pytest.mark.parametrize("losses", [[], [1.0, 0.0], [-1.0], [math.nan]])
def test_losses_without_a_logarithm_are_refused(losses):
    with pytest.raises(ValueError, match="above 0"):
        geometric(losses)


def test_methods_without_a_common_seed_are_refused():
    with pytest.raises(ValueError, match="share no seed"):
        paired({1: 1.0}, {2: 1.0})
