"""What `dpray plan` and a finished run say of a search in the central model."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from dpray.experiments.central.outcome import CentralOutcome
from dpray.experiments.central.plan import CentralForecast, GradientNoise, WinnerNoise
from dpray.experiments.central.spec import CentralRecipe
from dpray.experiments.figures import number
from dpray.experiments.report import pairs, stamps, statement, table
from dpray.experiments.report_plan import framed
from dpray.experiments.standing import Standing

_NAMES = {
    "dp_gibo": "DP-GIBO",
    "gibo": "GIBO, without noise",
    "finite_differences": "private finite differences",
    "spsa": "private SPSA",
    "private_random": "private random search",
    "global_bo": "global Bayesian optimisation, without noise",
}
_MOST_ROWS = 24
"""Settings that are listed; a run's `outcome.json` has all of them."""


def size(expected: CentralForecast) -> str:
    """Public sizes, in words."""
    return f"{expected.users} users, {_count(expected.dimension, 'setting')}, at most {_evaluations(expected)}"


def objective(recipe: CentralRecipe, expected: CentralForecast) -> str:
    """What is tuned, in words."""
    losses = "declared public" if recipe.objective.public else "protected"
    settings = _count(expected.dimension, "searched setting")
    return f"{recipe.objective.name}: {expected.users} users, {settings}; the users' losses are {losses}"


def search(recipe: CentralRecipe, expected: CentralForecast) -> str:
    """How it is tuned, in words."""
    given, noise = recipe.search, expected.noise
    if given.algorithm == "private_random":
        how = f"{expected.points} candidates"
    else:
        how = f"{expected.search.steps} iterations of at most {expected.points} points"
    if isinstance(noise, WinnerNoise):
        how += f", c = {noise.bound:g}"
    if isinstance(noise, GradientNoise):
        how += f", B = {noise.clip:g}, σ_DP = {noise.sigma:.3g}"
    return f"{_NAMES[given.algorithm]}, {how}"


def forecast(recipe: CentralRecipe, expected: CentralForecast, before: Standing) -> RenderableType:
    """The plan of a recipe, with its account as it stands."""
    lines = [("Objective", objective(recipe, expected)), ("Search", search(recipe, expected))]
    each = recipe.search.points_per_trial
    lines.append(("", f"at most {expected.trials} trials of {_count(each, 'point')}: {_evaluations(expected)}"))
    match expected.noise:
        case GradientNoise() as noise:
            lines.append(("Noise", f"σ_DP = {noise.sigma:.3g} on every coordinate of a released gradient"))
            lines.append(("", f"its length is {noise.to_clip:.3g} times the longest a gradient can be (σ_DP·√d / B)"))
        case WinnerNoise() as noise:
            pure = number(noise.epsilon)
            lines.append(("Noise", f"Gumbel of scale {noise.scale:.3g} on every mean loss; pure ε = {pure}"))
            lines.append(("", f"right in 19 of 20 draws with a lead of {noise.lead:.3g} in mean loss"))
        case None:
            lines.append(("Noise", "none: NOT PRIVATE"))
    if recipe.score is not None and expected.score is not None:
        c, sigma = recipe.score.bound, expected.score_sigma
        lines.append(("Score", f"mean loss at the result, losses cut to 0 … {c:g}, with noise of σ = {sigma:.3g}"))
    return framed(recipe, expected, size(expected), lines, before)


def outcome(done: CentralOutcome) -> RenderableType:
    """The final report of a run."""
    facts = pairs(("Search", done.search), ("Ended", done.reason), ("Objective", done.objective))
    return Group(stamps(done.stamps), facts, Text(), _result(done), Text(), statement(done.statement))


def _result(done: CentralOutcome) -> RenderableType:
    """Where the search began and what it came to; losses where they are public."""
    start = done.path[0] if done.path and len(done.path) > 1 else {}
    drawn = table("setting", "start", "result")
    shown = list(done.best_config)[:_MOST_ROWS]
    for key in shown:
        drawn.add_row(key, _value(start.get(key)), _value(done.best_config[key]))
    if len(done.best_config) > len(shown):
        drawn.add_row(f"… and {len(done.best_config) - len(shown)} more: outcome.json has all", "", "")
    if done.score is not None:
        drawn.add_section()
        said = f"{done.score:.4g} ± {done.score_sigma:.2g}"
        drawn.add_row("score: noised mean loss ± std of the noise", "", said, style="bold")
    if done.result_loss is not None:
        before = done.losses[0] if start else None
        drawn.add_section()
        drawn.add_row("mean loss (public data)", _value(before), _value(done.result_loss), style="bold")
    return drawn


def _value(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _evaluations(expected: CentralForecast) -> str:
    return _count(expected.search.steps * expected.points, "evaluation")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
