"""The `training` of a recipe: one section for each algorithm, named as in `trainers.named`.

A setting that is left out has the trainer's default, or is chosen by the search.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from dpray.experiments.sampling import Sampling
from dpray.experiments.sections import Positive, Regime, Section, Unit, Whole

Coefficient = Annotated[float, Field(ge=0, lt=1)]


class Common(Section):
    """What all trainers take; a setting may instead stand in `search.space`."""

    rehearsed: ClassVar[bool] = True
    """Whether one client alone can rehearse it, so that candidates can be voted on."""
    noised_steps: ClassVar[bool] = False
    """Whether local steps are noised each, so that records may be protected over several of them."""
    sampled: ClassVar[bool] = True
    """Whether its rounds can be over samples: it builds on nothing but their sums of gradients or updates."""

    rounds: Whole
    regime: Regime = "distributed"
    unit: Unit = "record"
    learning_rate: Positive | None = None
    clip: Positive | None = None
    weighting: Literal["records", "clients"] | None = None
    local_steps: Whole | None = None
    local_rate: Positive | None = None
    sampling: Sampling | None = None

    @classmethod
    def searchable(cls) -> tuple[str, ...]:
        """Settings that `search.space` may name. The rounds are reserved before the search and are not among them."""
        planned = ("algorithm", "rounds", "regime", "unit", "sampling")
        return tuple(key for key in cls.model_fields if key not in planned)

    def fixed(self) -> dict[str, Any]:
        """The settings given here, without those left to the trainer's defaults or to the search."""
        return {key: getattr(self, key) for key in self.searchable() if getattr(self, key) is not None}


class SOFIM(Common):
    """DP-FedSOFIM: the server's step is preconditioned by (ρI + MMᵀ)⁻¹."""

    algorithm: Literal["dp_fedsofim"]
    momentum: Coefficient | None = None
    rho: Positive | None = None
    precondition: Literal["gradient", "momentum"] | None = None
    bias_correction: bool | None = None
    rho_relative: bool | None = None
    debias: bool | None = None
    rank: Whole | None = None


class FedGD(Common):
    """DP-FedGD: plain gradient descent on the noised mean gradient."""

    algorithm: Literal["dp_fedgd"]


class Momentum(Common):
    """DP-FedGD with momentum."""

    algorithm: Literal["dp_momentum"]
    momentum: Coefficient | None = None
    bias_correction: bool | None = None


class NormalisedMomentum(Common):
    """Steps of one length, along the momentum."""

    algorithm: Literal["dp_normalised_momentum"]
    momentum: Coefficient | None = None


class FedAdam(Common):
    """DP-FedAdam, and DP-FedYogi: every coordinate has a rate of its own."""

    algorithm: Literal["dp_fedadam", "dp_fedyogi"]
    momentum: Coefficient | None = None
    second_momentum: Coefficient | None = None
    adaptivity: Positive | None = None


class FedAvg(Common):
    """DP-FedAvg: whole updates of local descent, which protect clients."""

    algorithm: Literal["dp_fedavg"]
    unit: Literal["client"] = "client"


class FedFC(Common):
    """DP-FedFC: the server's step is preconditioned by the features' covariance, released before the first round."""

    rehearsed: ClassVar[bool] = False
    sampled: ClassVar[bool] = False

    algorithm: Literal["dp_fedfc"]
    unit: Literal["record"] = "record"
    covariance_clip: Positive
    covariance_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    gamma: Positive | None = None


class Scaffold(Common):
    """DP-SCAFFOLD: noised local steps with control variates; several of them in regime `local` only."""

    rehearsed: ClassVar[bool] = False
    noised_steps: ClassVar[bool] = True
    sampled: ClassVar[bool] = False

    algorithm: Literal["dp_scaffold"]
    unit: Literal["record"] = "record"

    @property
    def steps(self) -> int:
        """K."""
        return self.local_steps or 1

    @model_validator(mode="after")
    def _several_steps_are_local(self) -> Self:
        if self.steps > 1 and self.regime != "local":
            raise ValueError(
                f"`training.regime` is `{self.regime}`, and {self.steps} local steps are private in `local` only, "
                "where each has the whole noise: give `regime: local`, or one local step."
            )
        if self.steps > 1 and self.weighting == "clients":
            raise ValueError("`training.weighting: clients` goes with one local step of `dp_scaffold` only; delete it.")
        return self


Training = Annotated[
    SOFIM | FedGD | Momentum | NormalisedMomentum | FedAdam | FedAvg | FedFC | Scaffold,
    Field(discriminator="algorithm"),
]
"""Any of them."""
