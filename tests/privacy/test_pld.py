"""Composition of sampled releases: against closed forms, a direct integral, and bounds that need no accountant."""

import json
import math
import sys

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy import integrate, optimize, stats

from dpray.platform.privacy import gdp, pld
from dpray.platform.privacy.mechanisms import ClippedMean, ClippedSum, FeatureCovariance, TopKVotes, Unit
from dpray.platform.privacy.pld import Gaussian, PoissonGaussian, PoissonSampled

DELTA = 1e-5


def removing(noise_multiplier, probability, count, delta=DELTA):
    """ε of the same releases where a neighbour lacks a record: dp-accounting, σ relative to the record's own norm."""
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    gaussian = dp_accounting.GaussianDpEvent(2 * noise_multiplier)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(probability, gaussian), count)
    return accountant.get_epsilon(delta)


def hockey_stick(alpha, q, sigma, x, y):
    """∫ (P − αQ)₊ of two mixtures in the plane, contributions x and y, by a sum over a fine grid."""
    points = np.linspace(-9 * sigma, 9 * sigma, 361)
    step = points[1] - points[0]
    density = {}
    for name, (a, b) in {"0": (0, 0), "x": x, "y": y}.items():
        density[name] = np.outer(stats.norm.pdf(points, a, sigma), stats.norm.pdf(points, b, sigma))
    p = (1 - q) * density["0"] + q * density["x"]
    return np.clip(p - alpha * ((1 - q) * density["0"] + q * density["y"]), 0, None).sum() * step**2


@pytest.mark.parametrize("mu", [0.05, 0.5, 1, 3, 6])
@pytest.mark.parametrize("delta", [1e-8, 1e-5, 1e-2])
@pytest.mark.parametrize("event", [Gaussian, lambda multiplier, count: PoissonGaussian(multiplier, 1.0, count)])
def test_unsampled_gaussians_have_the_epsilon_of_the_closed_form_or_a_little_more(mu, delta, event):
    exact = gdp.epsilon(mu, delta)
    composed = pld.epsilon([event(math.sqrt(7) / mu, 7)], delta)
    assert exact <= composed <= exact * 1.001 + 2e-4


def test_different_gaussians_add_up_like_pythagoras():
    exact = gdp.epsilon(math.hypot(1, 0.5, 0.5), DELTA)
    composed = pld.epsilon([Gaussian(1.0), Gaussian(2.0, 2)], DELTA)
    assert exact <= composed <= exact * 1.001
    assert composed == pld.epsilon([Gaussian(2.0), Gaussian(1.0), Gaussian(2.0)], DELTA)


@pytest.mark.parametrize(("multiplier", "q"), [(0.5, 0.3), (1.0, 0.1), (0.25, 0.02)])
def test_one_sampled_release_is_the_integral_over_two_opposite_contributions(multiplier, q):
    sigma = 2 * multiplier  # contributions −1 and 1 are Δ = 2 apart

    def delta(epsilon):
        def over(y):
            both = (1 - q) * stats.norm.pdf(y, 0, sigma)
            p, other = (both + q * stats.norm.pdf(y, shift, sigma) for shift in (1, -1))
            return max(p - math.exp(epsilon) * other, 0)

        return integrate.quad(over, 0, 1 + 12 * sigma, limit=1000, epsabs=1e-13)[0]

    exact = optimize.brentq(lambda epsilon: delta(epsilon) - DELTA, 0, 50)
    composed = pld.epsilon([PoissonGaussian(multiplier, q)], DELTA)
    assert exact <= composed <= exact * 1.001 + 2e-4


