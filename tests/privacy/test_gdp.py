"""Exact Gaussian DP: golden numbers, a 60-digit oracle, dp-accounting, and the safe side of every rounding."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import dp_accounting
import mpmath
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from scipy.special import ndtr, ndtri

from dpray.platform.privacy import gdp

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines are shared

GOLDEN = Path(__file__).parents[1] / "golden"


def golden(section: str) -> list[dict]:
    return json.loads((GOLDEN / f"{section}.json").read_text())["rows"]


def true_delta(mu: float, epsilon: float) -> mpmath.mpf:
    """δ(ε) = Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2), term by term, in 400 digits."""
    with mpmath.workdps(400):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)

        def upper(x: mpmath.mpf) -> mpmath.mpf:
            return mpmath.erfc(x / mpmath.sqrt(2)) / 2

        return upper(e / m - m / 2) - mpmath.exp(e) * upper(e / m + m / 2)


@pytest.mark.parametrize("row", golden("gdp_epsilon"), ids=str)
def test_epsilon_golden(row):
    assert gdp.epsilon(row["mu"], row["delta"]) == pytest.approx(row["epsilon"], rel=1e-9)


@pytest.mark.parametrize("row", golden("gdp_sigma_over_sensitivity"), ids=str)
def test_mu_golden(row):
    assert 1 / gdp.mu(row["epsilon"], row["delta"]) == pytest.approx(row["sigma"], rel=1e-9)


@pytest.mark.parametrize("row", golden("compose"), ids=lambda row: f"{len(row['mus'])} releases")
def test_compose_golden(row):
    assert gdp.compose(row["mus"]) == pytest.approx(row["mu"], rel=1e-12)
    assert gdp.epsilon(gdp.compose(row["mus"]), 1e-5) == pytest.approx(row["epsilon"], rel=1e-9)


@pytest.mark.parametrize("row", golden("sofim_client_noise"), ids=str)
def test_rounds_share_mu_squared_golden(row):
    per_round = gdp.mu(row["epsilon"], row["delta"]) / math.sqrt(row["T"])
    assert 2 * row["C"] / per_round == pytest.approx(row["client_sum_std_local"], rel=1e-9)


@pytest.mark.parametrize("row", golden("gibo_noise_std"), ids=str)
def test_search_steps_share_mu_squared_golden(row):
    assert 2 * row["B"] / row["n"] / (row["mu"] / math.sqrt(row["T"])) == pytest.approx(row["sigma"], rel=1e-12)


# z = ε/μ − μ/2 from where δ is nearly one to where it is nearly the smallest float64.
ORACLE_POINTS = [
    (mu, epsilon)
    for mu in (1e-12, 1e-6, 1e-3, 0.05, 0.5, 1.0, 1.4, 1.5, 2.0, 7.0, 40.0, 300.0)
    for z in (-3.0, -0.4, 0.0, 0.7, 3.0, 9.0, 20.0, 37.0)
    if (epsilon := mu * (z + mu / 2)) >= 0
]


@pytest.mark.parametrize(("mu", "epsilon"), ORACLE_POINTS)
def test_delta_is_accurate_relative_to_itself(mu, epsilon):
    exact = true_delta(mu, epsilon)
    tolerance = 5e-13 * max(1, mu)
    assert abs(gdp.log_delta(mu, epsilon) - mpmath.log(exact)) < tolerance
    if exact > 1e-300:  # below, float64 itself has fewer digits
        assert abs(gdp.delta(mu, epsilon) / exact - 1) < tolerance


@pytest.mark.parametrize(("mu", "epsilon"), [(0.3, 30.0), (1.0, 60.0), (3.0, 400.0)])
def test_log_delta_goes_on_below_the_smallest_float(mu, epsilon):
    assert gdp.delta(mu, epsilon) == 0.0
    assert gdp.log_delta(mu, epsilon) == pytest.approx(float(mpmath.log(true_delta(mu, epsilon))), rel=1e-12)


@pytest.mark.parametrize("mu", [1e-9, 1e-3, 0.2, 1.0, 6.0, 100.0])
@pytest.mark.parametrize("delta", [1e-300, 1e-30, 1e-9, 1e-5, 0.01, 0.4])
def test_epsilon_is_on_the_safe_side_of_the_truth_and_close_to_it(mu, delta):
    result = gdp.epsilon(mu, delta)
    assert true_delta(mu, result) <= delta
    assert result == 0 or true_delta(mu, result * (1 - 1e-9)) > delta


@pytest.mark.parametrize("mu", [1e-9, 1e-3, 0.2, 1.0, 6.0, 100.0])
@pytest.mark.parametrize("delta", [1e-300, 1e-30, 1e-9, 1e-5, 0.01, 0.4])
def test_lower_epsilon_is_below_the_truth_and_close_to_it(mu, delta):
    result = gdp.lower_epsilon(mu, delta)
    assert result == 0 or true_delta(mu, result) >= delta
    assert true_delta(mu, result * (1 + 1e-9)) < delta


def test_lower_epsilon_at_the_ends_of_the_range():
    assert gdp.lower_epsilon(0.0, 1e-5) == gdp.lower_epsilon(1e-6, 1e-5) == 0.0
    assert gdp.lower_epsilon(math.inf, 1e-5) == gdp.lower_epsilon(1e200, 1e-5) == math.inf


@pytest.mark.parametrize("epsilon", [0.0, 1e-9, 1e-3, 0.1, 1.0, 12.0, 500.0])
@pytest.mark.parametrize("delta", [1e-300, 1e-30, 1e-9, 1e-5, 0.01, 0.4])
def test_mu_is_on_the_safe_side_of_the_truth_and_close_to_it(epsilon, delta):
    result = gdp.mu(epsilon, delta)
    assert true_delta(result, epsilon) <= delta
    assert true_delta(result * (1 + 1e-9), epsilon) > delta


MU = st.floats(1e-9, 1e4)
DELTA = st.floats(1e-300, 1 - 1e-9)


@settings(RELAXED, max_examples=200)
@given(mu=MU, delta=DELTA)
def test_epsilon_never_promises_too_much(mu, delta):
    assert gdp.delta(mu, gdp.epsilon(mu, delta)) <= delta


@settings(RELAXED, max_examples=200)
@given(epsilon=st.floats(0, 1e6), delta=DELTA)
def test_mu_never_allows_too_much(epsilon, delta):
    assert gdp.delta(gdp.mu(epsilon, delta), epsilon) <= delta


@settings(RELAXED, max_examples=100)
@given(mu=st.floats(0.01, 100), delta=st.floats(1e-12, 0.01))
def test_there_and_back_loses_nothing_and_gains_nothing(mu, delta):
    assume(gdp.delta(mu, 0.0) > 1.001 * delta)  # else ε is 0 for a range of μ
    back = gdp.mu(gdp.epsilon(mu, delta), delta)
    assert back == pytest.approx(mu, rel=1e-8)


@pytest.mark.parametrize("delta", [1e-10, 1e-7, 1e-5, 1e-3])
@pytest.mark.parametrize("epsilon", [0.05, 0.5, 1.0, 4.0, 15.0])
def test_agrees_with_dp_accounting(epsilon, delta):
    sigma = 1 / gdp.mu(epsilon, delta)
    assert sigma == pytest.approx(dp_accounting.get_sigma_gaussian(epsilon, delta), rel=1e-6)
    assert gdp.epsilon(1 / sigma, delta) == pytest.approx(dp_accounting.get_epsilon_gaussian(sigma, delta), rel=1e-6)


def test_ends_of_the_range():
    assert gdp.delta(0.0, 0.0) == 0.0
    assert gdp.delta(0.0, math.inf) == 0.0
    assert gdp.delta(2.0, math.inf) == 0.0
    assert gdp.delta(math.inf, 3.0) == 1.0
    assert gdp.delta(1e-310, 1.0) == 0.0
    assert gdp.epsilon(0.0, 1e-5) == 0.0
    assert gdp.epsilon(1e-6, 1e-5) == 0.0
    assert gdp.epsilon(math.inf, 1e-5) == math.inf
    assert gdp.epsilon(1e200, 1e-5) == math.inf
    assert gdp.mu(math.inf, 1e-5) == math.inf
    assert gdp.mu(0.0, 0.5) == pytest.approx(2 * ndtri(0.75), rel=1e-9)
    assert gdp.compose([]) == 0.0
    assert gdp.compose([0.0, math.inf]) == math.inf


@pytest.mark.parametrize("mu", [1e6, 1e9])
def test_huge_mu_keeps_the_safe_side(mu):
    epsilon = gdp.epsilon(mu, 1e-5)
    assert gdp.delta(mu, epsilon) <= 1e-5
    assert epsilon == pytest.approx(mu * mu / 2, rel=1e-4)


def test_pure_epsilon_enters_as_the_exact_mu():
    assert gdp.mu_from_pure(1.0) == pytest.approx(1.232, abs=5e-4)
    assert gdp.mu_from_pure(0.25) == pytest.approx(0.313, abs=5e-4)
    assert gdp.mu_from_pure(math.inf) == math.inf


@pytest.mark.parametrize("epsilon", [1e-12, 1e-3, 0.25, 1.0, 1.0000001, 8.0, 30.0, 300.0, 699.0, 701.0, 1e5])
def test_pure_epsilon_is_rounded_up_and_tight(epsilon):
    result = gdp.mu_from_pure(epsilon)

    def log_upper_tail(mu: float) -> mpmath.mpf:
        return mpmath.log(mpmath.erfc(mpmath.mpf(mu) / 2 / mpmath.sqrt(2)) / 2)

    with mpmath.workdps(60):
        allowed = -mpmath.log1p(mpmath.exp(mpmath.mpf(epsilon)))  # log(1 − e^ε/(1 + e^ε))
        assert log_upper_tail(result) <= allowed
        assert log_upper_tail(result * (1 - 1e-12)) > allowed


def dominated(mu: float, epsilon: float) -> bool:
    """Whether every test of an ε-DP release errs at least as much as the best test of a μ-GDP release."""
    alpha = np.linspace(1e-6, 1 - 1e-6, 20001)
    pure = np.maximum(1 - math.exp(epsilon) * alpha, math.exp(-epsilon) * (1 - alpha))
    return bool(np.all(pure >= ndtr(ndtri(1 - alpha) - mu) - 1e-12))


@pytest.mark.parametrize("epsilon", [0.25, 1.0, 3.0])
def test_pure_epsilon_is_covered_by_its_mu_but_not_by_the_zcdp_number(epsilon):
    assert dominated(gdp.mu_from_pure(epsilon), epsilon)
    zcdp = math.sqrt(2 * epsilon**2 / 8)  # ρ = ε²/8 = μ²/2
    assert not dominated(zcdp, epsilon)


@settings(max_examples=300, deadline=None)
@given(mu=st.floats(1e-8, 38.0))
def test_pure_epsilon_spends_what_it_may_and_no_more(mu):
    epsilon = gdp.pure_epsilon(mu)
    assert mu * (1 - 1e-11) < gdp.mu_from_pure(epsilon) <= mu


def test_pure_epsilon_of_an_infinite_mu_is_infinite():
    assert gdp.pure_epsilon(math.inf) == math.inf


BAD_NUMBERS = [math.nan, -1.0, True, "1", None, 1j]


@pytest.mark.parametrize("bad", BAD_NUMBERS)
@pytest.mark.parametrize(
    "call",
    [
        lambda x: gdp.delta(x, 1.0),
        lambda x: gdp.delta(1.0, x),
        lambda x: gdp.epsilon(x, 1e-5),
        lambda x: gdp.epsilon(1.0, x),
        lambda x: gdp.mu(x, 1e-5),
        lambda x: gdp.mu(1.0, x),
        lambda x: gdp.compose([0.1, x]),
        gdp.mu_from_pure,
        gdp.pure_epsilon,
    ],
)
def test_bad_numbers_are_refused(call, bad):
    with pytest.raises(ValueError, match=r"must .* was given|must .* were given"):
        call(bad)


@pytest.mark.parametrize("bad", [0.0, 1.0, 2.0, math.inf])
@pytest.mark.parametrize(
    "call", [lambda d: gdp.epsilon(1.0, d), lambda d: gdp.mu(1.0, d), lambda d: gdp.mu(math.inf, d)]
)
def test_delta_outside_the_open_unit_interval_is_refused(call, bad):
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        call(bad)


@settings(max_examples=500, deadline=None)
@given(mu=st.floats(0.0, 1e10), epsilon=st.floats(0.0, 1e30))
def test_the_smallest_and_largest_numbers_have_a_delta(mu, epsilon):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gdp.log_delta(mu, epsilon) <= 0


@pytest.mark.parametrize(("mu", "epsilon"), [(5e-324, 0.0), (2.7e-93, 5e22), (1e-300, 1e-300), (1e-200, 1e100)])
def test_differences_below_the_smallest_float_are_zero_or_tiny(mu, epsilon):
    assert gdp.delta(mu, epsilon) <= 1e-90


def test_numbers_too_large_for_a_float_are_refused():
    with pytest.raises(ValueError, match="must fit a float64"):
        gdp.delta(10**400, 1.0)


def test_zero_pure_epsilon_is_refused():
    with pytest.raises(ValueError, match="greater than zero"):
        gdp.mu_from_pure(0.0)


def test_numpy_numbers_are_numbers():
    assert gdp.delta(np.float32(1.0), np.int64(1)) == gdp.delta(1.0, 1.0)
