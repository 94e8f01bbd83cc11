"""Budgets and quanta: integers that add up exactly, and rounding that never favours the spender."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpray.platform.privacy import gdp
from dpray.platform.privacy.budget import (
    QUANTA_BITS,
    Budget,
    ceil_quanta,
    floor_quanta,
    part_of,
    remaining_epsilon,
    share,
    split,
    to_mu,
    upper_mu,
)

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines are shared

UNIT = 2**QUANTA_BITS
MU = st.floats(1e-8, 1e8)
QUANTA = st.integers(1, 2**140)


def test_a_quantum_is_two_to_the_minus_sixty():
    assert QUANTA_BITS == 60
    assert floor_quanta(1.0) == ceil_quanta(1.0) == 2**60
    assert floor_quanta(0.5) == 2**58


@RELAXED
@given(mu=MU)
def test_floor_and_ceil_enclose_mu_squared_exactly(mu):
    exact = Fraction(mu) ** 2 * UNIT
    assert floor_quanta(mu) <= exact <= ceil_quanta(mu)
    assert ceil_quanta(mu) - floor_quanta(mu) <= 1


@RELAXED
@given(quanta=QUANTA)
def test_to_mu_is_the_largest_float_that_the_quanta_pay_for(quanta):
    mu = to_mu(quanta)
    assert Fraction(mu) ** 2 * UNIT <= quanta
    assert Fraction(math.nextafter(mu, math.inf)) ** 2 * UNIT > quanta


@RELAXED
@given(quanta=QUANTA)
def test_upper_mu_is_the_smallest_float_that_pays_for_the_quanta(quanta):
    mu = upper_mu(quanta)
    assert Fraction(mu) ** 2 * UNIT >= quanta
    assert Fraction(math.nextafter(mu, 0.0)) ** 2 * UNIT < quanta


def test_upper_mu_of_nothing_is_nothing():
    assert upper_mu(0) == 0.0
    assert upper_mu(2**58) == 0.5
    with pytest.raises(ValueError, match="must be"):
        upper_mu(-1)


@RELAXED
@given(quanta=st.integers(0, 2**140), whole=QUANTA)
def test_a_part_is_the_next_float_on_its_side(quanta, whole):
    above, below, exact = part_of(quanta, whole), part_of(quanta, whole, up=False), Fraction(quanta, whole)
    assert Fraction(below) <= exact <= Fraction(above)
    assert above in {below, math.nextafter(below, math.inf)}


@RELAXED
@given(mu=MU)
def test_a_charge_for_mu_pays_for_mu(mu):
    assert to_mu(ceil_quanta(mu)) >= mu
    assert floor_quanta(mu) == 0 or to_mu(floor_quanta(mu)) <= mu


@RELAXED
@given(parts=st.integers(1, 300), extra=st.integers(0, 2**62))
def test_split_adds_up_exactly_and_evenly(parts, extra):
    quanta = parts + extra
    pieces = split(quanta, parts)
    assert len(pieces) == parts
    assert sum(pieces) == quanta
    assert max(pieces) - min(pieces) <= 1
    assert min(pieces) >= 1


def test_the_last_planned_step_always_fits_where_float_sums_refuse_it():
    refused_by_floats = 0
    for mu in (0.05, 0.3, 1.0, 1.7, 3.0):
        budget = floor_quanta(mu)
        for steps in range(1, 101):
            spent = 0
            for piece in split(budget, steps):
                spent += piece
                assert spent <= budget
            assert spent == budget
            total = 0.0
            for _ in range(steps):
                total += (mu / math.sqrt(steps)) ** 2
            refused_by_floats += total > mu**2
    assert refused_by_floats > 100  # the control: what this arithmetic is for


@RELAXED
@given(quanta=st.integers(2**20, 2**62), fraction=st.floats(0.001, 1.0))
def test_share_is_the_exact_fraction_rounded_down(quanta, fraction):
    part = share(quanta, fraction)
    assert part <= Fraction(fraction) * quanta < part + 1


def test_budget_is_rounded_down_to_quanta():
    budget = Budget(epsilon=3, delta=1e-5)
    exact = Fraction(gdp.mu(3, 1e-5)) ** 2 * UNIT
    assert budget.quanta is not None
    assert budget.quanta <= exact < budget.quanta + 1
    assert budget.mu <= gdp.mu(3, 1e-5)
    assert gdp.delta(budget.mu, 3) <= 1e-5
    assert str(budget) == "ε=3, δ=1e-05"


def test_budgets_are_values():
    budget = Budget(3, 1e-5)
    assert budget == Budget(np.float64(3.0), 1e-5)
    assert pickle.loads(pickle.dumps(budget)) == budget
    assert len({budget, Budget(3.0, 1e-5), Budget(3.0, 1e-6)}) == 2


def test_a_budget_that_is_not_private_says_so():
    budget = Budget(math.inf, 1e-5, non_private=True)
    assert budget.quanta is None
    assert budget.mu == math.inf
    assert "NOT PRIVATE" in str(budget)
    assert remaining_epsilon(budget, 2**70) == math.inf


def test_remaining_epsilon_is_that_of_the_unspent_mu_squared():
    budget = Budget(6.0, 1e-5)
    quanta = budget.quanta
    assert quanta is not None
    part = share(quanta, 0.3)
    expected = gdp.epsilon(math.sqrt(0.7) * gdp.mu(6.0, 1e-5), 1e-5)
    assert remaining_epsilon(budget, part) == pytest.approx(expected, rel=1e-9)
    assert remaining_epsilon(budget, part) > 6.0 - gdp.epsilon(to_mu(part), 1e-5)  # ε does not subtract
    assert remaining_epsilon(budget, part) < expected  # rounded down
    assert remaining_epsilon(budget, 0) == 6.0
    assert 6.0 - 1e-9 < remaining_epsilon(budget, 1) < 6.0
    assert remaining_epsilon(budget, quanta) == remaining_epsilon(budget, quanta + 1) == 0.0


@pytest.mark.parametrize("epsilon", [0, -1.0, math.nan, math.inf, -math.inf, True, "3", None])
def test_bad_epsilon_is_refused(epsilon):
    with pytest.raises(ValueError, match=r"epsilon"):
        Budget(epsilon, 1e-5)


@pytest.mark.parametrize("delta", [0, 1, -1e-5, 2.0, math.nan, math.inf, False, "1e-5", None])
def test_bad_delta_is_refused(delta):
    with pytest.raises(ValueError, match="delta must"):
        Budget(1.0, delta)
    with pytest.raises(ValueError, match="delta must"):
        Budget(math.inf, delta, non_private=True)


def test_contradictory_budgets_are_refused():
    with pytest.raises(ValueError, match="non_private=True"):
        Budget(math.inf, 1e-5)
    with pytest.raises(ValueError, match="is private"):
        Budget(3.0, 1e-5, non_private=True)
    with pytest.raises(ValueError, match="True or False"):
        Budget(3.0, 1e-5, non_private=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="too small to spend"):
        Budget(1e-12, 1e-12)


@pytest.mark.parametrize("bad", [0, -1, True, 1.0, "1", None, math.nan])
@pytest.mark.parametrize("call", [to_mu, lambda q: split(q, 1), lambda q: share(q, 0.5), lambda n: split(10, n)])
def test_bad_integers_are_refused(call, bad):
    with pytest.raises(ValueError, match="must be"):
        call(bad)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan, True])
@pytest.mark.parametrize("call", [floor_quanta, ceil_quanta])
def test_bad_mu_is_refused(call, bad):
    with pytest.raises(ValueError, match="mu must"):
        call(bad)


def test_what_would_spend_nothing_is_refused():
    with pytest.raises(ValueError, match="3 quanta cannot be split over 4 releases"):
        split(3, 4)
    with pytest.raises(ValueError, match="is nothing"):
        share(3, 0.1)


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1, math.nan, math.inf, True])
def test_bad_fractions_are_refused(fraction):
    with pytest.raises(ValueError, match=r"fraction|share"):
        share(100, fraction)


@pytest.mark.parametrize("spent", [-1, 1.0, True, None])
def test_a_bad_spend_never_raises_what_is_left(spent):
    with pytest.raises(ValueError, match="spent must"):
        remaining_epsilon(Budget(1.0, 1e-5), spent)
