"""Poisson sampling: the coin has the rate it says, and what a budget buys is what an independent computation allows."""

import math

import numpy as np
import pytest
from scipy import stats

from dpray.platform.privacy.budget import Budget, to_mu
from dpray.platform.privacy.ledger.composing import Spend, events
from dpray.platform.privacy.ledger.rows import Maxima
from dpray.platform.privacy.mechanisms import ClippedSum, TopKVotes, Unit
from dpray.platform.privacy.noise import NoiseSource
from dpray.platform.privacy.pld import PoissonGaussian, PoissonSampled
from dpray.platform.privacy.sampling import PoissonSampling

DELTA = 1e-5
SUM = ClippedSum(1.0, Unit.RECORD, 5, 1000)


def delta_of(epsilon, sigma, q, steps, *, spacing=2e-4):
    """δ(ε) of `steps` sampled sums with contributions −1 against 1, by FFT over a grid of losses; no accountant.

    Masses go to the nearest grid point, so the value is near the truth and on neither side of it.
    """
    y = np.linspace(-1 - 14 * sigma, 1 + 14 * sigma, 400_001)
    edges = np.concatenate([[-np.inf], (y[1:] + y[:-1]) / 2, [np.inf]])
    mass = (1 - q) * np.diff(stats.norm.cdf(edges, 0, sigma)) + q * np.diff(stats.norm.cdf(edges, 1, sigma))
    zero, right, left = (stats.norm.logpdf(y, shift, sigma) for shift in (0, 1, -1))
    p, other = (np.logaddexp(math.log1p(-q) + zero, math.log(q) + shifted) for shifted in (right, left))
    steps_of = np.rint((p - other) / spacing).astype(int)
    size = 2 ** math.ceil(math.log2(2 * np.abs(steps_of).max() + 40 / spacing))
    grid = np.bincount(steps_of % size, weights=mass, minlength=size)
    composed = np.fft.irfft(np.fft.rfft(grid) ** steps, size)
    losses = np.fft.fftfreq(size, 1 / size) * spacing
    beyond = losses > epsilon
    return float((composed[beyond] * -np.expm1(epsilon - losses[beyond])).sum())


CASES = [(2.0, 0.5, 5), (1.0, 0.05, 40), (0.5, 0.2, 12)]


@pytest.fixture(scope="module", params=CASES, ids=str)
def calibrated(request):
    epsilon, q, steps = request.param
    return request.param, PoissonSampling(q).calibrate(Budget(epsilon, DELTA), steps)


def test_the_noise_that_a_budget_buys_keeps_it_by_an_independent_computation(calibrated):
    (epsilon, q, steps), quanta = calibrated
    sigma = 2 / to_mu(quanta // steps)  # in units of C, of which a replaced record moves 2
    assert 0.95 * DELTA < delta_of(epsilon, sigma, q, steps) <= DELTA * 1.001
    assert delta_of(epsilon, sigma / 2, q, steps) > 2 * DELTA  # half the noise breaks it


def test_it_is_close_to_the_budget_and_on_the_safe_side(calibrated):
    (epsilon, q, steps), quanta = calibrated
    spent = PoissonSampling(q).epsilon(quanta // steps, steps, DELTA)
    assert 0.998 * epsilon <= spent <= epsilon
    assert quanta % steps == 0


def test_the_ledger_charges_what_was_calibrated(calibrated):
    (_, q, steps), quanta = calibrated
    (event,) = events("people", Unit.RECORD, Maxima(None, None), [Spend(Unit.RECORD, quanta // steps, q, steps)])
    assert event == PoissonGaussian(event.noise_multiplier, q, steps)
    assert event.noise_multiplier == pytest.approx(1 / to_mu(quanta // steps), rel=1e-15)


def test_it_buys_less_noise_than_without_sampling(calibrated):
    (epsilon, _, _), quanta = calibrated
    assert quanta > Budget(epsilon, DELTA).quanta


def test_a_coin_has_the_rate_it_says():
    """False alarm below 1e-6 (5σ on each side of a binomial count); another rate, a hundredth off, is noticed."""
    n, q = 1_000_000, 0.1
    found = PoissonSampling(q).draw(n, NoiseSource().generator()).sum()
    width = 5 * math.sqrt(n * q * (1 - q))
    assert abs(found - n * q) < width
    off = PoissonSampling(q * 1.02).draw(n, NoiseSource().generator()).sum()
    assert abs(off - n * q) > width / 2  # 2 % off lies 6.7σ away: within 2.5σ with probability below 2e-5


def test_units_are_drawn_independently_of_each_other_and_afresh():
    """Correlations of neighbours and of two draws below 5/√n; a draw correlates with itself."""
    n, sampling, source = 200_000, PoissonSampling(0.3), NoiseSource()
    first, second = (sampling.draw(n, source.generator()) - 0.3 for _ in range(2))
    scale = n * 0.3 * 0.7
    assert abs((first[1:] * first[:-1]).sum() / scale) < 5 / math.sqrt(n)
    assert abs((first * second).sum() / scale) < 5 / math.sqrt(n)
    assert (first * first).sum() / scale > 0.9


class Uniform:
    """A generator whose every number is given."""

    def __init__(self, value):
        self.value = value

    def random(self, n):
        return np.full(n, self.value)


@pytest.mark.parametrize("rate", [0.1, 1e-9, 0.3, 0.999])
def test_the_coin_never_errs_on_the_dear_side(rate):
    """The largest 53-bit number that is taken lies below the rate, so that at most that part of them is."""
    largest = math.floor(rate * 2**53) - 1
    sampling = PoissonSampling(rate)
    assert sampling.draw(1, Uniform(largest / 2**53))[0]
    assert not sampling.draw(1, Uniform((largest + 1) / 2**53))[0]
    assert (largest + 1) / 2**53 <= rate


def test_what_cannot_be_sampled_is_refused():
    for rate in (0, -0.1, 1.0, 1.5, math.nan, math.inf, 1e-10, True):
        with pytest.raises(ValueError, match=r"rate|probability"):
            PoissonSampling(rate)
    with pytest.raises(ValueError, match="users belong to searches"):
        PoissonSampling(0.1, "user")
    with pytest.raises(ValueError, match="Only a ClippedSum can be sampled"):
        PoissonSampling(0.1, "client").mechanism(TopKVotes(1, 3))
    with pytest.raises(ValueError, match="Sample the unit that is protected"):
        PoissonSampling(0.1, "client").mechanism(SUM)
    with pytest.raises(ValueError, match="without limit"):
        PoissonSampling(0.1).calibrate(Budget(math.inf, DELTA, non_private=True), 3)


def test_sampler_and_mechanism_have_one_rate():
    sampling = PoissonSampling(0.2)
    assert sampling.mechanism(SUM) == PoissonSampled(SUM, 0.2)
    assert sampling.mechanism(SUM).sensitivity == 2.0
    assert sampling.describe() == {"sampling": 0.2, "sampled": "record"}
