# ruff: noqa: N818 - the names are the outcomes that callers handle, and read as such
"""What the ledger refuses, each as an exception whose message is a sentence.

Every refusal happens before anything is revealed, and leaves the ledger as it was. The exceptions survive pickling, so
that a refusal in another process reads the same in this one.
"""

from __future__ import annotations


class LedgerError(Exception):
    """The ledger cannot do what was asked; the message says what was given, what is allowed and what to do."""


class LedgerMissing(LedgerError):
    """There is no ledger yet at an address that could hold one, and none was to be made."""


class BudgetExceeded(LedgerError):
    """A charge, a plan or an account would pass a lifetime budget. Nothing was charged, computed or set aside.

    Attributes (all in quanta of μ², 2⁻⁶⁰ each; `asked` is None where the ask is infinite):
        population, unit: the account that refused.
        asked: what the account would be charged, group privacy included.
        spent, reserved: what is charged already, and what plans of runs have set aside.
        budget: the lifetime budget.
        remaining: budget − spent − reserved, and what the asking run had set aside for this ask.
    """

    def __init__(
        self,
        message: str,
        *,
        population: str = "",
        unit: str = "",
        asked: int | None = None,
        spent: int = 0,
        reserved: int = 0,
        budget: int = 0,
        remaining: int = 0,
    ) -> None:
        super().__init__(message)
        self.population, self.unit = population, unit
        self.asked, self.spent, self.reserved = asked, spent, reserved
        self.budget, self.remaining = budget, remaining


class BudgetConflict(LedgerError):
    """An account was reopened with another budget, or amended below what is spent and set aside."""


class KeyConflict(LedgerError):
    """A release key was used again for another public request (query, mechanism, spend or trust mode)."""


class PlanConflict(LedgerError):
    """A run that has a plan, or has released already, was given another plan."""


class LeaseLost(LedgerError):
    """Another process has opened the run since: this one holds an old epoch and may not charge or commit."""


class ReleaseLost(LedgerError):
    """The release passed its point of no return and cannot be repeated: its charge stands, its value never comes."""


class ParticipantsChanged(LedgerError):
    """A release was committed to one participant set and then to another."""


class LedgerTampered(LedgerError):
    """The hash chain, a table or a value file is not what the ledger wrote."""


class RunClosed(LedgerError):
    """The run is finished: its stored values can be read, nothing new can be released."""


class ValuePruned(LedgerError):
    """The value was released, stored and later dropped on purpose, because a checkpoint stands for it."""
