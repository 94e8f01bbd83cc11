"""A recipe's `training.sampling`: what it may stand beside, and what its rounds cost.

A sampled round has no finite μ: there are no shares of μ² to give, and nothing to set beside a vote. So the training is
the whole of such a recipe, its account is of kind `pld`, and its noise is calibrated to the account's ε by composition.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from dpray.experiments.parts import NoisedPart
from dpray.experiments.sections import Section
from dpray.platform.privacy import pld
from dpray.platform.privacy.sampling import SMALLEST_RATE, PoissonSampling
from dpray.platform.privacy.units import Unit

if TYPE_CHECKING:
    from dpray.experiments.spec import Recipe


class Sampling(Section):
    """A Poisson sample for every round: each record, or client, is in it with this probability."""

    unit: Literal["record", "client"]
    rate: Annotated[float, Field(ge=SMALLEST_RATE, lt=1)]

    def sampler(self) -> PoissonSampling:
        """The sampler with its accounting."""
        return PoissonSampling(self.rate, Unit(self.unit))


@dataclass(frozen=True)
class SampledPart(NoisedPart):
    """Rounds over samples: `quanta` and `charged` are μ² without sampling, and no share of the account's.

    Attributes:
        sampling: the sampler.
    """

    sampling: PoissonSampling

    @property
    def sampling_probability(self) -> float:
        """q."""
        return self.sampling.rate

    @property
    def share(self) -> float:
        """There is none."""
        return math.nan

    @property
    def epsilon(self) -> float:
        """ε of all rounds, composed."""
        return self._composed(self.steps)

    @property
    def epsilon_step(self) -> float:
        """ε of one round."""
        return self._composed(1)

    def _composed(self, steps: int) -> float:
        if self.quanta is None:
            return math.inf
        return self.sampling.epsilon(-(-self.quanta // self.steps), steps, self.delta)


def objection(recipe: Recipe) -> str | None:
    """Why a recipe cannot sample; None if it does not, or can."""
    given = recipe.training.sampling
    if given is None:
        return None
    if recipe.search is not None:
        return (
            "`training.sampling` cannot stand beside `search`: clients rehearse the training without sampling, and a "
            "vote's μ² has no part in composed events. Delete `search` and fix the settings, or `training.sampling`."
        )
    if not recipe.training.sampled:
        return (
            f"`training.sampling` cannot be used with `{recipe.training.algorithm}`, which builds on more than sums of "
            "gradients: delete it, or train with another algorithm."
        )
    if given.unit != recipe.training.unit:
        return (
            f"`training.sampling.unit` is `{given.unit}`, and `training.unit` protects a `{recipe.training.unit}`: "
            "sample what is protected."
        )
    if recipe.population.unit == "client" and given.unit == "record":
        return (
            "`training.sampling.unit: record` cannot be charged to an account of unit client: what a sampled release "
            "costs groups of records is not known. Sample clients, or protect records."
        )
    if recipe.budget.non_private:
        return "`training.sampling` hides nothing without noise; delete it, or `budget.non_private`."
    if recipe.budget.delta < pld.SMALLEST_DELTA:
        return f"`budget.delta` must be at least {pld.SMALLEST_DELTA:g} with `training.sampling`."
    if recipe.shares.training != 1:
        return (
            f"`shares.training` is {recipe.shares.training:g}, and composed events have no shares: with "
            "`training.sampling` the training is calibrated to the whole budget. Give it 1."
        )
    if recipe.cohort.cap is not None:
        return (
            "`cohort.cap` counts μ² without sampling, far more than what `training.sampling` makes of it, and would "
            "stop the run: delete one of the two."
        )
    return None
