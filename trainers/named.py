"""The trainers by the names that recipes give them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpray.trainers.base import FederatedTrainer

TRAINERS = {
    "dp_fedsofim": ("sofim", "DPFedSOFIMTrainer"),
    "dp_fedgd": ("fedgd", "DPFedGDTrainer"),
    "dp_momentum": ("momentum", "DPMomentumTrainer"),
    "dp_normalised_momentum": ("momentum", "DPNormalisedMomentumTrainer"),
    "dp_fedadam": ("fedadam", "DPFedAdamTrainer"),
    "dp_fedyogi": ("fedadam", "DPFedYogiTrainer"),
    "dp_fedavg": ("fedavg", "DPFedAvgTrainer"),
    "dp_fedfc": ("fedfc", "DPFedFCTrainer"),
    "dp_scaffold": ("scaffold", "DPScaffoldTrainer"),
}
"""Module and class by name."""


def trainer_named(name: str) -> type[FederatedTrainer]:
    """The trainer of this name.

    Raises:
        ValueError: there is none; all names are told.
    """
    if name not in TRAINERS:
        raise ValueError(f"There is no trainer {name!r}. Known: {', '.join(TRAINERS)}.")
    module, kind = TRAINERS[name]
    found: type[FederatedTrainer] = getattr(import_module(f"dpray.trainers.{module}"), kind)
    return found
