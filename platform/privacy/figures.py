"""Numbers in sentences, rounded to the safe side: what is spent or asked for upwards, what is left downwards."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction

_PLAIN = (1e-4, 1e16)  # written without an exponent


def significant(value: Fraction | float, digits: int, *, up: bool = True) -> str:
    """A number with so many significant digits at most, as `format(value, "g")` writes it, and rounded in a direction.

    Args:
        value: exact where it is a fraction; a float counts as the shortest decimal that names it, so 0.1 is a tenth.
        digits: from 1 to 15 for very small and very large numbers.
        up: towards more; else towards less.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "?" if math.isnan(value) else "∞" if value > 0 else "-∞"
    exact = value if isinstance(value, Fraction) else Fraction(Decimal(repr(float(value))))
    context = Context(prec=digits, rounding=ROUND_CEILING if up else ROUND_FLOOR)
    rounded = context.divide(Decimal(exact.numerator), Decimal(exact.denominator))
    if rounded and not _PLAIN[0] <= abs(rounded) < _PLAIN[1]:
        return f"{float(rounded):.{digits}g}"
    text = f"{rounded:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
