# ruff: noqa: N818 - the names are the outcomes that callers handle, and read as such
"""What a cohort refuses, each as an exception whose message is a sentence without a private value in it."""

from __future__ import annotations


class CohortError(Exception):
    """The cohort cannot be built, or cannot do what was asked; the message says what to do."""


class QuorumLost(CohortError):
    """Fewer clients answered than the quorum. Nothing was revealed; the key can be tried again, without a charge."""

    def __init__(self, message: str, *, answered: int = 0, quorum: int = 0) -> None:
        super().__init__(message)
        self.answered, self.quorum = answered, quorum


class ClientsRefused(CohortError):
    """A client's own guard refused: an old lease, an old ledger, a spend beyond its cap, a key used otherwise."""
