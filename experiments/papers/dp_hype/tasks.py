"""What is tuned: the paper's three tasks, how their records are dealt out, and the scale they are run at here.

| task  | records voted on | network (`nets`)    | local epochs | minibatch | images        |
|-------|------------------|---------------------|--------------|-----------|---------------|
| adult | 32 561, all      | the paper's         | 5            | 64        |               |
| mnist | 15 000 of 60 000 | w = 8 instead of 32 | 5            | 16        | 10 × 10       |
| cifar | 20 000 of 50 000 | w = 4 instead of 32 | 5, not 10    | 16        | 8 × 8, JPEG   |

The reduction is in pixels and widths rather than in records: with n = 50 a client holds out 60 images of MNIST, by
whose accuracy candidates can be told apart, where a tenth of the records would leave it 24. Minibatches of 16 instead
of 64 give a client at least the steps of the paper's. Rates of 1e-4 are taken for standing still there, too.

Federated averaging has 5 rounds with a fifth of the clients where they are alike (iid), and 2 rounds with all clients
where they are not: there the mean of a few is another model than the mean of all. The authors have 5 rounds with all
(10 for CIFAR-10, iid).

Records that did not vote, and that nobody trains on, are the data sets' own test parts: 16 281 of Adult, 5 000 of
MNIST and of CIFAR-10-JPEG each (drawn by the seed). The authors report on the clients' hold-outs, with which the votes
were cast.

| partition                 | meaning                                                                       |
|---------------------------|-------------------------------------------------------------------------------|
| iid                       | equal parts at random                                                         |
| dir30, dir5, dir2, dir0.5 | each class spread by a Dirichlet draw of this concentration; at least 5 each  |

Adult's two classes cannot be spread over 250 clients with concentration .5 without leaving some next to nothing: there
dir2 stands in its place, as in the authors' code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpray.experiments.papers.dp_hype.grid import SLOW
from dpray.experiments.papers.dp_hype.nets import CifarNet, MnistNet
from dpray.experiments.papers.folder import data_folder
from dpray.platform import datasets
from dpray.platform.cohort.client import Records
from dpray.platform.cohort.partition import partition

if TYPE_CHECKING:
    from dpray.trainers.local_search import StackedModel

PARTITIONS: Mapping[str, Mapping[str, Any]] = {
    "iid": {"kind": "iid"},
    **{f"dir{alpha:g}": {"kind": "dirichlet", "alpha": alpha, "minimum": 5} for alpha in (30.0, 5.0, 2.0, 0.5)},
}

ADULT_UNITS: Mapping[str, tuple[int, float, float]] = {
    "age": (0, 40.0, 15.0),
    "fnlwgt": (10, 190_000.0, 100_000.0),
    "education_num": (27, 10.0, 2.5),
    "capital_gain": (63, 1_000.0, 7_500.0),
    "capital_loss": (64, 90.0, 400.0),
    "hours_per_week": (65, 40.0, 12.0),
}
"""Feature, centre and spread of Adult's amounts: public round numbers near the published means and deviations, so that
small clients can learn from them. They are constants: no record's features depend on another's. (The authors fit a
scaler to each client's own records, which a vote of unit client allows and a training of unit record does not.)"""

PIXEL_UNITS: Mapping[str, tuple[float, float]] = {"mnist": (0.13, 0.31), "cifar10_jpeg16": (0.5, 0.25)}
"""Centre and spread of the images' pixels, round numbers of the same kind. In pixels of 0 … 1 a client of MNIST has
hardly begun to learn after five epochs, and the fastest rate looks best to it."""


@dataclass(frozen=True)
class Task:
    """A data set, a network and a scale.

    Attributes:
        name, dataset: `adult`, …; as `datasets.load` knows it.
        epochs, batch: local passes over a client's records, in minibatches of so many.
        dropout: of the MLP; other networks bring their own.
        sampled, whole: FedAvg over iid clients, and over all others: rounds, and the share of clients in each.
        records, tested: so many of the training and the test part, drawn by the seed; None: all of it.
        side: pixels of a side as used; 0 for a table.
        width: w of the network.
        by_loss: whether clients also vote by loss, for which they train a second time.
        slow: candidates with rates up to this one are trained once for all of them (`grid.standing_for`).
    """

    name: str
    dataset: str
    epochs: int
    batch: int = 64
    dropout: float = 0.0
    sampled: tuple[int, float] = (5, 0.2)
    whole: tuple[int, float] = (2, 1.0)
    records: int | None = None
    tested: int | None = None
    side: int = 0
    width: int = 32
    by_loss: bool = False
    slow: float = SLOW

    @property
    def training(self) -> dict[str, float]:
        """What the candidates leave open of a client's own training."""
        return {"epochs": self.epochs, "batch_size": self.batch, "dropout": self.dropout}

    def federation(self, partition: str) -> tuple[int, float]:
        """Rounds of FedAvg, and the share of the clients in each."""
        return self.sampled if partition == "iid" else self.whole

    def model(self) -> StackedModel:
        """The network, for many candidates at once."""
        from dpray.trainers.local_search import StackedMLP, StackedModule

        if self.dataset == "adult":
            return StackedMLP(108, 2, (64, 64))
        if self.dataset == "mnist":
            return StackedModule(MnistNet(self.side, self.width), 10, (1, self.side, self.side))
        return StackedModule(CifarNet(self.width), 10, (3, self.side, self.side))


TASKS = {
    task.name: task
    for task in (
        Task("adult", "adult", epochs=5, dropout=0.2, by_loss=True),
        Task("mnist", "mnist", epochs=5, batch=16, records=15_000, tested=5_000, side=10, width=8, slow=1e-4),
        Task("cifar", "cifar10_jpeg16", epochs=5, batch=16, records=20_000, tested=5_000, side=8, width=4, slow=1e-4),
    )
}
"""Every task, by name."""


@dataclass(frozen=True)
class Condition:
    """One population: a task, a partition, n and a seed."""

    task: Task
    partition: str
    clients: int
    seed: int

    @property
    def key(self) -> tuple[str, str, int, int]:
        """What stands in the tables."""
        return self.task.name, self.partition, self.clients, self.seed

    def ground(self) -> Ground:
        """Records by client, and those that did not vote.

        Raises:
            DatasetMissing: the data is not there; the sentence says what to do.
        """
        rng = np.random.default_rng([self.seed, 11])
        data = datasets.load(self.task.dataset, data_folder())
        x, y = _drawn(self.task.records, data.x_train, data.y_train, rng)
        x_test, y_test = _drawn(self.task.tested, data.x_test, data.y_test, rng)
        dealt = dict(PARTITIONS[self.partition])
        parts = partition(y, self.clients, dealt.pop("kind"), self.seed, **dealt)
        features = self._features(x).astype(np.float32)
        clients = tuple(Records(features[part], y[part]) for part in parts)
        return Ground(clients, Records(self._features(x_test).astype(np.float32), y_test))

    def _features(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Adult's amounts and all pixels in units of their own; smaller images, by means of 2 × 2 pixels.

        MNIST's digits stand in the middle 20 × 20 pixels of their 28 × 28 (LeCun et al. 1998).
        """
        if self.task.dataset == "adult":
            x = x.copy()
            for name, (column, centre, spread) in ADULT_UNITS.items():
                x[:, column] = (x[:, column] * datasets.ADULT_SCALES[name] - centre) / spread
        if self.task.dataset == "mnist":
            x = _in_units(_halved(x.reshape(-1, 1, 28, 28)[..., 4:24, 4:24]), PIXEL_UNITS["mnist"])
        if self.task.dataset == "cifar10_jpeg16":
            x = _in_units(_halved(x.reshape(-1, 3, 16, 16)), PIXEL_UNITS["cifar10_jpeg16"])
        return x


@dataclass(frozen=True, eq=False)
class Ground:
    """What a condition's numbers are computed on.

    Attributes:
        clients: records by client.
        test: records that did not vote.
    """

    clients: tuple[Records, ...]
    test: Records = field(repr=False)


def _drawn(
    number: int | None, x: NDArray[np.float64], y: NDArray[Any], rng: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[Any]]:
    if number is None or number >= len(y):
        return x, y
    chosen = np.sort(rng.choice(len(y), number, replace=False))
    return x[chosen], y[chosen]


def _in_units(x: NDArray[np.float64], units: tuple[float, float]) -> NDArray[np.float64]:
    centre, spread = units
    return (x - centre) / spread


def _halved(images: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means of 2 × 2 pixels, (n, channels · s/2 · s/2), of images (n, channels, s, s)."""
    channels, side = images.shape[1], images.shape[-1] // 2
    return np.asarray(images.reshape(-1, channels, side, 2, side, 2).mean(axis=(3, 5)).reshape(len(images), -1))
