"""What cannot be trained is refused in a sentence before anything is spent."""

from functools import partial

import numpy as np
import pytest

from dpray.platform.cohort import Cohort, CohortError, Site
from dpray.platform.cohort.client import Records
from dpray.platform.privacy.budget import Budget
from dpray.platform.privacy.mechanisms import ClippedSum, Unit
from dpray.trainers import DPFedAdamTrainer, DPFedSOFIMTrainer, DPMomentumTrainer, TrainingTask
from dpray.trainers.fedgd import FedGDSettings
from dpray.trainers.hold_out import Correct
from dpray.trainers.local_search import LocalSearchTask, StackedMLP
from dpray.trainers.models import LinearHead
from dpray.trainers.sofim import SOFIMSettings
from dpray.trainers.torch_module import TorchModule

torch = pytest.importorskip("torch")


def some_records(n, features=4):
    return Records(np.zeros((n, features)), np.zeros(n, dtype=int))


def trained(people, folder, *, model=None, clients=None, kind=DPFedSOFIMTrainer, **settings):
    """A whole training; what cannot be trained is refused somewhere on the way."""
    model = LinearHead(4, 3) if model is None else model()
    shards = clients or {"a": some_records(5), "b": some_records(7)}
    settings = kind.settings_type(**{"rounds": 3, "clip": 1.0, "learning_rate": 1.0, **settings})
    cohort = Cohort(model, shards, state_dir=folder)
    kind(cohort, people.run("run"), model, settings, budget=Budget(2.0, 1e-5)).fit()


def narrow():
    """A module on 6 features, which clients with 4 cannot train."""
    return TorchModule(lambda: torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)), 3)


class Scaled(torch.nn.Module):
    """It answers, and its gradient cannot be had: a number in it asks for a gradient of its own."""

    def __init__(self):
        super().__init__()
        self.convolution, self.scale = torch.nn.Conv1d(1, 3, 4), torch.ones(1, requires_grad=True)

    def forward(self, x):
        return self.convolution(x[:, None] * self.scale)[:, :, 0]


REFUSED = {
    "no parameters": ({"model": lambda: TorchModule(torch.nn.Flatten, 3)}, "no parameter that requires a gradient"),
    "clients of two widths": (
        {"clients": {"a": some_records(5), "b": some_records(5, features=6)}},
        "one schema .*2 were given",
    ),
    "a linear head of another width": (
        {"model": lambda: LinearHead(6, 3)},
        r"takes records of the shape \(6,\), and the clients' have \(4,\)",
    ),
    "a module of another width": ({"model": narrow}, r"does not take the clients' records, of the shape \(4,\)"),
    "a module whose gradient raises": (
        {"model": lambda: TorchModule(Scaled, 3)},
        r"does not take the clients' records",
    ),
    "a module for images": (
        {"model": lambda: TorchModule(lambda: torch.nn.Sequential(torch.nn.Conv2d(1, 3, 2), torch.nn.Flatten()), 3)},
        r"does not take the clients' records, of the shape \(4,\)",
    ),
    "a client without records": ({"clients": {"a": some_records(5), "b": some_records(0)}}, "'b' has no records"),
    "no rounds": ({"rounds": 0}, "`rounds` of DP-FedSOFIM must be a whole number of at least 1, and 0"),
    "a clip of zero": ({"clip": 0.0}, "`clip` of DP-FedSOFIM must be a finite number above 0, and 0.0"),
    "a negative clip": ({"clip": -1.0}, "`clip` of .*above 0, and -1.0"),
    "a damping of zero": ({"rho": 0.0}, "`rho` of DP-FedSOFIM must be a finite number above 0, and 0.0"),
    "a negative damping": ({"rho": -0.5}, "`rho` of .*above 0, and -0.5"),
    "a momentum of one": ({"momentum": 1.0}, r"`momentum` of DP-FedSOFIM must be .*, and 1.0"),
    "a negative momentum": ({"momentum": -0.1}, r"`momentum` of DP-FedSOFIM must be .*, and -0.1"),
    "momentum without curvature": (
        {"kind": DPMomentumTrainer, "momentum": 1.0},
        r"`momentum` of DP-Momentum must be .*, and 1.0",
    ),
    "Adam's second momentum": (
        {"kind": DPFedAdamTrainer, "second_momentum": 1.0},
        r"`second_momentum` of DP-FedAdam must be .*, and 1.0",
    ),
}


@pytest.mark.parametrize(("given", "sentence"), REFUSED.values(), ids=REFUSED)
def test_the_account_is_as_it_was(given, sentence, people, tmp_path):
    with pytest.raises((ValueError, CohortError), match=sentence):
        trained(people, tmp_path, **given)
    account = people.account(Unit.RECORD)
    assert (account.spent, account.reserved) == (0, 0)


def test_sites_are_asked_before_anything_is_charged(people, ray_local, tmp_path):
    """What a site holds is known once its host is up."""
    clients = {name: Site(partial(some_records, 5, features=4), 5) for name in ("a", "b")}
    for model in (narrow, lambda: LinearHead(6, 3)):
        with pytest.raises(CohortError, match=r"the clients'.* \(4,\)"):
            trained(people, tmp_path, model=model, clients=clients)
    account = people.account(Unit.RECORD)
    assert (account.spent, account.reserved) == (0, 0)
    trained(people, tmp_path, clients=clients)
    assert account.spent > 0  # negative control: a training that is not refused spends


@pytest.mark.parametrize("task", ["rehearsal", "search", "search and gradients", "hold-out"])
def test_every_task_of_a_cohort_refuses_records_of_another_width(task, tmp_path):
    made = {
        "rehearsal": lambda features: TrainingTask(LinearHead(features, 3), None),
        "search": lambda features: LocalSearchTask(StackedMLP(features, 3)),
        "search and gradients": lambda features: LocalSearchTask(StackedMLP(4, 3), gradients=LinearHead(features, 3)),
        "hold-out": lambda features: Correct(LinearHead(features, 3)),
    }[task]
    Cohort(made(4), {"a": some_records(5)}, state_dir=tmp_path)
    with pytest.raises(CohortError, match=r"\(4,\)"):
        Cohort(made(6), {"a": some_records(5)}, state_dir=tmp_path)


@pytest.mark.parametrize(
    "factory", [torch.nn.Flatten, lambda: torch.nn.Linear(4, 3).requires_grad_(False)], ids=["none", "all frozen"]
)
def test_a_model_without_parameters(factory):
    with pytest.raises(ValueError, match="no parameter that requires a gradient: there is nothing to train"):
        TorchModule(factory, 3)


@pytest.mark.parametrize("clip", [0.0, -1.0, np.nan, np.inf])
def test_a_clip_that_bounds_nothing(clip):
    for settings in (SOFIMSettings, FedGDSettings):
        with pytest.raises(ValueError, match=r"`clip` of .* must be a finite number above 0"):
            settings(rounds=3, clip=clip, learning_rate=1.0)
    with pytest.raises(ValueError, match="clip"):
        ClippedSum(clip, Unit.RECORD, 15, 10)
    model = TorchModule(lambda: torch.nn.Linear(4, 3), 3)
    for call in (model.clipped_sum, lambda theta, records, c: model.clipped_sums(theta, [records], c)):
        with pytest.raises(ValueError, match=r"must lie between 1e-20 and 1e\+20"):
            call(model.initial(), some_records(2), clip)
