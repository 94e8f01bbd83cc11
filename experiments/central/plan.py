"""What a search in the central model would spend, and how noisy its releases would be. Spends nothing.

| symbol | meaning |
|---|---|
| n, d | users, searched settings |
| T, b | releases, most points of one |
| B, σ_DP | bound on a user's gradient, std of the noise on each coordinate of a released one |
| c, K | bound on a user's loss, candidates |
| s | 2c/(nε): scale of the Gumbel noise on a candidate's mean loss |
| σ_s | c/(nμ_s): std of the noise on the score of the result |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpray.experiments.central.building import build, quanta_of, score_quanta, searched, space_of
from dpray.experiments.central.spec import CentralRecipe
from dpray.experiments.parts import SCORE, SEARCH, Foreseen, Part, budget_of
from dpray.experiments.reading import RecipeError
from dpray.platform.privacy.budget import to_mu
from dpray.platform.privacy.units import Unit

if TYPE_CHECKING:
    from dpray.platform.privacy.ledger import PlannedRelease
    from dpray.platform.user_losses import UserLosses
    from dpray.searchers.central import CentralSearch


@dataclass(frozen=True)
class GradientNoise:
    """Noise of a released gradient: B, σ_DP, d."""

    clip: float
    sigma: float
    dimension: int

    @property
    def to_clip(self) -> float:
        """σ_DP √d / B: length of the noise over the longest the mean gradient can be."""
        return self.sigma * math.sqrt(self.dimension) / self.clip


@dataclass(frozen=True)
class WinnerNoise:
    """Noise of a released winner: pure ε, c, s, K."""

    epsilon: float
    bound: float
    scale: float
    candidates: int

    @property
    def lead(self) -> float:
        """Lead in mean loss with which the best of K is named in 19 of 20 draws, all others behind by it: s ln 19(K−1).

        Adding Gumbel noise names candidate j with probability ∝ exp(−loss_j/s).
        """
        return self.scale * math.log(19 * (self.candidates - 1))


@dataclass(frozen=True)
class CentralForecast(Foreseen):
    """What a run would do.

    Attributes:
        users, dimension: n, d.
        search: its releases.
        planned: the same and the score, as the ledger sets them aside.
        points: b.
        trials: Tune trials in all, at most.
        noise: of a release; None where there is none.
        score: the release of the result's mean loss; None where the recipe asks for none.
        score_sigma: σ_s; NaN without a score.
        budget, declaration, warnings: see `Foreseen`.
    """

    users: int
    dimension: int
    search: Part
    planned: tuple[PlannedRelease, ...]
    points: int
    trials: int
    noise: GradientNoise | WinnerNoise | None
    score: Part | None = None
    score_sigma: float = math.nan

    @property
    def parts(self) -> tuple[Part, ...]:
        """The search, and the score if there is one."""
        return (self.search,) if self.score is None else (self.search, self.score)


def forecast(recipe: CentralRecipe, task: UserLosses) -> CentralForecast:
    """What the recipe would spend, from public facts: the search is built, and asked.

    Raises:
        RecipeError: whatever the search refuses.
    """
    from dpray.platform.curator_asks import score_mechanism
    from dpray.searchers.score import planned_score

    budget = budget_of(recipe.budget)
    quanta, of_score = quanta_of(recipe, budget), score_quanta(recipe, budget)
    search = build(recipe, task, quanta)
    part = Part(SEARCH, Unit.USER, search.iterations, quanta, quanta, budget.quanta, budget.delta)
    noise = _noise(search) if quanta is not None else None
    planned, score, sigma = [search.planned], None, math.nan
    if recipe.score is not None and of_score is not None:
        score = Part(SCORE, Unit.USER, 1, of_score, of_score, budget.quanta, budget.delta)
        planned.append(planned_score(search.label, of_score))
        sigma = score_mechanism(recipe.score.bound, task.users).sigma(to_mu(of_score))
    return CentralForecast(
        budget=budget,
        declaration=declaration(recipe, task.users),
        warnings=_warnings(noise),
        users=task.users,
        dimension=searched(space_of(recipe, task)),
        search=part,
        planned=tuple(planned),
        points=search.batch_size,
        trials=search.evaluations,
        noise=noise,
        score=score,
        score_sigma=sigma,
    )


def declaration(recipe: CentralRecipe, users: int) -> dict[str, Any]:
    """What the population's name is bound to at its first use: whose losses they are, and whether those are public."""
    return {**recipe.objective.people(), "objective.users": users}


def _noise(search: CentralSearch) -> GradientNoise | WinnerNoise | None:
    from dpray.searchers.descent import PrivateDescent
    from dpray.searchers.private_random import PrivateRandomSearch

    try:
        if isinstance(search, PrivateDescent):
            return GradientNoise(search.clip, search.sigma, search.box.dimension)
        if isinstance(search, PrivateRandomSearch):
            scale = search.mechanism.scale(search.epsilon)
            return WinnerNoise(search.epsilon, search.bound, scale, search.batch_size)
    except ValueError as error:
        raise RecipeError(f"The budget does not reach: {error}") from None
    return None


def _warnings(noise: GradientNoise | WinnerNoise | None) -> tuple[str, ...]:
    if isinstance(noise, GradientNoise) and noise.to_clip > 1:
        return (
            f"The search is drowned: the noise in every released gradient is {noise.to_clip:.1f} times as long as the "
            "gradient can be. Use fewer iterations, a larger spend, more users, or fewer settings.",
        )
    if isinstance(noise, WinnerNoise) and noise.lead > noise.bound / 2:
        return (
            f"The choice is mostly noise: the best candidate needs a lead of {noise.lead:.3g} in mean loss to be named "
            f"in 19 of 20 draws, and losses count up to {noise.bound:g}. Use a larger spend, more users, or fewer "
            "candidates.",
        )
    return ()
