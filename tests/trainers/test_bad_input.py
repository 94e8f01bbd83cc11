"""What cannot be trained is refused in a sentence before anything is spent."""

import numpy as np
import pytest

from dpray.platform.cohort import Cohort, CohortError
from dpray.platform.cohort.client import Records
from dpray.platform.privacy.mechanisms import ClippedSum, Unit
from dpray.trainers.fedgd import FedGDSettings
from dpray.trainers.models import LinearHead
from dpray.trainers.sofim import SOFIMSettings
from dpray.trainers.torch_module import TorchModule

torch = pytest.importorskip("torch")


def some_records(n, features=4):
    return Records(np.zeros((n, features)), np.zeros(n, dtype=int))


@pytest.mark.parametrize(
    "factory", [torch.nn.Flatten, lambda: torch.nn.Linear(4, 3).requires_grad_(False)], ids=["none", "all frozen"]
)
def test_a_model_without_parameters(factory):
    with pytest.raises(ValueError, match="no parameter that requires a gradient: there is nothing to train"):
        TorchModule(factory, 3)


def test_clients_whose_features_have_another_width(tmp_path):
    with pytest.raises(CohortError, match=r"one schema .*2 were given"):
        Cohort(LinearHead(4, 3), {"a": some_records(5), "b": some_records(5, features=6)}, state_dir=tmp_path)


def test_a_client_without_records(tmp_path):
    with pytest.raises(CohortError, match="'b' has no records: leave it out"):
        Cohort(LinearHead(4, 3), {"a": some_records(5), "b": some_records(0)}, state_dir=tmp_path)


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
