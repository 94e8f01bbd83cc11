"""What a release costs each account, and whether it fits: integer arithmetic on μ², no database.

Notation (quanta of 2⁻⁶⁰)
    q          μ² of a release, in the release's own unit
    m          declared public maximum of records per user or client
    m²         factor for an account whose unit is coarser than the release's (group privacy: m·μ)
    limit      μ_B² of the account, rounded down; None: no budget (non-private)
    free       limit − spent − reserved

Guarantee: an account admits a charge only if everything charged and set aside stays within its limit, so that
Σ μ_i² ≤ μ_B² holds at every moment and for every adaptive choice of the μ_i (Smith & Thakurta 2022). An account whose
unit is finer than or equal to a release's is charged q: a neighbour in the finer unit is one in the coarser.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

from dpray.platform.privacy import gdp
from dpray.platform.privacy.budget import to_mu
from dpray.platform.privacy.ledger.errors import BudgetExceeded, LedgerError
from dpray.platform.privacy.ledger.rows import AccountRow, Maxima
from dpray.platform.privacy.mechanisms import Unit


@lru_cache(maxsize=1024)
def factor(population: str, account: Unit, release: Unit, maxima: Maxima) -> int:
    """What one quantum of a release costs an account: 1, or m² where the account's unit is coarser.

    Errors: LedgerError where m is needed and was not declared.
    """
    if account.covers(release):
        return 1
    most = maxima.records_per_user if account is Unit.USER else maxima.records_per_client
    if most is None:
        parameter = f"records_per_{account}"
        raise LedgerError(
            f"Population {population!r} has a {account} account, and a {release}-level release costs it m² times its "
            f"μ², m = the public maximum of records per {account}, which is not declared. Declare it: "
            f"ledger.population({population!r}, {parameter}=…)."
        )
    return most * most


def upper_mu(quanta: int) -> float:
    """The smallest float μ with μ² ≥ the quanta: spends are reported on the safe side."""
    mu = to_mu(quanta)
    if Fraction(mu) ** 2 < Fraction(quanta, 2**60):
        mu = math.nextafter(mu, math.inf)
    return mu


def admit(
    population: str, account: AccountRow, asked: int | None, own: int, what: str, holders: Callable[[], str] = str
) -> None:
    """Refuse what does not fit.

    Args:
        asked: cost to this account in quanta, group privacy included; None: infinite.
        own: what the asking run has set aside on this account for this ask.
        what: the ask in words, such as "release training/ClippedSum step 3 of run 'a'".
        holders: says in words, if it is needed, which runs have set something aside.

    Errors: BudgetExceeded with both numbers.
    """
    if account.limit is None:
        return
    free = account.limit - account.spent - account.reserved
    if asked is not None and asked - own <= free:
        return
    remaining = free + own
    message = (
        f"Population {population!r}, {account.unit} account: {what} asks for {_ask(account, asked)}, and "
        f"{amount(account, remaining)} is left. The budget is ε = {account.budget.epsilon:g} at δ = "
        f"{account.budget.delta:g}; spent {amount(account, account.spent)}, set aside by plans "
        f"{amount(account, account.reserved)}{holders()}. Nothing was charged: ask for less, close runs that are "
        "over, or amend the budget, which starts a new claim."
    )
    raise BudgetExceeded(
        message,
        population=population,
        unit=str(account.unit),
        asked=asked,
        spent=account.spent,
        reserved=account.reserved,
        budget=account.limit,
        remaining=remaining,
    )


def amount(account: AccountRow, quanta: int) -> str:
    """An amount in words: share of the budget's μ², and ε it amounts to alone."""
    limit = account.limit or 1
    if quanta <= 0:
        return "0 % of μ² (ε = 0)"
    epsilon = gdp.epsilon(upper_mu(quanta), account.budget.delta)
    return f"{_percent(Fraction(100 * quanta, limit))} % of μ² (ε = {epsilon:.4g} alone)"


def _ask(account: AccountRow, asked: int | None) -> str:
    return "an infinite μ² (a release without noise; ε = ∞)" if asked is None else amount(account, asked)


def _percent(share: Fraction) -> str:
    """Six digits, and as many more as keep a share that is not 100 from reading as 100."""
    value = float(share)
    text = f"{value:.6g}"
    return text if text != "100" or share == 100 else f"{value:.17g}"
