"""The methods of both tables: the paper's settings as they are, and boxes of settings that are tuned alike.

| symbol  | value in table (a)                                                                            |
|---------|------------------------------------------------------------------------------------------------|
| η, C    | .1, 10                                                                                         |
| β, ρ    | .9, .5                                                                                         |
| T       | 70 rounds                                                                                      |
| K, η_l  | DP-SCAFFOLD: 3 local steps at η_l = .1, server rate 1; T·K = 210 compositions                  |
| C_c, γ  | DP-FedFC: the task's `covariance_clip`; 1, and 20 % of μ² for the covariance                   |

DP-FedSOFIM's H is about I/ρ where ‖M‖² is small: it then steps at η/ρ = .2, twice as far as DP-FedGD does at the same
η. `FedGD, η/ρ` and `momentum, η/ρ` take that step without any preconditioner.

In table (b) every method has the same number of trials at the same points of (0, 1)³, laid over boxes that are alike
where the parameters are: the first coordinate is the length of the first step, η, or η/ρ for DP-FedSOFIM. A method
without a third parameter leaves the third coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpray.experiments.papers.dp_fedsofim.data import Task
from dpray.trainers.fedadam import FedAdamSettings
from dpray.trainers.fedfc import FedFCSettings
from dpray.trainers.fedgd import FedGDSettings
from dpray.trainers.momentum import MomentumSettings, NormalisedMomentumSettings
from dpray.trainers.scaffold import ScaffoldSettings
from dpray.trainers.settings import Settings
from dpray.trainers.sofim import SOFIMSettings

FloatArray = NDArray[np.float64]

ROUNDS = 70
ETA, CLIP, BETA, RHO = 0.1, 10.0, 0.9, 0.5
LOCAL_STEPS = 3

REFERENCE = "FedGD"
MATCHED = "FedGD, η/ρ"
SCAFFOLD = "SCAFFOLD"
MEANS = ("FedGD", "SOFIM gradient", "SOFIM momentum")
"""Of table (a), also run with the mean of client means."""


def paper(task: Task, rounds: int = ROUNDS) -> dict[str, Settings]:
    """Table (a): what asks for one sum a round."""
    shared: dict[str, Any] = {"rounds": rounds, "clip": CLIP, "learning_rate": ETA}
    sofim, matched = {**shared, "momentum": BETA, "rho": RHO}, {**shared, "learning_rate": ETA / RHO}
    return {
        REFERENCE: FedGDSettings(**shared),
        MATCHED: FedGDSettings(**matched),
        "momentum, η/ρ": MomentumSettings(**matched, momentum=BETA),
        "SOFIM gradient": SOFIMSettings(**sofim),
        "SOFIM gradient, debiased": SOFIMSettings(**sofim, debias=True),
        "SOFIM momentum": SOFIMSettings(**sofim, precondition="momentum"),
        "SOFIM momentum, corrected": SOFIMSettings(**sofim, precondition="momentum", bias_correction=True),
        "FedFC": FedFCSettings(**shared, covariance_clip=task.covariance_clip),
    }


def scaffold(rounds: int = ROUNDS) -> ScaffoldSettings:
    """Table (a): DP-SCAFFOLD with several local steps; with one it is DP-FedGD."""
    return ScaffoldSettings(rounds=rounds, clip=CLIP, local_steps=LOCAL_STEPS, local_rate=ETA, learning_rate=1.0)


@dataclass(frozen=True)
class Box:
    """A method with the box of its parameters, each log-uniform between two bounds.

    Attributes:
        bounds: by parameter, in the order of the coordinates.
        make: parameters by name to settings.
    """

    bounds: Mapping[str, tuple[float, float]]
    make: Callable[[Task, Mapping[str, float]], Settings]

    def at(self, point: FloatArray) -> dict[str, float]:
        """Parameters at a point of (0, 1)³, to four digits."""
        found = {}
        for (name, (low, high)), u in zip(self.bounds.items(), point, strict=False):
            found[name] = float(f"{low * math.exp(u * math.log(high / low)):.4g}")
        return found


def points(trials: int) -> FloatArray:
    """Sobol points of a fixed seed, (trials, 3): the same for every method. `trials` is a power of two."""
    from scipy.stats import qmc

    drawn = qmc.Sobol(3, seed=2024).random_base2(int(math.log2(trials)))
    return np.asarray(np.clip(drawn, 1e-9, 1 - 1e-9))


_STEP = {"step": (0.03, 10.0), "clip": (0.5, 20.0)}
_RHO = {"rho": (0.01, 10.0)}
_DECAY = {"decay": (0.05, 0.5)}


def _plain(task: Task, config: Mapping[str, float]) -> Settings:
    return FedGDSettings(rounds=ROUNDS, learning_rate=config["step"], clip=config["clip"])


def _with_momentum(kind: type[MomentumSettings]) -> Callable[[Task, Mapping[str, float]], Settings]:
    def make(task: Task, config: Mapping[str, float]) -> Settings:
        beta = 1 - config["decay"]
        return kind(rounds=ROUNDS, learning_rate=config["step"], clip=config["clip"], momentum=beta)

    return make


def _sofim(**fixed: Any) -> Callable[[Task, Mapping[str, float]], Settings]:
    def make(task: Task, config: Mapping[str, float]) -> Settings:
        rho = config["rho"]
        return SOFIMSettings(
            rounds=ROUNDS, learning_rate=config["step"] * rho, clip=config["clip"], momentum=BETA, rho=rho, **fixed
        )

    return make


def _adam(task: Task, config: Mapping[str, float]) -> Settings:
    return FedAdamSettings(
        rounds=ROUNDS, learning_rate=config["step"], clip=config["clip"], adaptivity=config["adaptivity"]
    )


def _fedfc(task: Task, config: Mapping[str, float]) -> Settings:
    return FedFCSettings(
        rounds=ROUNDS,
        learning_rate=config["step"],
        clip=config["clip"],
        covariance_clip=task.covariance_clip,
        gamma=config["gamma"],
    )


def local_steps(config: Mapping[str, float], number: int) -> ScaffoldSettings:
    """DP-SCAFFOLD with this many local steps; `step` is what they move together: K η_l."""
    return ScaffoldSettings(
        rounds=ROUNDS, clip=config["clip"], local_steps=number, local_rate=config["step"] / number, learning_rate=1.0
    )


BOXES: Mapping[str, Box] = {
    REFERENCE: Box(_STEP, _plain),
    "momentum": Box({**_STEP, **_DECAY}, _with_momentum(MomentumSettings)),
    "normalised momentum": Box(
        {"step": (0.02, 2.0), "clip": _STEP["clip"], **_DECAY}, _with_momentum(NormalisedMomentumSettings)
    ),
    "FedAdam": Box({"step": (0.001, 0.3), "clip": _STEP["clip"], "adaptivity": (1e-4, 0.1)}, _adam),
    "FedFC": Box({**_STEP, "gamma": (0.03, 30.0)}, _fedfc),
    "SOFIM gradient": Box({**_STEP, **_RHO}, _sofim()),
    "SOFIM gradient, debiased": Box({**_STEP, **_RHO}, _sofim(debias=True)),
    "SOFIM momentum": Box({**_STEP, **_RHO}, _sofim(precondition="momentum")),
}
"""Table (b). DP-SCAFFOLD is tuned over DP-FedGD's box (`local_steps`)."""
