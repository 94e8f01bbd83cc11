"""What is trained on: features by public constants, a part for the test, and a part of the training set held out.

| task           | records         | features                                                        | ‖x̃‖      |
|----------------|-----------------|-----------------------------------------------------------------|----------|
| cifar10        | 50 000 + 10 000 | EfficientNet-Lite0's, projected to 256, as they come            | 12 … 38  |
| cifar10-eighth | 50 000 + 10 000 | the same, divided by 8 as `platform.datasets` does              | 1.8 … 5  |
| pneumonia      | 2 698 + 468     | 256 random features of 28 × 28 pixels, tanh(3 P(x − ½))         | 4 … 11   |
| pathmnist      | 100 000 + 7 180 | the same of 28 × 28 × 3 pixels; only where its file is          |          |

P is (256, pixels) with independent N(0, 1/pixels) entries of a fixed seed: public, and drawn without looking at data.
The paper's C and η are in units of its features, which we do not know: the same settings are another algorithm on
features that are eight times as small, so CIFAR-10 is there in both units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpray.experiments.papers.folder import data_folder
from dpray.platform import datasets
from dpray.platform.cohort.client import Records
from dpray.platform.cohort.partition import partition
from dpray.trainers.models import take

FloatArray = NDArray[np.float64]

PARTITIONS: Mapping[str, Mapping[str, object]] = {"iid": {}, "dirichlet": {"alpha": 0.5}}
WIDTH = 256
"""Features of every task."""
_GAIN, _SEED = 3.0, 28


@dataclass(frozen=True)
class Task:
    """A data set with its features.

    Attributes:
        name, title: in CSVs; in text.
        dataset, classes, records: as `datasets.load` knows it, with the size of its training set; public.
        features: pixels or published features to what is trained on, record by record.
        covariance_clip: C_c of DP-FedFC, a public round number about as long as its feature rows.
        held_out: share of the training records on which settings are tuned.
        secondary: in table (a) only, in regime `local` with n = 100, without DP-FedFC and local steps.
    """

    name: str
    title: str
    dataset: str
    classes: int
    records: int
    features: Callable[[FloatArray], FloatArray]
    covariance_clip: float
    held_out: float = 0.1
    secondary: bool = False


@dataclass(frozen=True, eq=False)
class Ground:
    """Records to train on, and records that are scored without noise."""

    train: Records
    scored: Records = field(repr=False)
    classes: int


def random_features(x: FloatArray) -> FloatArray:
    """tanh(3 P(x − ½)), (n, 256), of pixels in [0, 1]."""
    pixels = x.shape[1]
    P = np.random.default_rng([_SEED, pixels]).standard_normal((pixels, WIDTH)) / np.sqrt(pixels)
    return np.asarray(np.tanh(_GAIN * ((x - 0.5) @ P)))


TASKS = {
    task.name: task
    for task in (
        Task("cifar10", "CIFAR-10-JPEG features", "cifar10", 10, 50_000, lambda x: 8.0 * x, 25.0),
        Task("cifar10-eighth", "CIFAR-10-JPEG features ÷ 8", "cifar10", 10, 50_000, lambda x: x, 3.125, secondary=True),
        Task("pneumonia", "PneumoniaMNIST (balanced)", "pneumoniamnist", 2, 2_698, random_features, 8.0, 0.2),
        Task("pathmnist", "PathMNIST", "pathmnist", 9, 100_000, random_features, 8.0),
    )
}


@cache
def ground(task: str) -> Ground:
    """Training and test part of a task.

    Raises:
        DatasetMissing: the data is not there.
    """
    return _ground(TASKS[task], data_folder())


def tuning_ground(task: str, seed: int) -> Ground:
    """A task's training part alone, in two: records that are scored are drawn from it; none is of the test part."""
    whole = ground(task)
    order = np.random.default_rng([seed, 7]).permutation(len(whole.train))
    out = round(TASKS[task].held_out * len(order))
    return Ground(take(whole.train, np.sort(order[out:])), take(whole.train, np.sort(order[:out])), whole.classes)


def dealt(train: Records, kind: str, clients: int, seed: int) -> tuple[Records, ...]:
    """The records of every client, iid or by a Dirichlet(.5) draw for each label."""
    parts = partition(train.y, clients, kind, seed, **PARTITIONS[kind])
    return tuple(take(train, part) for part in parts)


def _ground(task: Task, folder: Path) -> Ground:
    data = datasets.load(task.dataset, folder)
    train = Records(task.features(data.x_train), data.y_train)
    return Ground(train, Records(task.features(data.x_test), data.y_test), len(data.classes))
