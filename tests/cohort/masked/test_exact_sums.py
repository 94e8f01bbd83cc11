"""The masked sum is the exact sum over survivors, whoever is lost, up to the threshold, and nothing beyond it."""

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dpray.platform.cohort.errors import CohortError
from dpray.platform.cohort.masked.messages import TooFew
from dpray.platform.cohort.masked.parameters import parameters

from .conftest import Sum, session, vectors

CASES = pytest.mark.parametrize("cases", [100, pytest.param(500, marks=pytest.mark.slow)])
BEFORE = ("advertise", "share", "mask")


def try_out(cases, attack):
    """Have hypothesis look for a case that fails."""
    relaxed = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    settings(max_examples=cases, deadline=None, suppress_health_check=relaxed)(given(data=st.data())(attack))()


@st.composite
def cohorts(draw):
    """(session, parties in the order in which they would be lost)."""
    clients = draw(st.integers(2, 16))
    colluders = draw(st.integers(1, 3))
    quorum = draw(st.integers(max(2, clients - 5), clients))
    active, degree = draw(st.booleans()), draw(st.sampled_from([None, 4, 6, 8]))
    try:
        parameters(clients, quorum, colluders, degree, active)
    except CohortError:
        assume(False)
    bits = draw(st.sampled_from([32, 64]))
    of = session(clients, quorum, colluders, draw(st.integers(1, 4)), bits=bits, degree=degree, active=active)
    return of, draw(st.permutations(range(clients)))


def spread(draw, order, number, phases):
    """Deal the first `number` parties of `order` to phases in which they are lost."""
    lost = {phase: set() for phase in phases}
    for party in order[:number]:
        lost[draw(st.sampled_from(phases))].add(party)
    return lost


@CASES
def test_the_sum_over_survivors_is_exact_for_losses_in_every_phase(cases):
    def attack(data):
        of, order = data.draw(cohorts())
        number = data.draw(st.integers(0, of.clients - of.quorum))
        phases = (*BEFORE, "agree", "unmask") if of.active else (*BEFORE, "unmask")
        lost = spread(data.draw, order, number, phases)
        masked = Sum(of, vectors(of, number, 2**20), lost)
        total = masked.total()
        gone = set().union(*(lost[phase] for phase in BEFORE))
        survivors = sorted(set(range(of.clients)) - gone)
        assert list(masked.survivors.members) == survivors
        np.testing.assert_array_equal(total, masked.messages[survivors].sum(axis=0))

    try_out(cases, attack)


@CASES
def test_with_one_party_too_few_nothing_is_opened(cases):
    """Lost before the unmasking: below the quorum no party gives a share. Lost in it: below t no secret is opened."""

    def attack(data):
        of, order = data.draw(cohorts())
        if data.draw(st.booleans()):
            lost = spread(data.draw, order, of.clients - of.quorum + 1, BEFORE)
        else:
            found = parameters(of.clients, of.quorum, of.colluders, of.degree, of.active)
            assume(found.complete)
            lost = {"unmask": set(order[: of.clients - found.threshold + 1])}
        masked = Sum(of, vectors(of), lost)
        with pytest.raises(TooFew):
            masked.total()
        if "unmask" not in lost:
            assert not any(type(message).__name__ == "Unmasking" for message in masked.record)

    try_out(cases, attack)


def test_losses_in_the_unmasking_are_borne_down_to_the_threshold():
    """6 clients, threshold 4: two lost after their masked input, whose messages are in the sum; a third is too many."""
    of = session(6)
    messages = vectors(of)
    np.testing.assert_array_equal(Sum(of, messages, {"unmask": {1, 4}}).total(), messages.sum(axis=0))
    with pytest.raises(TooFew, match="3 shares, and 4 open it"):
        Sum(of, messages, {"unmask": {1, 4, 5}}).total()


def test_a_larger_cohort_has_a_sparse_graph_and_an_exact_sum():
    of = session(60, 56, 1, 20)
    masked = Sum(of, vectors(of), {"share": {7}, "mask": {3, 9}, "unmask": {11}})
    total = masked.total()
    assert parameters(60, 56, 1).degree < 20
    gone = {3, 7, 9}
    np.testing.assert_array_equal(total, masked.messages[[i for i in range(60) if i not in gone]].sum(axis=0))
