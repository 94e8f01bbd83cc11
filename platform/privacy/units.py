"""Whose replacement a release hides, and who adds the noise that hides it."""

from __future__ import annotations

from enum import StrEnum


class Unit(StrEnum):
    """Whose replacement a release hides, from fine to coarse."""

    RECORD = "record"
    USER = "user"
    CLIENT = "client"

    def covers(self, other: Unit) -> bool:
        """Whether this unit is finer than or equal to `other`: a release for `other` costs it the same μ."""
        order = list(Unit)
        return order.index(self) <= order.index(other)


class Regime(StrEnum):
    """Who adds the noise of a sum over clients, and hence what the server's code may see."""

    LOCAL = "local"
    """Every client's own message holds the whole noise."""
    DISTRIBUTED = "distributed"
    """Every client adds a share; the server sees the masked sum."""
    CENTRAL = "central"
    """A trusted server adds the noise once."""
