"""From a recipe and its objective to one of the searches of `dpray.searchers`, refused in sentences of the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import floor
from typing import TYPE_CHECKING, Any, cast

from dpray.experiments import objections
from dpray.experiments.central.spec import WITHOUT_NOISE, CentralRecipe, Clipped, Descent, GlobalBO
from dpray.experiments.parts import SEARCH
from dpray.experiments.reading import RecipeError
from dpray.experiments.sections import to_tune
from dpray.platform.privacy.budget import Budget, floor_quanta

if TYPE_CHECKING:
    from dpray.platform.privacy.ledger import Run
    from dpray.platform.user_losses import UserLosses
    from dpray.searchers.central import CentralSearch

_CLASSES = {
    "dp_gibo": "DPGIBOSearch",
    "gibo": "GIBOSearch",
    "finite_differences": "FiniteDifferenceSearch",
    "spsa": "SPSASearch",
    "private_random": "PrivateRandomSearch",
    "global_bo": "GlobalBOSearch",
}


def build(recipe: CentralRecipe, task: UserLosses, quanta: int | None, run: Run | None = None) -> CentralSearch:
    """The recipe's search.

    Args:
        recipe: what to search, and how.
        task: its objective.
        quanta: what it spends; None without noise.
        run: of the ledger. Without one the search can be looked at, but not run.

    Raises:
        RecipeError: a setting the search refuses, by a sentence.
    """
    from dpray import searchers

    given = recipe.search
    space = space_of(recipe, task)
    options: dict[str, Any] = {**given.own, "space": space, "label": SEARCH, "reserve": False}
    options["noise_seed"] = recipe.noise.seed
    if isinstance(given, Descent):
        options["start"] = _start(given, task)
    if isinstance(given, Clipped):
        options["clip"] = given.clip
    if given.algorithm not in WITHOUT_NOISE:
        options["quanta"] = quanta
    try:
        if isinstance(given, GlobalBO):
            options.setdefault("batch_size", searched(space) + 1)  # as many points as DP-GIBO has
        made = getattr(searchers, _CLASSES[given.algorithm])(task, run, **options)
    except ValueError as error:
        raise RecipeError(f"`search`: {error}") from None
    return cast("CentralSearch", made)


def space_of(recipe: CentralRecipe, task: UserLosses) -> dict[str, Any]:
    """The objective's space, with the recipe's own domains and fixed values in place of some of its own.

    Raises:
        RecipeError: a key the objective does not have.
    """
    space: Mapping[str, Any] = task.space()  # type: ignore[attr-defined]  # `objectives.Searchable`
    for key in recipe.search.space:
        if key not in space:
            what = f"a setting of `{recipe.objective.name}`"
            raise RecipeError(objections.unknown(f"search.space.{key}", key, list(space), what))
    return {**space, **to_tune(recipe.search.space)}


def searched(space: Mapping[str, Any]) -> int:
    """d: settings that are searched."""
    from dpray.searchers.space import leaves

    return len(leaves(space))


def quanta_of(recipe: CentralRecipe, budget: Budget) -> int | None:
    """What the search takes of the account's μ², in quanta; None without noise. A score has its share of `spend`.

    Raises:
        RecipeError: more than the whole budget, or too little to be spent.
    """
    asked, said = _asked(recipe, budget)
    if asked is None:
        return None
    asked -= score_quanta(recipe, budget) or 0
    steps = getattr(recipe.search, "iterations", 1)
    if asked < steps:
        raise RecipeError(f"{said[0].upper()}{said[1:]} is too small to be split over {steps} releases; ask for more.")
    return asked


def score_quanta(recipe: CentralRecipe, budget: Budget) -> int | None:
    """What the score takes of the account's μ², in quanta; None without a score.

    Raises:
        RecipeError: more than the whole budget, or too little to be spent.
    """
    asked, said = _asked(recipe, budget)
    if recipe.score is None or asked is None:
        return None
    quanta = floor(Fraction(repr(recipe.score.share)) * asked)
    if quanta < 1:
        raise RecipeError(f"`score.share: {recipe.score.share:g}` of {said} is nothing; ask for more.")
    return quanta


def _asked(recipe: CentralRecipe, budget: Budget) -> tuple[int | None, str]:
    """What the whole run takes, in quanta, and how the recipe says it."""
    if budget.quanta is None:
        return None, ""
    spend = recipe.spend
    if spend is None:
        return budget.quanta, "the whole budget"
    if spend.share is not None:
        asked, said = floor(Fraction(repr(spend.share)) * budget.quanta), f"share: {spend.share:g}"
    elif spend.epsilon is not None:
        asked, said = _of_epsilon(spend.epsilon, budget.delta), f"epsilon: {spend.epsilon:g}"
    else:
        asked, said = floor_quanta(float(spend.mu or 0)), f"mu: {spend.mu:g}"
    if asked > budget.quanta:
        raise RecipeError(f"`spend.{said}` is more than the account's whole budget, {budget}; ask for less.")
    return asked, f"`spend.{said}`"


def _of_epsilon(epsilon: float, delta: float) -> int:
    try:
        return Budget(epsilon, delta).quanta or 0
    except ValueError as error:
        raise RecipeError(f"`spend.epsilon`: {error}") from None


def _start(given: Descent, task: UserLosses) -> Mapping[str, Any] | str:
    if isinstance(given.start, dict) or given.start != "objective":
        return given.start
    start = getattr(task, "start", None)
    return "center" if start is None else start(given.seed)
