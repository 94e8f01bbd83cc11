"""Where an account stands before a run, looked up without creating or changing anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dpray.experiments.figures import number, percent
from dpray.experiments.kinds import AnyRecipe
from dpray.experiments.parts import Foreseen
from dpray.experiments.reading import RecipeError
from dpray.platform.privacy.budget import Budget, to_mu, upper_mu
from dpray.platform.privacy.gdp import epsilon, lower_epsilon
from dpray.platform.privacy.ledger import (
    Account,
    BudgetConflict,
    BudgetExceeded,
    Head,
    Ledger,
    LedgerError,
    LedgerMissing,
    LedgerTampered,
    Population,
)
from dpray.platform.privacy.ledger.composing import GDP, PLD
from dpray.platform.privacy.mechanisms import Unit
from dpray.platform.tracking.address import shown

SQLITE = "sqlite:///"
_MOST_SHOWN = 3


@dataclass(frozen=True)
class Standing:
    """What an account has spent, what plans have set aside, and what its budget is, in quanta (None: infinite).

    `epsilon` is what an account of kind `pld` has spent, whose quanta say nothing about it.
    """

    budget: int | None
    spent: int
    reserved: int
    epsilon: float = 0.0

    @property
    def remaining(self) -> int | None:
        """Free of every reservation."""
        return None if self.budget is None else self.budget - self.spent - self.reserved


def ledger_url(recipe: AnyRecipe, workspace: Path) -> str:
    """The recipe's ledger, a relative SQLite path taken from the workspace."""
    return in_workspace(recipe.ledger, workspace)


def in_workspace(url: str, workspace: Path) -> str:
    """A relative SQLite path taken from the workspace; any other address as it is."""
    path = Path(url.removeprefix(SQLITE)).expanduser()
    if not url.startswith(SQLITE) or not path.name or path.name == ":memory:" or path.is_absolute():
        return url
    return SQLITE + str((workspace / path).absolute())


def look(
    recipe: AnyRecipe, workspace: Path, forecast: Foreseen, run: str | None = None, *, fits: bool = True
) -> Standing:
    """Where the recipe's account stands, after checking that the forecast fits every account of its population.

    Args:
        run: a run that may have set the forecast aside already; its plan is then not asked for again.
        fits: whether to refuse a forecast that does not fit.

    Raises:
        LedgerError, RecipeError: what opening the run would be refused for.
    """
    new = Standing(forecast.budget.quanta, 0, 0)
    with existing(recipe, workspace) as population:
        if population is None:
            return new
        population.check(records_per_client=recipe.population.records_per_client, declaration=forecast.declaration)
        _check_kind(population, forecast)
        planned = run is not None and run in population.runs()
        found = None
        for account in population.accounts():
            if account.unit is Unit(recipe.population.unit):
                _check_budget(population, account, forecast.budget)
                composed = account.spent_epsilon if account.kind == PLD else 0.0
                found = Standing(account.budget.quanta, account.spent, account.reserved, composed)
            if fits and not planned:
                _check_fits(recipe, population, account, forecast)
        return found or new


@contextmanager
def existing(recipe: AnyRecipe, workspace: Path) -> Iterator[Population | None]:
    """The recipe's population in its ledger, verified; None where there is none yet.

    Raises:
        LedgerTampered: the ledger is not what was written.
    """
    ledger = _opened(ledger_url(recipe, workspace))
    if ledger is None:
        yield None
        return
    try:
        problems = ledger.verify()
        if problems:
            more = f" (and {len(problems) - _MOST_SHOWN} more)" if len(problems) > _MOST_SHOWN else ""
            raise LedgerTampered(
                f"The ledger {ledger.url} is not what was written: {' '.join(problems[:_MOST_SHOWN])}{more} Nothing "
                "was spent. Restore a copy that verifies; `dpray ledger verify` tells the rest."
            )
        yield next((each for each in ledger.populations() if each.name == recipe.population.name), None)
    finally:
        ledger.close()


def check_anchors(recipe: AnyRecipe, workspace: Path, anchors: Iterable[Head]) -> None:
    """Refuse a ledger older than, or another than, the one the clients have seen.

    Raises:
        LedgerTampered: with what is wrong.
    """
    heads = tuple(anchors)
    if not heads:
        return
    url = ledger_url(recipe, workspace)
    ledger = _opened(url)
    if ledger is None:
        raise LedgerTampered(
            f"The clients of population {recipe.population.name!r} have seen a ledger with "
            f"{max(head.sequence for head in heads)} entries, and there is none at {shown(url)}. What was spent on "
            "them is spent: restore the ledger. If these are other people, give them a population of their own name."
        )
    try:
        problems = ledger.verify(heads)
    finally:
        ledger.close()
    if problems:
        raise LedgerTampered(
            f"The ledger is not the one the clients have seen: {' '.join(problems[:_MOST_SHOWN])} {RESTORE}"
        )


