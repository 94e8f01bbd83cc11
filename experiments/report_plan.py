"""What `dpray plan` prints: what a run would spend, how noisy it would be, and where the account would stand."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.text import Text

from dpray.experiments.algorithms import FedFC, Scaffold
from dpray.experiments.figures import number, percent
from dpray.experiments.kinds import AnyRecipe
from dpray.experiments.parts import Foreseen, Part, WinnerPart
from dpray.experiments.plan import Forecast, Scale, lead_needed, regimes, winner_lead_needed
from dpray.experiments.report import pairs, stamps, table
from dpray.experiments.spec import Recipe
from dpray.experiments.standing import Standing
from dpray.platform.privacy.budget import remaining_epsilon
from dpray.platform.privacy.noise import SEEDED
from dpray.platform.privacy.units import Regime

_COHORTS = (0.5, 1, 2, 5, 10)


def forecast(recipe: Recipe, expected: Forecast, scale: Scale, before: Standing) -> RenderableType:
    """The plan of a recipe on a cohort of this scale, with its account as it stands."""
    size = f"{scale.clients} clients, {scale.records} records, {scale.dimension} parameters"
    return framed(recipe, expected, size, _noise(recipe, expected, scale), before)


def framed(
    recipe: AnyRecipe, expected: Foreseen, size: str, noise: list[tuple[str, str]], before: Standing
) -> RenderableType:
    """A plan of either kind: what it spends, what its releases are like, and its account before and after.

    Args:
        recipe, expected: what would be run.
        size: public sizes, in words.
        noise: lines about the releases, name and text.
        before: the account as it stands.
    """
    parts: list[RenderableType] = [
        stamps(stamped(recipe)) if stamped(recipe) else Text(),
        Text(f"Plan of {recipe.name}: {size}. Nothing was spent.", "bold"),
        _spends(expected),
        pairs(*noise),
        Text(),
        Text(
            f"Account of population {recipe.population.name}: unit {recipe.population.unit}, {expected.budget}", "bold"
        ),
        _account(expected, before),
    ]
    parts += [Text(f"Warning: {text}", "bold yellow") for text in expected.warnings]
    return Group(*parts)


def stamped(recipe: AnyRecipe) -> tuple[str, ...]:
    """What must be shown on everything this recipe releases."""
    seeded = (SEEDED,) if recipe.noise.seed is not None else ()
    return (*seeded, "NOT PRIVATE (no noise)") if recipe.budget.non_private else seeded


def _spends(expected: Foreseen) -> RenderableType:
    drawn = table("", "releases", "unit", "share of μ²", "ε alone", "ε of one release")
    for part in expected.parts:
        drawn.add_row(
            part.label, str(part.steps), part.unit, _share(part), number(part.epsilon), number(part.epsilon_step)
        )
    return drawn


def _noise(recipe: Recipe, expected: Forecast, scale: Scale) -> list[tuple[str, str]]:
    lines = []
    if expected.search is not None and recipe.search is not None and expected.lead is not None:
        lines.append(
            ("Vote", f"k = {recipe.search.votes} of p = {recipe.search.candidate_count} candidates; {_how(expected)}")
        )
        lines.append(("", f"right in 19 of 20 elections with a lead of {expected.lead:.1f} of {scale.clients} votes"))
        if isinstance(expected.search, WinnerPart):
            instead = expected.search.votes_lead
            lines.append(("", f"noisy votes, which need no trusted aggregator: {instead:.1f} for the same share of μ²"))
        lines.append(("", "with other cohorts: " + ", ".join(_leads(recipe, expected, scale))))
    regime = {"distributed": "shared by all clients", "local": "whole at every client", "central": "added once"}
    if isinstance(recipe.training, Scaffold) and recipe.training.steps > 1:
        steps = recipe.training.steps
        lines.append(("", f"{steps} local steps in a round, each noised: as much as {steps} releases of a gradient"))
    what = "gradient" if recipe.training.unit == "record" else "update"
    lines.append(("Training", f"{recipe.training.rounds} rounds, noise {regime[recipe.training.regime]}"))
    given = recipe.training.sampling
    if given is not None:
        who = f"each {given.unit} is in a round with probability {given.rate:g}, known to its client alone"
        lines.append(("", f"{who}; sums are divided by {given.rate:g}·N"))
    lines.append(("", f"noise of σ = {expected.sigma_over_clip:.3g}·C on every coordinate of a round's sum"))
    lines.append(
        ("", f"noise in a round's mean {what}: {expected.noise_to_signal:.3g} times the longest it can be (s·√d / C)")
    )
    if expected.covariance is not None and isinstance(recipe.training, FedFC):
        f, spread = scale.features + 1, expected.covariance.answered_sigma / recipe.training.covariance_clip**2
        lines.append(("Covariance", f"of {f} features, bias included, released once before the rounds"))
        lines.append(("", f"noise of s = {spread:.3g}·C² on the diagonal of Σ x̃x̃ᵀ, of s/√2 beside it"))
    lines += _summed(recipe, expected)
    return lines


def _how(expected: Forecast) -> str:
    """Noise of the vote, in words."""
    search = expected.search
    if isinstance(search, WinnerPart):
        epsilon = number(search.pure_epsilon)
        return f"the winner alone, ε = {epsilon} pure: Gumbel noise of scale {search.scale:.2f} votes, never shown"
    return f"noise of σ_S = {0.0 if search is None else search.answered_sigma:.2f} votes in every count"


def _summed(recipe: Recipe, expected: Forecast) -> list[tuple[str, str]]:
    """How shared noise is added up, and what it will be shown as."""
    if Regime.DISTRIBUTED not in regimes(recipe):
        return []
    if expected.masked is None:
        return [("Sums", "added up by a trusted server: shown as central (aggregator trusted, shares simulated)")]
    found, given = expected.masked, recipe.cohort
    lost = given.clients - (given.quorum or given.clients)
    return [
        ("Sums", "masked between clients, whom this machine simulates: shown as distributed"),
        ("", f"each masks with {found.degree} others; {found.threshold} shares open a secret"),
        ("", f"{lost} may be lost before the set of a sum is fixed"),
    ]


def _leads(recipe: Recipe, expected: Forecast, scale: Scale) -> list[str]:
    """The lead that is needed, as a part of the votes, in smaller and larger cohorts."""
    if recipe.search is None or expected.search is None:
        return []
    rivals = recipe.search.candidate_count - recipe.search.votes
    grows = recipe.search.regime == "local"
    found = []
    for factor in _COHORTS:
        clients = max(round(scale.clients * factor), 1)
        if isinstance(expected.search, WinnerPart):
            lead = winner_lead_needed(expected.search.scale, rivals)
        else:
            sigma = expected.search.answered_sigma * (math.sqrt(clients / scale.clients) if grows else 1.0)
            lead = lead_needed(sigma, rivals)
        found.append(f"{clients} clients {lead / clients:.0%}")
    return found


def _account(expected: Foreseen, before: Standing) -> RenderableType:
    if expected.kind == "pld":
        return _composed(expected, before)
    drawn = table("", "spent", "set aside", "left", "ε left")
    charged = expected.charged
    if before.budget is None or charged is None:
        return Text("  without limit: ε = ∞, NOT PRIVATE", "bold red")
    for name, spent in (("before", before.spent), ("after", before.spent + charged)):
        left = before.budget - spent - before.reserved
        shares = [percent(part / before.budget) for part in (spent, before.reserved)]
        shares.append(percent(left / before.budget, up=False))
        epsilon = remaining_epsilon(expected.budget, min(spent + before.reserved, before.budget))
        drawn.add_row(name, *shares, number(epsilon, up=False))
    return drawn


def _composed(expected: Foreseen, before: Standing) -> RenderableType:
    """Composed events leave no share: what is spent, and what the plan comes to if nothing was spent before it."""
    drawn = table("", "ε spent", "of")
    drawn.add_row("before", number(before.epsilon), number(expected.budget.epsilon))
    untouched = not before.spent and not before.reserved
    after = number(sum(part.epsilon for part in expected.parts)) if untouched else "more than there is"
    drawn.add_row("after", after, number(expected.budget.epsilon))
    return drawn


def _share(part: Part) -> str:
    return "" if math.isnan(part.share) else percent(part.share)
