"""Accounts of kind `pld`: what was charged and planned, as events, and whether their composition fits.

Notation
    spend    (unit, quanta, sampling probability, count): releases or planned releases; quanta is μ² without sampling
    event    what `pld` composes: all unsampled spends of an account together are one Gaussian, exactly; sampled ones
             are Poisson-sampled Gaussians

A sampled release has no finite μ, so that m·μ says nothing about groups: an account that is coarser than it, m > 1, is
refused. An unsampled one costs m² times its μ², as everywhere.

Guarantee: an account admits a charge only if the composed ε at its δ stays within its budget, for every adaptive choice
of the releases: a fixed-budget filter over privacy loss distributions that dominate each release whatever came before
holds where the *order and parameters* of the releases are public and fixed in advance (a plan), and for unsampled
Gaussians in general. Whoever chooses parameters of sampled releases by looking at earlier ones leaves that guarantee.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import nextafter

from sqlalchemy import Connection

from dpray.platform.privacy import pld
from dpray.platform.privacy.budget import Budget, upper_mu
from dpray.platform.privacy.figures import significant
from dpray.platform.privacy.ledger import rows
from dpray.platform.privacy.ledger.charging import factor
from dpray.platform.privacy.ledger.errors import BudgetExceeded, LedgerError
from dpray.platform.privacy.ledger.rows import AccountRow, LineRow, Maxima
from dpray.platform.privacy.mechanisms import Unit

GDP, PLD = "gdp", "pld"
_DIGITS = 32


@dataclass(frozen=True)
class Spend:
    """`count` releases of `quanta` each, in the release's own unit; `sampling` 1.0: without sampling."""

    unit: Unit
    quanta: int
    sampling: float
    count: int = 1


def event(quanta: int, sampling: float, count: int = 1) -> pld.Event:
    """The event of releases of `quanta` each, its noise multiplier 1/μ rounded down."""
    multiplier = nextafter(1 / upper_mu(quanta), 0.0)
    if sampling == 1:
        return pld.Gaussian(multiplier, count)
    return pld.PoissonGaussian(multiplier, sampling, count)


def events(population: str, account: Unit, maxima: Maxima, spends: Iterable[Spend]) -> tuple[pld.Event, ...]:
    """What spends cost an account, as few events.

    Quanta of sampled spends are rounded up to 32 binary digits: a plan split into integers is then one event or two.

    Errors: LedgerError for a sampled spend where the account is coarser and m > 1, or m is not declared.
    """
    plain, sampled = 0, Counter[tuple[int, float]]()
    for spend in spends:
        each = factor(population, account, spend.unit, maxima)
        if spend.sampling == 1:
            plain += each * spend.quanta * spend.count
            continue
        if each > 1:
            raise LedgerError(
                f"A sampled {spend.unit}-level release has no finite μ, so that its cost to groups is not known: it "
                f"cannot be charged to the {account} account of population {population!r}, whose {account}s have more "
                f"than one {spend.unit}. Sample whole {account}s, or release without sampling."
            )
        sampled[_rounded_up(spend.quanta), spend.sampling] += spend.count
    whole = (event(plain, 1.0),) if plain else ()
    return whole + tuple(event(quanta, q, count) for (quanta, q), count in sorted(sampled.items()))


def charged(connection: Connection, population: str) -> list[Spend]:
    """Everything ever charged on a population of kind `pld`."""
    found = rows.spends(connection, population)
    return [Spend(unit, quanta, sampling, count) for unit, quanta, sampling, count in found if quanta is not None]


def planned(connection: Connection, population: str) -> list[Spend]:
    """Everything runs have set aside."""
    return [spend for line in rows.lines(connection, population) for spend in aside(line)]


def aside(line: LineRow) -> tuple[Spend, ...]:
    """What a line of a plan still sets aside."""
    if not line.remaining:
        return ()
    if line.sampling == 1:
        return (Spend(line.unit, line.remaining, 1.0),)
    return (Spend(line.unit, line.each, line.sampling, line.left),) if line.left else ()


def epsilon(population: str, account: Unit, delta: float, maxima: Maxima, spends: Iterable[Spend]) -> float:
    """Composed ε of spends at an account's δ, rounded up."""
    return pld.epsilon(events(population, account, maxima, spends), delta)


def admit(
    connection: Connection,
    population: str,
    account: AccountRow,
    spends: Iterable[Spend],
    what: str,
    holders: Callable[[], str] = str,
) -> None:
    """Refuse what does not fit.

    Args:
        spends: everything the account would then have paid and set aside, the ask included.
        what: the ask in words.
        holders: says in words which runs have set something aside.

    Errors: BudgetExceeded with both numbers in its message; LedgerError as `events`.
    """
    maxima = rows.maxima(connection, population)
    budget = account.budget
    after = epsilon(population, account.unit, budget.delta, maxima, spends)
    if after <= budget.epsilon:
        return
    now = epsilon(population, account.unit, budget.delta, maxima, charged(connection, population))
    both = charged(connection, population) + planned(connection, population)
    with_plans = epsilon(population, account.unit, budget.delta, maxima, both)
    raise BudgetExceeded(
        f"Population {population!r}, {account.unit} account (pld): {what} would take it to ε = {significant(after, 6)} "
        f"at δ = {budget.delta:g}, and the budget is ε = {budget.epsilon:g}. Spent is ε = {significant(now, 6)}, and "
        f"ε = {significant(with_plans, 6)} with what is set aside by plans{holders()}. Nothing was charged: ask for "
        "less, close runs that are over, or amend the budget, which starts a new claim.",
        population=population,
        unit=str(account.unit),
    )


def recorded(kind: str, quanta: int | None, sampling: float) -> dict[str, str | int | float] | None:
    """A release as the chain keeps it: its event on accounts of kind `pld`, nothing on others."""
    return None if kind != PLD or quanta is None else pld.to_json(event(quanta, sampling))


def check_kind(kind: str, budget: Budget) -> None:
    """Refuse what an account of a kind cannot be. Errors: LedgerError in a sentence."""
    if kind not in {GDP, PLD}:
        raise LedgerError(
            f"An account is of kind 'gdp' (exact μ²) or 'pld' (composed events, for sampling); {kind!r} was given."
        )
    if kind == PLD and budget.non_private:
        raise LedgerError("An account without a limit needs no composition: open it as kind 'gdp'.")
    if kind == PLD and budget.delta < pld.SMALLEST_DELTA:
        raise LedgerError(
            f"An account of kind 'pld' needs a δ of at least {pld.SMALLEST_DELTA:g}, and {budget.delta:g} was given: "
            "below that, the round-off of composed distributions is not negligible."
        )


def refuse_sampled(population: str, accounts: Iterable[AccountRow], what: str, quanta: int | None, q: float) -> None:
    """A sampled release is charged to accounts of kind `pld` only (without noise, any account calls it infinite)."""
    if q < 1 and quanta is not None and any(account.kind == GDP for account in accounts):
        raise LedgerError(
            f"{what} is sampled with probability {q:g} and has no finite μ, and the accounts of population "
            f"{population!r} are of kind 'gdp': nothing was charged. Release without sampling, or protect the "
            "population by accounts of kind 'pld' from the start."
        )


def _rounded_up(quanta: int) -> int:
    shift = max(0, quanta.bit_length() - _DIGITS)
    return -(-quanta >> shift) << shift
