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

from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

from dpray.platform.privacy import gdp
from dpray.platform.privacy.budget import to_mu, upper_mu
from dpray.platform.privacy.figures import significant
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
        f"{amount(account, remaining, up=False)} is left. The budget is ε = "
        f"{account.budget.epsilon:g} at δ = {account.budget.delta:g}; spent {amount(account, account.spent)}, set "
        f"aside by plans {amount(account, account.reserved)}{holders()}. Nothing was charged: ask for less, close runs "
        "that are over, or amend the budget, which starts a new claim."
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


def amount(account: AccountRow, quanta: int, *, up: bool = True) -> str:
    """An amount in words: share of the budget's μ², and ε it amounts to alone; what is left is rounded down."""
    limit = account.limit or 1
    if quanta <= 0:
        return "0 % of μ² (ε = 0)"
    delta = account.budget.delta
    epsilon = gdp.epsilon(upper_mu(quanta), delta) if up else gdp.lower_epsilon(to_mu(quanta), delta)
    share = _percent(Fraction(100 * quanta, limit), up=up)
    return f"{share} % of μ² (ε = {significant(epsilon, 4, up=up)} alone)"


def _ask(account: AccountRow, asked: int | None) -> str:
    return "an infinite μ² (a release without noise; ε = ∞)" if asked is None else amount(account, asked)


def _percent(share: Fraction, *, up: bool) -> str:
    """Six digits, and as many more as keep a share that is not 100 from reading as 100."""
    texts = (significant(share, digits, up=up) for digits in (6, 12, 18, 24))
    return next((text for text in texts if text != "100" or share == 100), "100")
