"""What a run of a cohort would spend, and how noisy it would be: computed from public facts, spending nothing.

| symbol | meaning |
|---|---|
| μ_B² | the account's budget |
| μ² | of a part: its share of μ_B², over m² where the account is coarser than the release (m records per client) |
| T | releases of a part; each spends μ²/T |
| σ | noise std of one release |
| σ_S | noise std in the sum of the votes, all clients answering |
| ε, b | of a winner that is released alone: pure ε, and the Gumbel scale 2/ε on a count |
| s | noise std on a coordinate of the mean gradient |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from scipy.special import ndtri

from dpray.experiments.algorithms import FedFC, Scaffold
from dpray.experiments.binding import declaration
from dpray.experiments.parts import COVARIANCE, SEARCH, TRAINING, Foreseen, NoisedPart, Part, WinnerPart, budget_of
from dpray.experiments.reading import RecipeError
from dpray.experiments.sampling import SampledPart
from dpray.experiments.spec import Recipe, Search
from dpray.platform.privacy.budget import Budget, share, split, to_mu
from dpray.platform.privacy.ledger import Plan, PlannedRelease
from dpray.platform.privacy.local_steps import LocalSteps
from dpray.platform.privacy.mechanisms import (
    ClippedSum,
    FeatureCovariance,
    Mechanism,
    Regime,
    TopKVotes,
    Unit,
    VoteWinner,
    vote_failure_bound,
    winner_failure_bound,
)
from dpray.platform.privacy.sampling import PoissonSampling

if TYPE_CHECKING:
    from dpray.platform.cohort.masked.parameters import Parameters


@dataclass(frozen=True)
class Scale:
    """Public facts a forecast needs.

    n clients, N records, d parameters, largest client, the model's own error, features of a record, smallest client.
    """

    clients: int
    records: int
    dimension: int
    largest_client: int
    relative_error: float = 0.0
    features: int = 0
    smallest_client: int = 1


@dataclass(frozen=True)
class Forecast(Foreseen):
    """What a run of a cohort would do.

    Attributes:
        scale: what it was computed for.
        search: None without one; noisy votes, or a winner alone.
        covariance: the features' covariance of DP-FedFC; None for the others.
        training: the rounds.
        sigma_over_clip: noise std on a round's sum if all clients answer, in units of C.
        noise_to_signal: s·√d / C of one round: length of the noise in the mean gradient over the longest it can be.
        lead: votes by which the best must lead for the winner to be right in 19 of 20 elections; None without a search.
        unanimous_failure: chance of a wrong winner although all clients agree, at most; None without a search.
        masked: degree and threshold of the masked sums; None without any.
        budget, declaration, warnings: see `Foreseen`.
    """

    scale: Scale
    search: NoisedPart | WinnerPart | None
    covariance: NoisedPart | None
    training: NoisedPart
    sigma_over_clip: float
    noise_to_signal: float
    lead: float | None
    unanimous_failure: float | None
    masked: Parameters | None

    @property
    def parts(self) -> tuple[Part, ...]:
        """In the order in which they happen."""
        return tuple(part for part in (self.search, self.covariance, self.training) if part is not None)

    @property
    def kind(self) -> Literal["gdp", "pld"]:
        """Composed events for sampled rounds, μ² otherwise."""
        return "pld" if isinstance(self.training, SampledPart) else "gdp"

    @property
    def training_quanta(self) -> int | None:
        """What the trainer may spend: its rounds, and what it releases before them."""
        if self.training.quanta is None or self.covariance is None:
            return self.training.quanta
        return self.training.quanta + (self.covariance.quanta or 0)

    def ledger_plan(self, search: str, training: str, covariance: str = "covariance") -> Plan:
        """The plan to reserve; `search`, `training`, `covariance` are the mechanisms' names in the ledger."""
        names = {SEARCH: search, TRAINING: training, COVARIANCE: covariance}
        lines = (
            PlannedRelease(part.label, names[part.label], part.unit, part.quanta, part.steps, part.sampling_probability)
            for part in self.parts
        )
        return Plan(tuple(lines))