@pytest.mark.parametrize(("multiplier", "q", "count"), [(1.0, 0.01, 1000), (0.5, 0.05, 50), (2.0, 0.2, 100)])
def test_composition_lies_under_the_renyi_bound_of_the_same_pair(multiplier, q, count):
    sigma, best = 2 * multiplier, math.inf
    y = np.linspace(-20 * sigma - 64, 20 * sigma + 64, 400_001)
    zero, right, left = (stats.norm.logpdf(y, shift, sigma) for shift in (0, 1, -1))
    p, other = (np.logaddexp(math.log1p(-q) + zero, math.log(q) + shifted) for shifted in (right, left))
    for order in range(2, 64):
        with np.errstate(over="ignore"):
            moment = np.exp(order * p + (1 - order) * other).sum() * (y[1] - y[0])
        renyi = count * math.log(moment) / (order - 1)
        best = min(best, renyi + math.log1p(-1 / order) - math.log(DELTA * order) / (order - 1))
    composed = pld.epsilon([PoissonGaussian(multiplier, q, count)], DELTA)
    assert 0.75 * best < composed < best


@pytest.mark.parametrize(("multiplier", "q", "count"), [(1.0, 0.01, 1000), (0.5, 0.1, 20), (1.0, 0.1, 100)])
def test_replacing_costs_more_than_removing_and_less_than_removing_and_adding(multiplier, q, count):
    one = removing(multiplier, q, count)
    assert pld.epsilon([PoissonGaussian(multiplier, q, count)], DELTA) > 1.2 * one
    # Two steps: P ≤ e^ε(e^ε Q + δ) + δ, for whatever the releases were.
    assert pld.epsilon([PoissonGaussian(multiplier, q, count)], DELTA * (1 + math.exp(one))) < 2 * one


def test_sampling_amplifies():
    without = pld.epsilon([Gaussian(1.0, 20)], DELTA)
    previous = 0.0
    for q in (0.001, 0.01, 0.1, 0.5, 0.9):
        now = pld.epsilon([PoissonGaussian(1.0, q, 20)], DELTA)
        assert previous < now < without
        previous = now


def test_events_of_all_kinds_compose_in_any_order():
    events = [PoissonGaussian(1.0, 0.05, 30), Gaussian(2.0), PoissonGaussian(0.8, 0.01, 10)]
    together = pld.epsilon(events, DELTA)
    assert together == pld.epsilon([*events[::-1][:2], *[PoissonGaussian(1.0, 0.05, 15)] * 2], DELTA)
    assert max(pld.epsilon([event], DELTA) for event in events) < together
    assert together < sum(pld.epsilon([event], DELTA / 3) for event in events)


def test_no_contributions_are_worse_than_two_opposite_ones():
    generator = np.random.default_rng(5)
    found = []
    for _ in range(60):
        q, sigma, alpha = generator.uniform(0.02, 1), generator.uniform(0.4, 2), generator.uniform(1, 4)
        x, y = (generator.uniform(0, 1) * np.array([math.cos(a), math.sin(a)]) for a in generator.uniform(0, 7, 2))
        worst = hockey_stick(alpha, q, sigma, (1, 0), (-1, 0))
        found.append(hockey_stick(alpha, q, sigma, x, y) / worst)
        assert found[-1] <= 1 + 1e-3
    assert hockey_stick(1.5, 0.1, 1, (1, 0), (0, 0)) < 0.9 * hockey_stick(1.5, 0.1, 1, (1, 0), (-1, 0))
    assert max(found) > 0.5


def test_nothing_costs_nothing_and_too_much_is_infinite():
    assert pld.epsilon([], DELTA) == 0
    for event in (Gaussian(1e-200), Gaussian(0.01), Gaussian(1.0, 10**6), PoissonGaussian(1e-3, 0.5)):
        assert pld.epsilon([event], DELTA) == math.inf
    assert pld.epsilon([PoissonGaussian(1e300, 0.5)], DELTA) < 1e-3
    assert pld.epsilon([Gaussian(1e300, 10)], DELTA) < 1e-3


def test_strong_releases_use_a_coarser_grid_and_stay_on_the_safe_side():
    exact = gdp.epsilon(20, DELTA)
    assert exact <= pld.epsilon([Gaussian(0.05)], DELTA) <= exact * 1.001
    assert math.isfinite(pld.epsilon([PoissonGaussian(0.2, 0.001, 10)], DELTA))


@pytest.mark.parametrize("delta", [0, 1, -1, math.nan, 1e-12, True])
def test_delta_is_a_probability_that_can_be_computed(delta):
    with pytest.raises(ValueError, match="delta"):
        pld.epsilon([Gaussian(1.0)], delta)


