"""Refusals shared by the privacy core: what a number must be before it may decide about privacy.

A budget guard that `0`, NaN, a boolean or a negative number switches off is no guard, so every public function of this
package passes its arguments through here. All refusals are `ValueError`s with a sentence.
"""

from __future__ import annotations

import math
from numbers import Integral, Real


def real(name: str, value: object) -> float:
    """Return `value` as a float; booleans, NaN and everything that is not a real number are refused (`ValueError`)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, but {value!r} of type {type(value).__name__} was given.")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name} must fit a float64, but an integer beyond 1e308 was given.") from None
    if math.isnan(number):
        raise ValueError(f"{name} must be a number, but NaN was given.")
    return number


def non_negative(name: str, value: object) -> float:
    """Return `value` as a float in [0, inf]; `ValueError` otherwise."""
    number = real(name, value)
    if number < 0:
        raise ValueError(f"{name} must not be negative, but {number} was given.")
    return number


def positive(name: str, value: object, *, infinite: bool = False) -> float:
    """Return `value` as a float above zero; infinity only where `infinite` allows it; `ValueError` otherwise."""
    number = real(name, value)
    if number <= 0:
        raise ValueError(f"{name} must be greater than zero, but {number} was given.")
    if math.isinf(number) and not infinite:
        raise ValueError(f"{name} must be finite, but infinity was given.")
    return number


def probability(name: str, value: object) -> float:
    """Return `value` as a float strictly between 0 and 1; `ValueError` otherwise."""
    number = real(name, value)
    if not 0 < number < 1:
        raise ValueError(f"{name} must lie strictly between 0 and 1, but {number} was given.")
    return number


def integer(name: str, value: object, *, at_least: int) -> int:
    """Return `value` as an int of at least `at_least`; booleans and floats (2.0 too) are refused (`ValueError`)."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be a whole number, but {value!r} of type {type(value).__name__} was given.")
    number = int(value)
    if number < at_least:
        raise ValueError(f"{name} must be at least {at_least}, but {number} was given.")
    return number