def forecast(recipe: Recipe, scale: Scale) -> Forecast:
    """What the recipe would spend on a cohort of this scale, and how noisy its releases would be.

    Raises:
        RecipeError: the shares are too small to be split over their releases, a mechanism refuses its noise, or the
            clients' sums cannot be masked with so many lost and colluding.
    """
    budget = budget_of(recipe.budget)
    try:
        search_quanta, training_quanta = _shares(recipe, budget)
        clip = _clip(recipe)
        unit = Unit(recipe.training.unit)
        summed = _summed(recipe, scale, clip)
        payer = _Payer(recipe, budget, scale)
        quanta, covariance, regime = payer.own(unit, training_quanta), None, recipe.training.regime
        if isinstance(recipe.training, FedFC):
            moments = FeatureCovariance(recipe.training.covariance_clip, scale.features + 1, scale.records)
            apart = None if quanta is None else share(quanta, recipe.training.covariance_share)
            quanta = None if quanta is None or apart is None else quanta - apart
            covariance = payer.part(COVARIANCE, moments, apart, 1, regime)
        training = payer.part(TRAINING, summed, quanta, recipe.training.rounds, regime)
        if recipe.training.sampling is not None:
            training = payer.sampled(recipe.training.sampling.sampler(), summed, recipe.training.rounds)
        search = None if recipe.search is None else payer.vote(recipe.search, search_quanta)
    except ValueError as error:
        raise RecipeError(f"The budget does not reach: {error}") from None
    K = _noised_steps(recipe)
    sigma_over_clip = training.answered_sigma * math.sqrt(K) / clip
    noise_to_signal = sigma_over_clip * math.sqrt(scale.dimension) / (K * _summands(recipe, scale))
    noise_to_signal /= training.sampling_probability  # sums are divided by the expected number
    lead = unanimous = None
    if search is not None and recipe.search is not None:
        k = recipe.search.votes
        rivals = recipe.search.candidate_count - k
        if isinstance(search, WinnerPart):
            lead = winner_lead_needed(search.scale, rivals)
            unanimous = winner_failure_bound(scale.clients, search.scale, rivals, k)
        else:
            lead = lead_needed(search.answered_sigma, rivals)
            unanimous = vote_failure_bound(scale.clients, search.answered_sigma, rivals)
    warnings = (*_warnings(recipe, scale, noise_to_signal, lead), *_of_trainer(recipe, scale, noise_to_signal * clip))
    return Forecast(
        budget=budget,
        declaration=declaration(recipe, scale),
        warnings=warnings,
        scale=scale,
        search=search,
        covariance=covariance,
        training=training,
        sigma_over_clip=sigma_over_clip,
        noise_to_signal=noise_to_signal,
        lead=lead,
        unanimous_failure=unanimous,
        masked=_masked(recipe),
    )


def _masked(recipe: Recipe) -> Parameters | None:
    """How the clients' sums are masked, where regime and recipe ask for it."""
    if recipe.cohort.secure_sum != "masked" or Regime.DISTRIBUTED not in regimes(recipe):
        return None
    from dpray.platform.cohort.errors import CohortError
    from dpray.platform.cohort.masked.parameters import parameters

    given = recipe.cohort
    try:
        return parameters(given.clients, given.quorum or given.clients, given.colluders)
    except CohortError as error:
        raise RecipeError(f"`cohort.secure_sum: masked`: {error}") from None


def regimes(recipe: Recipe) -> set[str]:
    """Where noise is added, in any part of the recipe."""
    return {recipe.training.regime, *([] if recipe.search is None else [recipe.search.regime])}


def _shares(recipe: Recipe, budget: Budget) -> tuple[int | None, int | None]:
    """Quanta of the account for search and training."""
    if budget.quanta is None:
        return None, None
    # As decimals: the floats nearest to .1 and .9 add up to more than 1.
    shares = (Fraction(repr(part)) for part in (recipe.shares.search, recipe.shares.training))
    search, training = (math.floor(part * budget.quanta) for part in shares)
    return search, training


@dataclass(frozen=True)
class _Payer:
    """The account that pays, and the cohort whose clients add the noise."""

    recipe: Recipe
    budget: Budget
    scale: Scale

    def own(self, unit: Unit, account: int | None) -> int | None:
        """What releases of a unit may spend in that unit, where they may spend `account` of this account."""
        return None if account is None else account // self._factor(unit)

    def part(self, label: str, mechanism: Mechanism, quanta: int | None, steps: int, regime: str) -> NoisedPart:
        """The part that spends `quanta` in the release's own unit."""
        spend, mu = self._spend(label, mechanism.unit, quanta, steps)
        noise = mechanism.noise(mu, noisers=self.recipe.cohort.n_min if regime == Regime.DISTRIBUTED else 1)
        return NoisedPart(
            **spend,
            sigma=noise.sigma,
            answered_sigma=noise.share * math.sqrt(1 if regime == Regime.CENTRAL else self.scale.clients),
        )

    def vote(self, search: Search, account: int | None) -> NoisedPart | WinnerPart:
        """The vote, released as the recipe says."""
        k, p = search.votes, search.candidate_count
        noisy = search.release == "votes"
        ballots = TopKVotes(k, p)
        quanta = self.own(ballots.unit, account)
        votes = self.part(SEARCH, ballots, quanta, 1, search.regime if noisy else Regime.DISTRIBUTED)
        if noisy:
            return votes
        winner = VoteWinner(k, p)
        spend, mu = self._spend(SEARCH, winner.unit, quanta, 1)
        epsilon = winner.epsilon_of(mu)
        return WinnerPart(
            **spend,
            pure_epsilon=epsilon,
            scale=winner.scale(epsilon),
            votes_lead=lead_needed(votes.answered_sigma, p - k),
        )

    def _spend(self, label: str, unit: Unit, quanta: int | None, steps: int) -> tuple[dict[str, Any], float]:
        """What a part has in common with every other, and the smallest μ of its releases."""
        factor = self._factor(unit)
        spend = {
            "label": label,
            "unit": unit,
            "steps": steps,
            "quanta": quanta,
            "charged": None if quanta is None else quanta * factor,
            "budget": self.budget.quanta,
            "delta": self.budget.delta,
        }
        return spend, math.inf if quanta is None else to_mu(split(quanta, steps)[-1])

    def sampled(self, sampling: PoissonSampling, mechanism: Mechanism, rounds: int) -> SampledPart:
        """Rounds over samples, which spend the whole budget."""
        quanta = sampling.calibrate(self.budget, rounds)
        part = self.part(TRAINING, sampling.mechanism(mechanism), quanta, rounds, self.recipe.training.regime)
        return SampledPart(**vars(part), sampling=sampling)

    def _factor(self, unit: Unit) -> int:
        """What one quantum of a release costs the account."""
        most = self.recipe.population.records_per_client or 1
        return 1 if Unit(self.recipe.population.unit).covers(unit) else most**2


