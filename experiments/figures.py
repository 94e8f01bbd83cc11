"""Amounts as text, rounded to the safe side: what is spent, asked for or promised upwards, what is left downwards."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

_LEAST = 0.001


def number(value: Any, *, up: bool = True) -> str:
    """A number of at least 0 with three decimals, or two digits where it is smaller; accepts the text `inf`.

    Args:
        value: as the shortest decimal that names it, so that 0.1 is a tenth.
        up: towards more (a spend, a budget); else towards less (what is left). Only nothing is shown as 0 upwards.
    """
    given = float(value)
    if not math.isfinite(given):
        return "∞" if math.isinf(given) else "?"
    exact = Decimal(repr(given))
    if abs(given) >= _LEAST:
        text = f"{_rounded(exact, -3, up):f}"
        return text.rstrip("0").rstrip(".")
    if not given:
        return "0"
    return f"{float(_rounded(exact, exact.adjusted() - 1, up)):.2g}"


def percent(share: float, *, up: bool = True) -> str:
    """A share of μ² with one decimal, in the same direction, from the 15 digits that a float holds."""
    if not math.isfinite(share):
        return "∞" if math.isinf(share) else "?"
    return f"{_rounded(100 * Decimal(f'{share:.15g}'), -1, up):f} %"


def _rounded(exact: Decimal, exponent: int, up: bool) -> Decimal:
    return exact.quantize(Decimal(1).scaleb(exponent), ROUND_CEILING if up else ROUND_FLOOR)
