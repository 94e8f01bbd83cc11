"""The recipe of a cohort: clients vote on settings, if it has a search, and train with the winner.

A recipe is a typed, frozen statement of one experiment, refused as a whole if any part of it cannot be run. It names
the population whose account pays, the budget and how μ² is shared between search and training, the data and which part
of it is declared public, the cohort, the search, the training and where it is shown. Reading one touches nothing but
the text: no ledger, no Ray, no file. Values are taken as written: "6" is text, `true` is not 1.

| recipe | symbol | meaning |
|---|---|---|
| `budget.epsilon`, `budget.delta` | ε, δ | lifetime budget of the population's account |
| `shares.search`, `shares.training` | | fractions of the account's μ² |
| `search.votes` | k | votes of a client |
| `search.release` | | noisy counts of all candidates (`votes`), or the winner's index alone (`winner`) |
| `search.candidates` | p | candidates voted on (all points of a finite space if left out) |
| `search.candidates_per_trial` | | candidates one Tune trial asks for; `auto`: several where clients are quicker so |
| `training.rounds` | T | gradient releases |
| `training.clip` | C | bound on a record's gradient norm (or a client's update) |
| `cohort.quorum` − `cohort.colluders` | n_min | clients whose noise is counted on |
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from dpray.experiments import domains, objections
from dpray.experiments.algorithms import Scaffold, Training
from dpray.experiments.domains import Domain, Setting
from dpray.experiments.sampling import objection
from dpray.experiments.sections import (
    Budget,
    Cohort,
    Data,
    Document,
    Name,
    Noise,
    Population,
    Regime,
    Section,
    Seed,
    Shares,
    Space,
    Tracking,
    Whole,
    to_tune,
)

_LOCAL = "`{}` describes a client's own descent, which only `training.unit: client` has; delete it."


class Search(Section):
    """DP-HYPE: every client votes for its k best of p public candidates."""

    algorithm: Literal["dp_hype"] = "dp_hype"
    votes: Whole
    candidates: Whole | None = None
    space: Space
    score: Literal["accuracy", "loss"] = "accuracy"
    folds: Annotated[int, Field(ge=2)] = 5
    candidates_per_trial: Whole | Literal["auto"] = "auto"
    max_concurrent: Whole = 2
    release: Literal["votes", "winner"] = "votes"
    regime: Regime = "distributed"
    seed: Seed = 0

    @model_validator(mode="before")
    @classmethod
    def _a_winner_has_one_regime(cls, given: Any) -> Any:
        """The only one it can have, where none is given."""
        return {"regime": "central", **given} if isinstance(given, dict) and given.get("release") == "winner" else given

    @model_validator(mode="after")
    def _a_winner_needs_a_trusted_aggregator(self) -> Self:
        if self.release == "winner" and self.regime != "central":
            raise ValueError(
                f"`search.regime` is `{self.regime}`, and `release: winner` is chosen by an aggregator that is trusted "
                "with the counts: `regime: central`. Where it must not see them, `release: votes`."
            )
        return self

    @model_validator(mode="after")
    def _has_something_to_vote_on(self) -> Self:
        points = domains.count(self.space)
        if points == 1 or self.candidates == 1:
            raise ValueError(
                "`search.space` leaves nothing to search: it has one point only. Give a domain with several values, or "
                "leave `search` out and put the settings under `training`."
            )
        if points is None and self.candidates is None:
            raise ValueError(
                "`search.candidates` is missing: the space has a continuous range, so say how many points to draw."
            )
        if points is not None and self.candidates is not None and self.candidates > points:
            raise ValueError(
                f"`search.candidates` asks for {self.candidates} different points, and the space has {points}."
            )
        if self.votes >= self.candidate_count:
            raise ValueError(
                f"`search.votes` (k = {self.votes}) must be smaller than the number of candidates "
                f"(p = {self.candidate_count}): a client that votes for everything says nothing."
            )
        return self

    @property
    def candidate_count(self) -> int:
        """p: the number of candidates voted on."""
        points = domains.count(self.space)
        return self.candidates if self.candidates is not None else points if points is not None else 0


class Recipe(Document):
    """One experiment, checked. Build it with `Recipe.read`."""

    name: Name
    description: str = ""
    population: Population
    budget: Budget
    shares: Shares
    data: Data
    cohort: Cohort
    search: Search | None = None
    training: Training
    tracking: Tracking = Tracking()
    ledger: str = "sqlite:///dpray-ledger.db"
    noise: Noise = Noise()

    def tune_space(self) -> dict[str, Any]:
        """The search space as Ray Tune's domains (imports Ray)."""
        return to_tune(self.search.space if self.search is not None else {})

    @model_validator(mode="after")
    def _protects_records_or_clients(self) -> Self:
        if self.population.unit == "user":
            raise ValueError(
                "`population.unit` is `user`, and a cohort's votes and rounds protect a `record` or a `client`; users "
                "are protected by a search in the central model, a recipe with an `objective`."
            )
        return self

    @model_validator(mode="after")
    def _knows_where_records_are(self) -> Self:
        if (self.data.path is None) != (self.cohort.sites is None):
            raise ValueError(
                "`data.path` and `cohort.sites` belong together: each site reads the path on its own machine. Give "
                "both, or `data.dataset` and `cohort.clients` for a simulation."
            )
        return self

    @model_validator(mode="after")
    def _shares_fit_the_parts(self) -> Self:
        if self.search is None and self.shares.search > 0:
            raise ValueError(
                f"`shares.search` is {self.shares.search:g}, but there is no `search`; add one or give it no share."
            )
        if self.search is not None and self.shares.search == 0:
            raise ValueError(
                "`shares.search` is missing: a search releases its votes, so it needs a share of the budget."
            )
        return self

    @model_validator(mode="after")
    def _masked_counts_are_seen_by_nobody(self) -> Self:
        if self.search is not None and self.search.release == "winner" and self.cohort.secure_sum == "masked":
            raise ValueError(
                "`cohort.secure_sum: masked` hides the votes' counts from the aggregator, and `search.release: winner` "
                "is chosen from them there; give `release: votes`, or `secure_sum: trusted`."
            )
        regimes = {"training": self.training.regime, **({"search": self.search.regime} if self.search else {})}
        for part, regime in regimes.items():
            if self.cohort.secure_sum == "masked" and regime == "central":
                raise ValueError(
                    f"`cohort.secure_sum: masked` hides sums without noise from the aggregator, and `{part}.regime: "
                    "central` shows them to it; give `regime: distributed`, or `secure_sum: trusted`."
                )
        return self

    @model_validator(mode="after")
    def _can_be_sampled(self) -> Self:
        words = objection(self)
        if words is not None:
            raise ValueError(words)
        return self

    @model_validator(mode="after")
    def _can_be_rehearsed(self) -> Self:
        if self.search is not None and not self.training.rehearsed:
            raise ValueError(
                f"`search` cannot stand before `{self.training.algorithm}`: clients vote on settings by rehearsing the "
                "training alone, which they cannot do with this one. Delete `search` and fix the settings under "
                "`training`, or train with another algorithm."
            )
        return self

    @model_validator(mode="after")
    def _asks_everybody_for_several_steps(self) -> Self:
        quorum = self.cohort.quorum
        if (
            isinstance(self.training, Scaffold)
            and self.training.steps > 1
            and quorum not in (None, self.cohort.clients)
        ):
            raise ValueError(
                f"`cohort.quorum` is {quorum} of {self.cohort.clients}, and `dp_scaffold` with {self.training.steps} "
                "local steps asks every client in every round, or its control variates do not add up; delete it."
            )
        return self

    @model_validator(mode="after")
    def _every_setting_stands_once(self) -> Self:
        known, fixed = self.training.searchable(), self.training.fixed()
        space = self.search.space if self.search is not None else {}
        for key in space:
            if key == "rounds":
                raise ValueError(
                    "`search.space.rounds` cannot be searched: the plan reserves its releases before the search begins."
                )
            if key not in known:
                raise ValueError(
                    objections.unknown(f"search.space.{key}", key, known, f"a setting of `{self.training.algorithm}`")
                )
            if key.startswith("local_") and self.training.unit == "record":
                raise ValueError(_LOCAL.format(f"search.space.{key}"))
            if key in fixed:
                raise ValueError(
                    f"`{key}` is fixed under `training` and searched in `search.space`; keep one of the two."
                )
            self._check_setting(key, space[key])
        for key in fixed:
            if key.startswith("local_") and self.training.unit == "record" and not self.training.noised_steps:
                raise ValueError(_LOCAL.format(f"training.{key}"))
        if self.budget.non_private and (fixed.get("rho_relative") or "rho_relative" in space):
            raise ValueError("`rho_relative` measures ρ in noise, and a non-private run has none; give `rho` alone.")
        for key in ("learning_rate", "clip"):
            if key not in fixed and key not in space:
                raise ValueError(f"`training.{key}` is missing: give it there, or let `search.space.{key}` choose it.")
        return self

    def _check_setting(self, key: str, setting: Setting) -> None:
        for value in setting.extremes if isinstance(setting, Domain) else (setting,):
            try:
                type(self.training).__pydantic_validator__.validate_assignment(self.training.model_copy(), key, value)
            except ValidationError as error:
                raise ValueError(objections.sentences(error, type(self.training), f"search.space.{key}")[0]) from None

    @model_validator(mode="after")
    def _groups_are_bounded(self) -> Self:
        if (
            self.population.unit == "client"
            and self.training.unit == "record"
            and self.population.records_per_client is None
        ):
            raise ValueError(
                "`population.records_per_client` is missing: a client's account pays for record-level rounds by group "
                "privacy, which needs the declared largest number of records a client may hold."
            )
        return self
