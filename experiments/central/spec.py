"""The recipe of a search in the central model: whose losses, which search, and what it may spend.

| recipe | symbol | meaning |
|---|---|---|
| `budget.epsilon`, `budget.delta` | ε, δ | lifetime budget of the population's account |
| `spend` | μ² | what this run takes of it: a share, an ε at the account's δ, or a μ; all of it if left out |
| `search.iterations` | T | releases; each spends μ²/T |
| `search.clip` | B | bound on a user's gradient, in losses per unit of θ |
| `search.bound` | c | largest loss that counts in full (`private_random`) |
| `search.candidates` | K | candidates drawn (`private_random`) |
| `score.bound`, `score.share` | c, μ_s²/μ² | largest loss that counts in full, and what the score takes of `spend` |

The settings of a search are those of its class in `dpray.searchers`, where they are explained; what is left out has the
default there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from dpray.experiments.central.objectives import Objective
from dpray.experiments.domains import Domain
from dpray.experiments.sections import (
    Budget,
    Document,
    Name,
    Noise,
    Population,
    Positive,
    Section,
    Seed,
    Space,
    Tracking,
    Whole,
)
from dpray.searchers import steps

_CONTINUOUS = ("uniform", "loguniform")
_HERE = ("algorithm", "space", "start")
"""What is not handed to the search as it is written."""


class Spend(Section):
    """What a run takes of its account: exactly one of a share of μ², an ε at the account's δ, and a μ."""

    share: Annotated[float, Field(gt=0, le=1)] | None = None
    epsilon: Positive | None = None
    mu: Positive | None = None

    @model_validator(mode="after")
    def _is_said_once(self) -> Self:
        given = [key for key in ("share", "epsilon", "mu") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(
                f"`spend` must say once what the run takes of the account, as `share`, `epsilon` or `mu`; it has "
                f"{' and '.join(f'`{key}`' for key in given) or 'none of them'}."
            )
        return self


class Score(Section):
    """One more release when the search is done: the users' mean loss at its result, clipped and noised.

    Attributes:
        bound: c, in losses; a user's loss counts within [0, c].
        share: of what the run spends; the search has the rest.
    """

    bound: Positive
    share: Annotated[float, Field(gt=0, lt=1)]


class Searching(Section):
    """What every search takes.

    Attributes:
        space: domains or fixed values in place of the objective's own, by key.
        points_per_trial: points one trial evaluates.
        max_retries, time_limit, seed: as `searchers.central.CentralSearch` has them.
    """

    space: Space = Field(default_factory=dict)
    points_per_trial: Whole = 1
    max_concurrent: Whole = 2
    max_retries: Annotated[int, Field(ge=0)] | None = None
    time_limit: Positive | None = None
    seed: Seed = 0

    @property
    def own(self) -> dict[str, Any]:
        """Settings for the search's class, without those left to its defaults."""
        given = ((key, getattr(self, key)) for key in type(self).model_fields if key not in _HERE)
        return {key: value for key, value in given if value is not None}


class Continuous(Searching):
    """A search of a box: every searched key is a float between two bounds."""

    iterations: Whole

    @model_validator(mode="after")
    def _is_a_box(self) -> Self:
        for key, setting in self.space.items():
            if isinstance(setting, Domain) and setting.kind not in _CONTINUOUS:
                raise ValueError(
                    f"`search.space.{key}` is {{{setting.kind}: …}}, and this search needs a range of floats there, "
                    "{uniform: [low, high]} or {loguniform: [low, high]}. `private_random` searches whole numbers and "
                    "listed values."
                )
        return self


class Descent(Continuous):
    """A walk along gradients.

    Attributes:
        start: θ_0 as a configuration, or `objective` (where it says searches start, else the center), `center`,
            `random`; the last and the objective's are drawn by `seed`.
    """

    start: Literal["objective", "center", "random"] | dict[str, float] = "objective"
    step: str | None = None
    rate: Positive | None = None
    keep: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _has_a_step_rule(self) -> Self:
        try:
            steps.rule(self.step if self.step is not None else "noise_aware", self.rate)
        except ValueError as error:
            raise ValueError(f"`search.step`: {error}") from None
        return self


class Clipped(Descent):
    """A private walk."""

    clip: Positive | None = None


class Posterior(Section):
    """The prior and the batch of DP-GIBO and GIBO."""

    lengthscale: Positive | dict[str, Positive] | None = None
    outputscale: Positive | None = None
    noise: Positive | None = None
    batch: Literal["fixed", "adaptive"] | None = None
    batch_size: Annotated[int, Field(ge=2)] | None = None
    bias: Positive | None = None
    rotate: bool | None = None


class DPGIBO(Clipped, Posterior):
    """`DPGIBOSearch`."""

    algorithm: Literal["dp_gibo"]


class GIBO(Descent, Posterior):
    """`GIBOSearch`: NOT PRIVATE."""

    algorithm: Literal["gibo"]


class FiniteDifferences(Clipped):
    """`FiniteDifferenceSearch`."""

    algorithm: Literal["finite_differences"]
    distance: Positive | dict[str, Positive] | None = None
    two_sided: bool | None = None


class SPSA(Clipped):
    """`SPSASearch`."""

    algorithm: Literal["spsa"]
    distance: Positive | dict[str, Positive] | None = None
    directions: Whole | None = None


class PrivateRandom(Searching):
    """`PrivateRandomSearch`."""

    algorithm: Literal["private_random"]
    candidates: Annotated[int, Field(ge=2)]
    bound: Positive


class GlobalBO(Continuous):
    """`GlobalBOSearch`: NOT PRIVATE."""

    algorithm: Literal["global_bo"]
    batch_size: Whole | None = None
    first: Annotated[int, Field(ge=2)] | None = None


AnySearch = DPGIBO | GIBO | FiniteDifferences | SPSA | PrivateRandom | GlobalBO
ALGORITHMS = ("dp_gibo", "gibo", "finite_differences", "spsa", "private_random", "global_bo")
WITHOUT_NOISE = ("gibo", "global_bo")


class CentralRecipe(Document):
    """One search in the central model, checked. Build it with `kinds.read`."""

    name: Name
    description: str = ""
    population: Population
    budget: Budget
    spend: Spend | None = None
    objective: Objective
    search: Annotated[AnySearch, Field(discriminator="algorithm")]
    score: Score | None = None
    tracking: Tracking = Tracking()
    ledger: str = "sqlite:///dpray-ledger.db"
    noise: Noise = Noise()

    @model_validator(mode="after")
    def _protects_users(self) -> Self:
        if self.population.unit != "user":
            raise ValueError(
                f"`population.unit` must be `user`, and `{self.population.unit}` stands there: a search in the central "
                "model clips what each user's losses can do, and protects nothing finer or coarser."
            )
        return self

    @model_validator(mode="after")
    def _noise_is_there_or_asked_away(self) -> Self:
        algorithm, non_private = self.search.algorithm, self.budget.non_private
        if algorithm in WITHOUT_NOISE and not non_private:
            raise ValueError(
                f"`search.algorithm: {algorithm}` releases without noise: NOT PRIVATE. Say so with "
                "`budget.non_private: true` in place of an ε, on a population of its own, or use `dp_gibo`."
            )
        if non_private and self.spend is not None:
            raise ValueError("`spend` has no meaning without noise (`budget.non_private: true`); delete it.")
        if non_private and self.score is not None:
            raise ValueError("`score` has no meaning without noise (`budget.non_private: true`); delete it.")
        if isinstance(self.search, Clipped):
            if not non_private and self.search.clip is None:
                raise ValueError(
                    "`search.clip` is missing: a private search bounds every user's gradient, in losses per unit of θ."
                )
            if non_private and self.search.clip is not None:
                raise ValueError("`search.clip` has no effect without noise (`budget.non_private: true`); delete it.")
        return self
