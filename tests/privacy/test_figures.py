"""Numbers in sentences: few digits, and never on the wrong side."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.platform.privacy.figures import significant


@pytest.mark.parametrize(
    ("value", "digits", "above", "below"),
    [
        (6.0, 6, "6", "6"),
        (0.1, 4, "0.1", "0.1"),
        (2.99119, 4, "2.992", "2.991"),
        (1e-5, 6, "1e-05", "1e-05"),
        (1.23456789e-5, 6, "1.23457e-05", "1.23456e-05"),
        (123456.7, 3, "124000", "123000"),
        (3.1e17, 1, "4e+17", "3e+17"),
        (Fraction(1, 3), 3, "0.334", "0.333"),
        (Fraction(-1, 3), 3, "-0.333", "-0.334"),
        (Fraction(100), 6, "100", "100"),
        (Fraction(10**20 - 1, 10**18), 24, "99.999999999999999999", "99.999999999999999999"),
        (0.0, 3, "0", "0"),
        (math.inf, 3, "∞", "∞"),
        (math.nan, 3, "?", "?"),
    ],
)
def test_numbers(value, digits, above, below):
    assert (significant(value, digits), significant(value, digits, up=False)) == (above, below)


@given(numerator=st.integers(0, 2**80), denominator=st.integers(1, 2**80), digits=st.integers(1, 15))
def test_a_number_is_never_on_the_wrong_side_and_never_far(numerator, denominator, digits):
    exact = Fraction(numerator, denominator)
    above = Fraction(significant(exact, digits))
    below = Fraction(significant(exact, digits, up=False))
    assert below <= exact <= above
    assert above - below <= exact * Fraction(10) ** (1 - digits)
