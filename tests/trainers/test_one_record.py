"""One record, replaced by anything, moves what clients send by two clips at most, and no other client's message."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpray.platform.cohort.client import Records, Stack
from dpray.trainers.models import LinearHead
from dpray.trainers.torch_module import TorchModule

torch = pytest.importorskip("torch")
nn = torch.nn

K, C = 3, 0.7
SIZES = (40, 70, 1, 15)


def mlp():
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, K))


def cnn():
    return nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, K))


def words():
    """Raises on numbers beyond its vocabulary."""

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, K)

        def forward(self, x):
            return self.head(self.embedding(x.long()).mean(dim=1))

    return Words()


MODELS = {
    "linear head": (LinearHead(5, K), (5,)),
    "mlp": (TorchModule(mlp, K), (5,)),
    "cnn": (TorchModule(cnn, K), (1, 6, 6)),
    "words": (TorchModule(words, K), (3,)),
}
ANYTHING = st.one_of(
    st.sampled_from([np.nan, np.inf, -np.inf, 1e30, -1e30, 1e38, 1e300, 1e-300, 0.0, -1.0, 12.0]), st.floats(width=64)
)
LABEL = st.one_of(st.integers(0, K - 1), st.sampled_from([K, -1, 0.5, np.nan, np.inf, 1e30]))


def some_theta(model):
    start = model.initial()
    return 3 * start + np.random.default_rng(5).standard_normal(len(start)) / 3


def some_stack(name):
    rng, shape = np.random.default_rng(0), (sum(SIZES), *MODELS[name][1])
    x = rng.integers(0, 10, shape).astype(float) if name == "words" else 2 * rng.standard_normal(shape)
    return Stack(x, rng.integers(0, K, len(x)).astype(float), np.concatenate([[0], np.cumsum(SIZES)]))


def client_of(row):
    return int(np.searchsorted(np.cumsum(SIZES), row, side="right"))


def poisoned(stack, row, values, label):
    """The stack with one record replaced: its first features by the values, the rest by the last of them."""
    x, y = stack.x.copy(), stack.y.copy()
    flat = x[row].reshape(-1)
    flat[:] = values[-1]
    flat[: len(values)] = values[: len(flat)]
    x[row], y[row] = flat.reshape(x[row].shape), label
    return Stack(x, y, stack.offsets)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=40, deadline=None)
@given(
    row=st.integers(0, sum(SIZES) - 1),
    values=st.lists(ANYTHING, min_size=1, max_size=3),
    label=LABEL,
    alone=st.booleans(),
)
def test_one_record_moves_the_sum_by_two_clips_at_most(name, row, values, label, alone):
    model, _ = MODELS[name]
    theta, before = some_theta(model), some_stack(name)
    after, client = poisoned(before, row, values, label), client_of(row)
    if alone:
        sums = [model.clipped_sum(theta, each[client], C) for each in (before, after)]
    else:
        rows = [model.clipped_sums(theta, each, C) for each in (before, after)]
        others = np.arange(len(SIZES)) != client
        np.testing.assert_array_equal(rows[0][others], rows[1][others])
        sums = [each.sum(axis=0) for each in rows]
    assert np.isfinite(sums[1]).all()
    assert np.linalg.norm(sums[1] - sums[0]) <= 2 * C * (1 + model.relative_error)
    assert sums[0].any()  # a model that sends nothing would pass


@pytest.mark.parametrize("name", MODELS)
def test_without_the_clip_one_record_moves_it_further(name):
    """Negative control of the test above."""
    model, _ = MODELS[name]
    theta, before = 10 * some_theta(model), some_stack(name)
    moved = []
    for label in range(K):
        after = poisoned(before, 50, [9.0], label)
        sums = [model.clipped_sum(theta, each[1], 1e6) for each in (before, after)]
        moved.append(np.linalg.norm(sums[1] - sums[0]))
    assert max(moved) > 2 * C * (1 + model.relative_error)


@pytest.mark.parametrize("name", ["mlp", "cnn", "words"])
def test_clients_in_one_pass_send_what_each_would_alone(name):
    model, _ = MODELS[name]
    theta, stack = some_theta(model), some_stack(name)
    alone = np.array([model.clipped_sum(theta, shard, C) for shard in stack])
    together = model.clipped_sums(theta, stack, C)
    np.testing.assert_allclose(together, alone, atol=1e-5)
    assert (np.linalg.norm(together, axis=1) > 0.3 * C).all()
    np.testing.assert_array_equal(model.clipped_sums(theta, [*stack], C), together)


def test_a_client_without_records_among_others_sends_zero():
    model, _ = MODELS["mlp"]
    stack = some_stack("mlp")
    gaps = Stack(stack.x, stack.y, np.array([0, 0, 40, 40, 126, 126]))
    rows = model.clipped_sums(some_theta(model), gaps, C)
    assert rows.any(axis=1).tolist() == [False, True, False, True, False]
    np.testing.assert_allclose(rows[1], model.clipped_sum(some_theta(model), stack[0], C), atol=1e-5)


def test_with_dropout_clients_are_asked_one_by_one():
    model = TorchModule(lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(5, K)), K)
    assert model.clipped_sums(model.initial(), some_stack("mlp"), C) is None


def test_sums_of_a_full_chunk_stay_within_the_margin():
    """64 aligned records at the clip: the largest roundings that float32 sums can make here, before and after."""
    model = TorchModule(lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4, 2)), 2)
    theta, x, clip = model.initial(), np.ones((64, 1, 3, 3)), 1e-3
    sums = [model.clipped_sum(theta, Records(x, np.append(np.zeros(63), last)), clip) for last in (0, 1)]
    assert np.linalg.norm(sums[0]) == pytest.approx(64 * clip, rel=3e-4)
    assert 1.99 * clip < np.linalg.norm(sums[1] - sums[0]) <= 2 * clip * (1 + model.relative_error)
