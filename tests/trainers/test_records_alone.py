"""The check for tasks of one's own: passed by the models that are shipped, and by nothing that one record can break."""

import numpy as np
import pytest

from dpray.platform.cohort.check import check_records_alone
from dpray.platform.cohort.client import ClientTask, Records
from dpray.platform.cohort.errors import CohortError
from dpray.trainers.models import LinearHead

F, K, C = 4, 3, 0.5


def some_records(n=6, x_type=float, y_type=int):
    rng = np.random.default_rng(0)
    return Records((3 * rng.standard_normal((n, F))).astype(x_type), rng.integers(0, K, n).astype(y_type))


def some_theta(d):
    return np.random.default_rng(1).standard_normal(d)


@pytest.mark.parametrize("x_type", [np.float64, np.float32, np.int64, np.int8])
@pytest.mark.parametrize("y_type", [np.int64, np.uint8, np.float64])
@pytest.mark.parametrize("clip", [1e-15, C, 1e3])
def test_a_linear_head_passes(x_type, y_type, clip):
    head = LinearHead(F, K)
    check_records_alone(head, some_records(x_type=x_type, y_type=y_type), some_theta(head.dimension), clip)


def a_module_of_words():
    torch = pytest.importorskip("torch")
    from dpray.trainers.torch_module import TorchModule

    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = torch.nn.Embedding(10, 4), torch.nn.Linear(4, K)

        def forward(self, x):
            return self.head(self.embedding(x.long()).mean(dim=1))

    return TorchModule(Words, K)


def some_words():
    rng = np.random.default_rng(0)
    return Records(rng.integers(0, 10, (4, 3)).astype(float), rng.integers(0, K, 4).astype(float))


@pytest.mark.parametrize("clip", [1e-15, C, 1e15])
def test_a_torch_module_passes_though_it_raises_on_unknown_words(clip):
    model = a_module_of_words()
    check_records_alone(model, some_words(), some_theta(model.dimension), clip)


class Scaled(LinearHead):
    """Standardises features with the client's own mean and deviation."""

    def clipped_sums(self, theta, shards, clip):
        return None

    def clipped_sum(self, theta, records, clip):
        x = (records.x - records.x.mean(axis=0)) / records.x.std(axis=0)
        return super().clipped_sum(theta, Records(x, records.y), clip)


class Raising(Scaled):
    """Raises on what a careful reader of files might call impossible."""

    def clipped_sum(self, theta, records, clip):
        if (records.y >= self.classes).any():
            raise IndexError("index 1000000 is out of bounds")
        return LinearHead.clipped_sum(self, theta, records, clip)


class NotClipping(Scaled):
    def clipped_sum(self, theta, records, clip):
        return len(records) * self.mean_gradient(theta, records)


class Poisonable(ClientTask):
    """Clips by hand; a NaN passes through `min` and reaches the whole sum."""

    dimension = F

    def clipped_sum(self, theta, records, clip):
        norms = np.linalg.norm(records.x, axis=1)
        return np.sum(records.x * np.minimum(1, clip / norms)[:, None], axis=0)


class Together(LinearHead):
    """Centres features over all clients of a host: one client's record reaches the others' sums."""

    def clipped_sums(self, theta, shards, clip):
        mean = np.nanmean(shards.x, axis=0)
        shifted = [Records(each.x - np.clip(mean, -1e6, 1e6), each.y) for each in shards]
        return super().clipped_sums(theta, shifted, clip)


@pytest.mark.parametrize(
    ("task", "poison"),
    [
        (Scaled(F, K), "features"),
        (Raising(F, K), "label huge .*it raised IndexError: index 1000000"),
        (NotClipping(F, K), "features"),
        (Poisonable(), "NaN"),
        (Together(F, K), "features"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tasks_that_one_record_breaks_are_found_and_the_poison_named(task, poison):
    with pytest.raises(CohortError, match=rf"{type(task).__name__} breaks the clip: record \d with .*{poison}"):
        check_records_alone(task, some_records(), some_theta(task.dimension), C)


def test_a_torch_module_whose_chunk_raises_whole_is_found(monkeypatch):
    model = a_module_of_words()

    def as_a_whole(parameters, x, y, stream):
        return model._run(parameters, x, y, stream), np.ones(len(y), dtype=bool)

    monkeypatch.setattr(model, "_evaluated", as_a_whole)
    with pytest.raises(CohortError, match=r"features -1 .*it raised IndexError: index out of range"):
        check_records_alone(model, some_words(), some_theta(model.dimension), C)


class Stretched(LinearHead):
    """Clips to C(1 + 10⁻⁴)."""

    def clipped_sums(self, theta, shards, clip):
        return super().clipped_sums(theta, shards, (1 + 1e-4) * clip)


def test_the_margin_that_a_task_states_is_what_it_is_held_to():
    """Two classes: the other label turns a clipped gradient round, so that 2C is reached."""
    records, theta = Records(np.full((3, 1), 1e3), np.array([1, 1, 0])), np.zeros(4)
    check_records_alone(LinearHead(1, 2), records, theta, C)
    stretched = Stretched(1, 2)
    with pytest.raises(CohortError, match="moved the sum by 2"):
        check_records_alone(stretched, records, theta, C)
    stretched.relative_error = 1.01e-4
    check_records_alone(stretched, records, theta, C)


def test_a_message_of_zeros_shows_nothing_and_says_so():
    class Silent(Scaled):
        def clipped_sum(self, theta, records, clip):
            raise RuntimeError("no GPU here")

    with pytest.raises(CohortError, match=r"nothing was checked \(it raised RuntimeError: no GPU here\)"):
        check_records_alone(Silent(F, K), some_records(), some_theta(15), C)