@pytest.mark.parametrize("bad", [0, -1, math.inf, math.nan, True, "1"])
def test_events_refuse_what_is_no_noise_multiplier(bad):
    for event in (Gaussian, lambda multiplier: PoissonGaussian(multiplier, 0.5)):
        with pytest.raises(ValueError, match="noise_multiplier"):
            event(bad)


@pytest.mark.parametrize("bad", [0, -0.1, 1.01, math.nan, True])
def test_a_sampling_probability_is_above_zero_and_at_most_one(bad):
    with pytest.raises(ValueError, match="sampling_probability"):
        PoissonGaussian(1.0, bad)


@pytest.mark.parametrize("bad", [0, 1.5, True])
def test_a_count_is_a_whole_number_from_one(bad):
    with pytest.raises(ValueError, match="count"):
        Gaussian(1.0, bad)
    with pytest.raises(ValueError, match="count"):
        PoissonGaussian(1.0, 0.5, bad)


@pytest.mark.parametrize("event", [Gaussian(0.1 + 0.2, 3), PoissonGaussian(1 / 3, 0.01, 7)])
def test_an_event_comes_back_from_json_bit_for_bit(event):
    assert pld.from_json(json.loads(json.dumps(pld.to_json(event)))) == event


@pytest.mark.parametrize(
    "value",
    [{}, {"event": "laplace"}, {"event": ["gaussian"]}, {"event": "gaussian"}, {"event": "gaussian", "sigma": 1.0}],
)
def test_other_json_is_not_an_event(value):
    with pytest.raises(ValueError, match="is not an event"):
        pld.from_json(value)


def test_another_meaning_of_replace_one_is_refused(monkeypatch):
    class Undoubled:
        def compose(self, event):
            self.sigma = event.noise_multiplier

        def get_epsilon(self, delta):
            return gdp.epsilon(1 / self.sigma, delta)

    monkeypatch.setattr(pld, "_accountant", lambda interval: Undoubled())
    pld._refuse_other_meaning.cache_clear()
    with pytest.raises(RuntimeError, match=r"install dp-accounting 0\.6"):
        pld.epsilon([Gaussian(1.2345)], DELTA)


def test_the_accountant_is_imported_when_it_is_needed(tmp_path):
    import subprocess

    code = "import sys, dpray.platform.privacy.ledger; sys.exit('dp_accounting' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=tmp_path).returncode == 0


SUM = ClippedSum(2.0, Unit.RECORD, 50, 1000)


def test_a_sampled_sum_is_one_object_with_its_event_and_noise():
    sampled = PoissonSampled(SUM, 0.02)
    assert (sampled.unit, sampled.dimension) == (Unit.RECORD, 50)
    assert sampled.event(0.5) == PoissonGaussian(math.nextafter(2.0, 0), 0.02)
    assert sampled.describe() == {**SUM.describe(), "mechanism": "poisson-sampled clipped sum", "sampling": 0.02}
    assert json.dumps(sampled.describe())


def test_noise_of_a_sampled_sum_covers_rounding_of_both_its_sides():
    noise = PoissonSampled(SUM, 0.02).noise(0.5, noisers=3)
    half = SUM.clip + noise.grid * math.sqrt(50) + SUM.summation_error
    assert noise.sigma >= 2 * half / 0.5
    assert noise.sigma == pytest.approx(SUM.noise(0.5, noisers=3).sigma, rel=1e-3)
    assert noise.noisers == 3


@pytest.mark.parametrize("other", [TopKVotes(2, 4), FeatureCovariance(1.0, 3, 10), ClippedMean(1.0, 5, 3), "sum"])
def test_only_clipped_sums_are_sampled(other):
    with pytest.raises(ValueError, match="Only a ClippedSum can be sampled"):
        PoissonSampled(other, 0.1)


@pytest.mark.parametrize("bad", [0, 2, math.nan])
def test_a_sampled_sum_needs_a_probability(bad):
    with pytest.raises(ValueError, match="sampling_probability"):
        PoissonSampled(SUM, bad)