def check_tracked(recipe: AnyRecipe, workspace: Path, uri: str | None) -> None:
    """Refuse a ledger that is an older copy of itself than the one whose runs MLflow shows.

    A store that does not answer is not waited for: a run does not depend on it, and clients keep anchors of their own.

    Raises:
        LedgerTampered: with what is wrong and what to do.
    """
    ledger = None if uri is None else _opened(ledger_url(recipe, workspace))
    if ledger is None or uri is None:
        return
    from dpray.platform.tracking import Unreachable, anchors

    try:
        heads = [Head(*found) for found in anchors(uri, recipe.tracking.experiment, ledger=ledger.identity)]
        problems = ledger.verify(heads) if heads else ()
    except Unreachable:
        return
    finally:
        ledger.close()
    if problems:
        raise LedgerTampered(
            f"MLflow at {shown(uri)} has seen more of the ledger {ledger.url} than it holds: "
            f"{' '.join(problems[:_MOST_SHOWN])} {RESTORE}"
        )


RESTORE = (
    "What was released since is known to others, whether a ledger remembers it or not: restore a newer copy (`dpray "
    "ledger restore`). Without one these people's budget cannot be accounted for any more: stop releasing on them."
)
"""What to do about a ledger older than an anchor."""


def _opened(url: str) -> Ledger | None:
    """The ledger; None where there is none yet."""
    try:
        return Ledger(url, create=False)
    except LedgerMissing:
        return None


def _check_kind(population: Population, forecast: Foreseen) -> None:
    if all(account.kind == forecast.kind for account in population.accounts()):
        return
    if forecast.kind == GDP:
        raise LedgerError(
            f"Population {population.name!r} is protected by accounts of kind 'pld', which compose events, and this "
            "recipe plans, spends and shows exact μ² (kind 'gdp'): release on this population with the Python "
            "interface (`Run.release`), or give the recipe a population of its own."
        )
    raise LedgerError(
        f"Population {population.name!r} is protected by accounts of kind 'gdp', which add up exact μ², and a sampled "
        "round has no finite μ: delete `training.sampling`, or give the recipe a population of its own."
    )


def _check_budget(population: Population, account: Account, budget: Budget) -> None:
    if account.budget != budget:
        raise BudgetConflict(
            f"The {account.unit} account of population {population.name!r} was opened with {account.budget}, and the "
            f"recipe says {budget}. Write the first into the recipe, or raise the account with `dpray ledger amend "
            f"{population.name} --unit {account.unit}`, which is recorded as a new claim."
        )


def _check_fits(recipe: AnyRecipe, population: Population, account: Account, forecast: Foreseen) -> None:
    """Refuse what reserving would refuse, with both numbers."""
    if forecast.kind == PLD:
        _check_untouched(population, account)
        return
    left = account.remaining
    if left is None:
        return
    asked = 0
    for part in forecast.parts:
        if part.quanta is None:
            raise BudgetExceeded(
                f"The {account.unit} account of population {population.name!r} is private ({account.budget}), and the "
                "recipe asks for releases without noise (ε = ∞). Give the recipe a population of its own."
            )
        most = population.records_per_client or recipe.population.records_per_client
        if not account.unit.covers(part.unit) and most is None:
            raise RecipeError(
                f"`population.records_per_client` is missing: population {population.name!r} has a {account.unit} "
                f"account, which pays for {part.unit}-level releases by group privacy."
            )
        asked += part.quanta * (1 if account.unit.covers(part.unit) else (most or 1) ** 2)
    if asked > left:
        budget = account.budget.quanta or 1
        raise BudgetExceeded(
            f"The plan asks for {_amount(asked, budget, account)}, and the {account.unit} account of population "
            f"{population.name!r} has {_amount(left, budget, account, up=False)} left of {account.budget} (spent "
            f"{_amount(account.spent, budget, account)}, set aside by other runs "
            f"{_amount(account.reserved, budget, account)}). Nothing was spent. Let the recipe ask for less, finish "
            f"runs that hold a part, or raise the account with `dpray ledger amend {population.name}`, a new claim."
        )


def _check_untouched(population: Population, account: Account) -> None:
    """Sampled rounds are calibrated to the whole budget."""
    if account.spent or account.reserved:
        raise BudgetExceeded(
            f"The plan asks for all of {account.budget}, and the {account.unit} account of population "
            f"{population.name!r} has spent ε = {number(account.spent_epsilon)} of it, or set a part aside for other "
            f"runs. Nothing was spent. Raise the account with `dpray ledger amend {population.name}`, a new claim, or "
            "give the recipe a population of its own."
        )


def _amount(quanta: int, budget: int, account: Account, *, up: bool = True) -> str:
    delta = account.budget.delta
    alone = 0.0 if quanta <= 0 else epsilon(upper_mu(quanta), delta) if up else lower_epsilon(to_mu(quanta), delta)
    return f"{percent(quanta / budget, up=up)} of μ² (ε = {number(alone, up=up)} alone)"
