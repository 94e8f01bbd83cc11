"""The ring: exact at its edge, and refused beyond it from public numbers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.platform.cohort.errors import CohortError
from dpray.platform.cohort.masked.ring import SIZES, decode, encode, largest_sum, ring_bits

from .conftest import Sum, session


@pytest.mark.parametrize(("largest", "bits"), [(1, 32), (2**31 - 1, 32), (2**31, 64), (2**63 - 1, 64)])
def test_the_ring_is_the_smallest_that_cannot_wrap(largest, bits):
    assert ring_bits(largest) == bits
    assert 2**bits > 2 * largest


def test_a_sum_beyond_every_ring_is_refused():
    with pytest.raises(CohortError, match="coarser grid"):
        ring_bits(2**63)


def test_votes_ask_for_the_modulus_of_the_formula():
    """Modulus > 2(n + 12σ√(n/n_min))/g, all n answering."""
    n, n_min, sigma, grid = 100, 91, 4.4, 2.0**-12
    largest = largest_sum(n, sigma / math.sqrt(n_min), grid, n)
    assert 2 * largest >= 2 * (n + 12 * sigma * math.sqrt(n / n_min)) / grid
    assert ring_bits(largest) == 32


@pytest.mark.parametrize("bits", SIZES)
@given(data=st.data())
def test_integers_come_back_from_the_ring(bits, data):
    edge = 2 ** (bits - 1)
    values = data.draw(st.lists(st.integers(-edge, edge - 1), min_size=1, max_size=5))
    np.testing.assert_array_equal(decode(encode(np.array(values, dtype=np.int64), bits), bits), values)


@pytest.mark.parametrize("bits", SIZES)
def test_a_sum_at_the_edge_is_exact_and_one_step_beyond_wraps(bits):
    """The largest sum that `ring_bits` admits, and, as negative control, the first that it does not."""
    largest = 2 ** (bits - 1) - 1
    of = session(3, dimension=4, bits=bits)
    parts = np.array([[largest - 10, -largest + 10, 0, largest], [4, -4, 1, 0], [6, -6, -1, 0]])
    np.testing.assert_array_equal(Sum(of, parts).total(), [largest, -largest, 0, largest])
    parts[2, 3] = 1
    assert Sum(of, parts).total()[3] == -largest - 1


def test_parts_may_leave_the_ring_if_their_sum_does_not():
    of = session(3, dimension=1, bits=32)
    parts = np.array([[2**40], [5], [-(2**40)]])
    np.testing.assert_array_equal(Sum(of, parts).total(), [5])
