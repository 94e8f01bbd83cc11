"""Private federated training: one small file per algorithm around one round loop.

Names are imported when they are first used, so that importing the package is quick and never loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpray.trainers.base import FederatedTrainer as FederatedTrainer
    from dpray.trainers.checkpoints import CheckpointConflict as CheckpointConflict
    from dpray.trainers.checkpoints import load_parameters as load_parameters
    from dpray.trainers.export import ModelRefused as ModelRefused
    from dpray.trainers.export import export_model as export_model
    from dpray.trainers.export import load_model as load_model
    from dpray.trainers.export import log_model as log_model
    from dpray.trainers.fedadam import DPFedAdamTrainer as DPFedAdamTrainer
    from dpray.trainers.fedadam import DPFedYogiTrainer as DPFedYogiTrainer
    from dpray.trainers.fedadam import FedAdamSettings as FedAdamSettings
    from dpray.trainers.fedadam import FedYogiSettings as FedYogiSettings
    from dpray.trainers.fedavg import DPFedAvgTrainer as DPFedAvgTrainer
    from dpray.trainers.fedavg import FedAvgSettings as FedAvgSettings
    from dpray.trainers.fedfc import DPFedFCTrainer as DPFedFCTrainer
    from dpray.trainers.fedfc import FedFCSettings as FedFCSettings
    from dpray.trainers.fedgd import DPFedGDTrainer as DPFedGDTrainer
    from dpray.trainers.fedgd import FedGDSettings as FedGDSettings
    from dpray.trainers.hold_out import Correct as Correct
    from dpray.trainers.hold_out import HoldOut as HoldOut
    from dpray.trainers.model_statement import ModelStatement as ModelStatement
    from dpray.trainers.models import LinearHead as LinearHead
    from dpray.trainers.models import Model as Model
    from dpray.trainers.momentum import DPMomentumTrainer as DPMomentumTrainer
    from dpray.trainers.momentum import DPNormalisedMomentumTrainer as DPNormalisedMomentumTrainer
    from dpray.trainers.momentum import MomentumSettings as MomentumSettings
    from dpray.trainers.momentum import NormalisedMomentumSettings as NormalisedMomentumSettings
    from dpray.trainers.named import trainer_named as trainer_named
    from dpray.trainers.rehearsal import Rehearsal as Rehearsal
    from dpray.trainers.rehearsal import TrainingTask as TrainingTask
    from dpray.trainers.scaffold import DPScaffoldTrainer as DPScaffoldTrainer
    from dpray.trainers.scaffold import ScaffoldSettings as ScaffoldSettings
    from dpray.trainers.settings import ServerState as ServerState
    from dpray.trainers.settings import Settings as Settings
    from dpray.trainers.sofim import DPFedSOFIMTrainer as DPFedSOFIMTrainer
    from dpray.trainers.sofim import SOFIMSettings as SOFIMSettings
    from dpray.trainers.torch_module import TorchModule as TorchModule
    from dpray.trainers.trainable import TrainerTuning as TrainerTuning

_HOMES = {
    "CheckpointConflict": "checkpoints",
    "Correct": "hold_out",
    "DPFedAdamTrainer": "fedadam",
    "DPFedAvgTrainer": "fedavg",
    "DPFedFCTrainer": "fedfc",
    "DPFedGDTrainer": "fedgd",
    "DPFedSOFIMTrainer": "sofim",
    "DPFedYogiTrainer": "fedadam",
    "DPMomentumTrainer": "momentum",
    "DPNormalisedMomentumTrainer": "momentum",
    "DPScaffoldTrainer": "scaffold",
    "FedAdamSettings": "fedadam",
    "FedAvgSettings": "fedavg",
    "FedFCSettings": "fedfc",
    "FedGDSettings": "fedgd",
    "FedYogiSettings": "fedadam",
    "FederatedTrainer": "base",
    "HoldOut": "hold_out",
    "LinearHead": "models",
    "Model": "models",
    "ModelRefused": "export",
    "ModelStatement": "model_statement",
    "MomentumSettings": "momentum",
    "NormalisedMomentumSettings": "momentum",
    "Rehearsal": "rehearsal",
    "SOFIMSettings": "sofim",
    "ScaffoldSettings": "scaffold",
    "ServerState": "settings",
    "Settings": "settings",
    "TorchModule": "torch_module",
    "TrainerTuning": "trainable",
    "TrainingTask": "rehearsal",
    "export_model": "export",
    "load_model": "export",
    "load_parameters": "checkpoints",
    "log_model": "export",
    "trainer_named": "named",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
