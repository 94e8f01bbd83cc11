"""What mechanisms of every kind do alike: keep checked constants, describe them, round a noise scale up."""

from __future__ import annotations

import math
from dataclasses import fields

from dpray.platform.privacy import checks
from dpray.platform.privacy.units import Unit


def keep(mechanism: object, **values: object) -> None:
    """Store checked values in a frozen dataclass."""
    for name, value in values.items():
        object.__setattr__(mechanism, name, value)


def parameters(mechanism: object) -> dict[str, str | int | float]:
    """The constants of a dataclass as plain JSON values."""
    values = {each.name: getattr(mechanism, each.name) for each in fields(mechanism)}  # type: ignore[arg-type]
    return {name: str(value) if isinstance(value, Unit) else value for name, value in values.items()}


def up(value: float) -> float:
    """Past the few roundings of a quotient and a root."""
    return max(value * (1 + 2.0**-50), math.nextafter(value, math.inf))


def ballot(votes: object, candidates: object) -> tuple[int, int]:
    """k and p of a ballot, checked.

    Raises:
        ValueError: k or p is not a whole number from 1, or k ≥ p (such a vote says nothing).
    """
    k = checks.integer("votes", votes, at_least=1)
    p = checks.integer("candidates", candidates, at_least=1)
    if k >= p:
        raise ValueError(f"{k} votes for {p} candidates choose nothing: give fewer votes than candidates.")
    return k, p