def _summed(recipe: Recipe, scale: Scale, clip: float) -> Mechanism:
    """What a round releases."""
    unit, steps = Unit(recipe.training.unit), _noised_steps(recipe)
    if steps > 1:
        return LocalSteps(clip, steps, scale.dimension, scale.clients, scale.records, scale.relative_error)
    return ClippedSum(clip, unit, scale.dimension, _summands(recipe, scale), scale.relative_error)


def _noised_steps(recipe: Recipe) -> int:
    """K: noised sums that one release adds up for every client."""
    return recipe.training.steps if isinstance(recipe.training, Scaffold) else 1


def _summands(recipe: Recipe, scale: Scale) -> int:
    """What the sum is divided by: records, or clients under unit `client`."""
    return scale.records if recipe.training.unit == "record" else scale.clients


def _clip(recipe: Recipe) -> float:
    """C, or one that the search may choose: the noise-to-signal ratio is the same for all."""
    fixed = recipe.training.fixed().get("clip")
    if fixed is not None:
        return float(fixed)
    setting = recipe.search.space["clip"] if recipe.search is not None else 1.0
    return float(setting if isinstance(setting, int | float | str) else setting.extremes[0])


def lead_needed(sigma: float, rivals: int) -> float:
    """γ at which `vote_failure_bound` is 1/20: −√2·σ_S·Φ⁻¹(1/(20·rivals)), in votes."""
    return -math.sqrt(2) * sigma * float(ndtri(0.05 / rivals)) + 0.0


def winner_lead_needed(scale: float, rivals: int) -> float:
    """γ at which `winner_failure_bound` of one good candidate is 1/20: b·ln(19·rivals), in votes."""
    return scale * math.log(19 * rivals)


def _warnings(recipe: Recipe, scale: Scale, noise_to_signal: float, lead: float | None) -> tuple[str, ...]:
    found = []
    # Fewer votes a client make the noise of votes smaller, not that of a winner.
    fewer = " or fewer votes per client" if recipe.search is not None and recipe.search.release == "votes" else ""
    if lead is not None and lead > scale.clients:
        found.append(
            f"The vote is hopeless: a winner needs a lead of {lead:.1f} votes to be right in 19 of 20 elections, and "
            f"there are {scale.clients} clients. Give the search a larger share{fewer}, or use more clients."
        )
    elif lead is not None and lead > scale.clients / 2:
        found.append(
            f"The vote is noisy: a winner needs a lead of {lead:.1f} of {scale.clients} votes to be right in 19 of 20 "
            f"elections. Give the search a larger share{fewer}."
        )
    if noise_to_signal > 1:
        found.append(
            f"The training is drowned: in every round the noise in the mean gradient is {noise_to_signal:.1f} times as "
            "long as the gradient can be. Use fewer rounds, a larger share, more records, or fewer parameters."
        )
    if recipe.cohort.secure_sum == "masked" and Regime.DISTRIBUTED not in regimes(recipe):
        found.append(
            "`cohort.secure_sum: masked` changes nothing here: sums are masked where noise is shared by all clients "
            "(`regime: distributed`), and no part of this recipe says so."
        )
    return tuple(found)


def _of_trainer(recipe: Recipe, scale: Scale, noise: float) -> tuple[str, ...]:
    """What the trainer says of noise of this expected length; nothing where the search chooses more than rate and C."""
    from dpray.trainers import trainer_named

    training = recipe.training
    if recipe.search is not None and recipe.search.space.keys() - {"learning_rate", "clip"}:
        return ()
    found = {"learning_rate": 1.0, **training.fixed(), "rounds": training.rounds, "clip": _clip(recipe)}
    settings = trainer_named(training.algorithm).settings_type.from_config(found)
    return settings.warnings(noise / math.sqrt(scale.dimension), scale.dimension)
