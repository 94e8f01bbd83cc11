"""Degree and threshold: the tails, the lemma on the ring, and what is refused."""

import itertools

import numpy as np
import pytest
from scipy.stats import hypergeom

from dpray.platform.cohort.errors import CohortError
from dpray.platform.cohort.masked.parameters import (
    CORRECTNESS,
    SECRECY,
    _all_of,
    _at_least,
    neighbours,
    parameters,
)


@pytest.mark.parametrize(("total", "marked", "drawn", "wanted"), [(99, 8, 20, 3), (999, 50, 40, 12), (20, 5, 8, 0)])
def test_tails_are_hypergeometric(total, marked, drawn, wanted):
    assert _at_least(total, marked, drawn, wanted) == pytest.approx(hypergeom.sf(wanted - 1, total, marked, drawn))


def test_all_of_is_the_product_of_the_table():
    product = np.prod([(30 - i) / (100 - i) for i in range(20)])
    assert _all_of(100, 30, 20) == pytest.approx(product)
    assert _all_of(100, 19, 20) == 0


@pytest.mark.parametrize(
    ("clients", "quorum", "colluders"),
    [(14, 12, 1), (100, 92, 1), (100, 90, 10), (1000, 950, 50), (1000, 990, 1), (10_000, 9500, 500)],
)
def test_what_is_found_keeps_its_promises(clients, quorum, colluders):
    """Recomputed from SciPy's tails, for every line of the table."""
    found = parameters(clients, quorum, colluders, 8 if clients < 20 else None)
    k, t, lost = found.degree, found.threshold, max(clients - quorum, clients // 20)
    assert k % 2 == 0
    assert k < clients - 1
    both = clients * hypergeom.sf(2 * t - k - 2, clients - 1, colluders, k)
    stuck = clients * hypergeom.sf(k - t, clients - 1, lost, k)
    pairs = clients * (clients - 1) / 2
    split = pairs * np.prod([max(colluders + lost - i, 0) / (clients - i) for i in range(k)])
    assert both + split <= SECRECY * (1 + 1e-6)
    assert stuck <= CORRECTNESS * (1 + 1e-6)
    assert found.exposed == pytest.approx(both + split, rel=1e-6, abs=1e-30)
    assert found.stuck == pytest.approx(stuck, rel=1e-6, abs=1e-30)


def test_the_degree_grows_with_the_logarithm_of_the_cohort():
    """At 5 % losses and 5 % colluders: ten times the clients ask for a few neighbours more."""
    small, large = parameters(1000, 950, 50), parameters(10_000, 9500, 500)
    assert large.degree <= small.degree + 20


def test_one_share_fewer_would_not_do():
    """Negative control: at the threshold below, both secrets of a party could be put together too often."""
    found = parameters(1000, 950, 50)
    less = found.threshold - 1
    both = 1000 * hypergeom.sf(2 * less - found.degree - 2, 999, 50, found.degree)
    assert both > SECRECY / 2


@pytest.mark.parametrize(("clients", "degree"), [(9, 4), (8, 2), (10, 6)])
def test_without_two_long_runs_on_the_ring_the_survivors_are_connected(clients, degree):
    """Every subset of lost parties, by hand: the lemma that the bound on falling apart stands on."""
    around = neighbours(list(range(clients)), degree)
    for size in range(clients - 1):
        for gone in itertools.combinations(range(clients), size):
            left = set(range(clients)) - set(gone)
            if _connected(left, around):
                continue
            runs = _runs(gone, clients)
            assert sum(run >= degree // 2 for run in runs) >= 2


def _connected(left, around):
    seen, new = set(), {min(left)}
    while new:
        seen |= new
        new = {other for party in new for other in around[party] if other in left} - seen
    return seen == left


def _runs(gone, clients):
    """Lengths of the longest runs of lost parties around the ring."""
    gone, lengths = set(gone), []
    for start in gone:
        if (start - 1) % clients not in gone:
            length = 0
            while (start + length) % clients in gone:
                length += 1
            lengths.append(length)
    return lengths


@pytest.mark.parametrize(("clients", "degree"), [(9, 4), (10, 9), (50, 20), (7, 6)])
def test_everybody_has_k_neighbours_and_is_theirs(clients, degree):
    order = list(np.random.default_rng(clients).permutation(clients).tolist())
    around = neighbours(order, degree)
    for party, others in around.items():
        assert len(set(others) - {party}) == degree
        assert all(party in around[other] for other in others)


@pytest.mark.parametrize(("clients", "quorum", "colluders", "threshold"), [(6, 4, 1, 4), (3, 3, 1, 3), (20, 14, 6, 14)])
def test_everybody_with_everybody_leaves_nothing_to_chance(clients, quorum, colluders, threshold):
    found = parameters(clients, quorum, colluders, active=True)
    assert found.complete
    assert (found.threshold, found.exposed, found.stuck) == (threshold, 0, 0)
    assert 2 * found.threshold > clients + colluders


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((6, 3, 1), "needs 4 of them to open it, and the quorum is 3"),
        ((6, 4, 4), "needs 6 of them"),
        ((4, 1, 1), "quorum of at least 2"),
        ((4, 5, 1), "quorum of at least 2"),
        ((4, 4, 0), "at least 1 colluder"),
        ((100, 92, 5, 20), "20 neighbours each might not open after 8 losses"),
        ((100, 60, 1, 8), "8 neighbours each might fall apart"),
        ((100, 100, 60, 8), "8 neighbours each"),
        ((100, 92, 1, 1), "degree is at least 2"),
    ],
)
def test_what_no_parameters_do_for_is_refused_with_the_numbers(given, sentence):
    with pytest.raises(CohortError, match=sentence):
        parameters(*given)
