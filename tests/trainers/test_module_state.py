"""Modules that keep something from call to call, or draw at random: one record, whatever it is, reaches no other."""

import random
import threading
from contextlib import suppress

import numpy as np
import pytest

from dpray.platform.cohort.client import Records, Stack
from dpray.platform.confine import Confinement
from dpray.trainers.torch_module import TorchModule

torch = pytest.importorskip("torch")
nn = torch.nn

from dpray.trainers.module_copies import fresh, seeded  # noqa: E402

WORDS, K, C = 50, 3, 0.1
SIZES = (30, 90, 20)
RAISES, MOVES = 1e6, 49.0


class Words(nn.Module):
    """Raises on a word beyond its vocabulary."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, K)

    def forward(self, x):
        return self.head(self.embedding(x.long()).mean(dim=1))


class Counting(Words):
    """Turns round after some calls."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 if self.calls < 3 else -1)


class CountingInBuffer(Words):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1  # in place, torch itself would refuse it
        return super().forward(x) * (3 - self.calls)


class Remembering(Words):
    """Keeps what it was given in an attribute, and adds it to what comes next."""

    last = None

    def forward(self, x):
        z = self.embedding(x.long()).mean(dim=1)
        before, self.last = self.last, z.detach()
        return self.head(z if before is None or before.shape != z.shape else z - 5 * before)


class Wearing(Words):
    """Changes its own parameter, and a list of what it has seen."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.head.bias.data.add_(1.0)
        self.seen.append(1)
        return super().forward(x) / len(self.seen)


class Dropping(Words):
    """Drops without a layer of dropout."""

    def forward(self, x):
        return self.head(nn.functional.dropout(self.embedding(x.long()).mean(dim=1), 0.5))


class Drawing(Words):
    """Draws from NumPy and Python."""

    def forward(self, x):
        return super().forward(x) * np.random.normal() * random.gauss(0, 1)  # noqa: NPY002


MODULES = [Counting, CountingInBuffer, Remembering, Wearing, Dropping, Drawing]


@pytest.fixture(autouse=True)
def short_passes(monkeypatch):
    """The second client has more records than one pass holds."""
    monkeypatch.setattr("dpray.trainers.record_gradients._HELD", 64)


def some_stack():
    """Clients whose records all pull the same way, so that what all of them meet is seen in the sum."""
    words = np.random.default_rng(0).integers(0, WORDS, (sum(SIZES), 4)).astype(float)
    return Stack(words, np.zeros(sum(SIZES)), np.concatenate([[0], np.cumsum(SIZES)]))


def with_word(stack, word, row):
    x = stack.x.copy()
    x[row] = word
    return Stack(x, stack.y, stack.offsets)


def answer(model, theta, stack):
    """What each client sends, as a host has it: together where the model can, else one by one, confined."""
    together = model.clipped_sums(theta, stack, C)
    if together is not None:
        return together
    return np.stack([Confinement("key").run("a", lambda s=shard: model.clipped_sum(theta, s, C)) for shard in stack])


@pytest.mark.parametrize("word", [RAISES, MOVES, np.nan], ids=["raises", "moves", "NaN"])
@pytest.mark.parametrize("row", [3, 40])
@pytest.mark.parametrize("module", MODULES)
def test_one_record_moves_its_client_by_two_clips_and_no_other_client(module, row, word):
    stack, client = some_stack(), int(np.searchsorted(np.cumsum(SIZES), row, side="right"))
    other = with_word(stack, word, row)
    models = TorchModule(module, K), TorchModule(module, K)
    theta = models[0].initial()
    allowed, others = 2 * C * (1 + models[0].relative_error), np.arange(len(SIZES)) != client
    before, after = (answer(model, theta, each) for model, each in zip(models, (stack, other), strict=True))
    np.testing.assert_array_equal(before[others], after[others])
    assert np.linalg.norm(after[client] - before[client]) <= allowed
    alone = [model.clipped_sum(theta, each[client], C) for model, each in zip(models, (stack, other), strict=True)]
    assert np.linalg.norm(alone[1] - alone[0]) <= allowed
    assert before.any(axis=1).all()


@pytest.mark.parametrize("module", MODULES)
def test_a_record_that_raises_leaves_the_bits_of_the_others(module):
    """As a label that is no class, which is known to contribute zero and to raise nothing."""
    model, stack = TorchModule(module, K), some_stack()
    theta, y = model.initial(), stack.y.copy()
    y[40] = np.nan
    raising = model.clipped_sum(theta, with_word(stack, RAISES, 40)[1], C)
    np.testing.assert_array_equal(raising, model.clipped_sum(theta, Stack(stack.x, y, stack.offsets)[1], C))


@pytest.mark.parametrize("module", MODULES)
def test_the_same_question_has_the_same_answer_whatever_was_asked_before(module):
    model, stack = TorchModule(module, K), some_stack()
    theta = model.initial()
    first = model.clipped_sum(theta, stack[0], C), model.logits(theta, stack[0].x)
    torch.rand(3), np.random.random(3), random.random()  # noqa: NPY002
    for each in (stack[1], with_word(stack, RAISES, 3)[0]):
        model.clipped_sum(theta, each, C)
        again = model.clipped_sum(theta, stack[0], C), model.logits(theta, stack[0].x)
        np.testing.assert_array_equal(again[0], first[0])
        np.testing.assert_array_equal(again[1], first[1])
    np.testing.assert_array_equal(model.initial(), theta)


def test_masks_of_undeclared_dropout_follow_from_theta_too_and_clients_are_asked_one_by_one():
    model, records = TorchModule(Dropping, K), some_stack()[0]
    theta = model.initial()
    assert model.clipped_sums(theta, some_stack(), C) is None
    nearly = theta + 1e-12  # the same in float32, so that only the masks differ
    assert not np.allclose(model.clipped_sum(theta, records, C), model.clipped_sum(nearly, records, C))


def test_a_module_that_cannot_be_copied_is_refused():
    def factory():
        module = Words()
        module.lock = threading.Lock()
        return module

    with pytest.raises(ValueError, match=r"cannot be copied.*lock.*Keep open files, locks"):
        TorchModule(factory, K)


def test_a_copy_has_parameters_of_its_own_and_keeps_ties():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    given = {"0.weight": torch.zeros(3, 3)}
    copied = fresh(module, given)
    assert copied[1].weight is copied[0].weight
    copied[0].weight.data.add_(1.0)
    assert not given["0.weight"].any()
    assert not torch.equal(copied[0].weight, module[0].weight)


def test_randomness_and_the_mode_of_gradients_are_put_back():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    found = []
    for _ in range(2):
        with suppress(KeyError), seeded(3):
            found.append((torch.rand(1).item(), random.random(), np.random.random()))  # noqa: NPY002
            torch.set_grad_enabled(False)
            raise KeyError
    assert found[0] == found[1]
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # noqa: NPY002


def test_records_of_a_client_without_any_are_zero():
    model = TorchModule(Counting, K)
    assert not model.clipped_sum(model.initial(), Records(np.empty((0, 4)), np.empty(0)), C).any()
