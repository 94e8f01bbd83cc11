"""The privacy account: budgets for ever, charges before releases, each release exactly once, on a hash chain."""

from dpray.platform.privacy.ledger.account import Account
from dpray.platform.privacy.ledger.attempt import Attempt, Release
from dpray.platform.privacy.ledger.chain import Entry, Head
from dpray.platform.privacy.ledger.copying import back_up, restore
from dpray.platform.privacy.ledger.declaring import LARGEST_CLIENT
from dpray.platform.privacy.ledger.errors import (
    BudgetConflict,
    BudgetExceeded,
    KeyConflict,
    LeaseLost,
    LedgerError,
    LedgerMissing,
    LedgerTampered,
    ParticipantsChanged,
    PlanConflict,
    ReleaseLost,
    RunClosed,
    ValuePruned,
)
from dpray.platform.privacy.ledger.ledger import Ledger
from dpray.platform.privacy.ledger.plan import Plan, PlannedRelease, ReleaseKey
from dpray.platform.privacy.ledger.population import Population
from dpray.platform.privacy.ledger.run import Run
from dpray.platform.privacy.ledger.standing import Standing
from dpray.platform.privacy.ledger.statement import ASSUMPTIONS, Amount, Claim, Line, Statement

__all__ = [
    "ASSUMPTIONS",
    "LARGEST_CLIENT",
    "Account",
    "Amount",
    "Attempt",
    "BudgetConflict",
    "BudgetExceeded",
    "Claim",
    "Entry",
    "Head",
    "KeyConflict",
    "LeaseLost",
    "Ledger",
    "LedgerError",
    "LedgerMissing",
    "LedgerTampered",
    "Line",
    "ParticipantsChanged",
    "Plan",
    "PlanConflict",
    "PlannedRelease",
    "Population",
    "Release",
    "ReleaseKey",
    "ReleaseLost",
    "Run",
    "RunClosed",
    "Standing",
    "Statement",
    "ValuePruned",
    "back_up",
    "restore",
]
