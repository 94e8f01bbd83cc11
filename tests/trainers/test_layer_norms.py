"""Clipping by layers: the norms and sums of per-record gradients, of all kinds of layers, at every size of number."""

import numpy as np
import pytest

from dpray.platform.cohort.client import Records
from dpray.trainers.torch_module import TorchModule

torch = pytest.importorskip("torch")
nn = torch.nn

from dpray.trainers.layer_norms import Outer, Rows, norms  # noqa: E402

K, C = 3, 0.5


def images(layer, channels=2, size=7):
    """A layer of images, and a head that weighs all its outputs."""
    return lambda: nn.Sequential(layer(), nn.Tanh(), nn.Flatten(), nn.LazyLinear(K)), (channels, size, size)


def series(layer, *shape):
    return lambda: nn.Sequential(layer(), nn.Tanh(), nn.Flatten(), nn.LazyLinear(K)), shape


class Frames(nn.Module):
    """Folds the frames of one record into a batch, and counts pixels as words."""

    def __init__(self):
        super().__init__()
        self.conv, self.mix, self.head = nn.Conv2d(1, 2, 3), nn.Linear(4, 5), nn.Linear(5, K)

    def forward(self, x):
        frames = torch.relu(self.conv(x.flatten(0, 1).unsqueeze(1)))
        return self.head(self.mix(frames.flatten(2)).reshape(len(x), -1, 5).mean(dim=1))


class WithoutBatch(nn.Module):
    """Takes its one record out of its batch of one."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 3, 3), nn.Linear(75, K)

    def forward(self, x):
        return self.head(self.conv(x.squeeze(0)).flatten())[None]


LAYERS = {
    "linear": series(lambda: nn.Linear(6, 4), 6),
    "linear without bias": series(lambda: nn.Linear(6, 4, bias=False), 6),
    "linear at 5 positions": series(lambda: nn.Linear(6, 4), 5, 6),
    "conv2d": images(lambda: nn.Conv2d(2, 4, 3)),
    "conv2d without bias": images(lambda: nn.Conv2d(2, 4, 3, bias=False)),
    "stride": images(lambda: nn.Conv2d(2, 4, 3, stride=2)),
    "stride by side": images(lambda: nn.Conv2d(2, 4, (3, 2), stride=(1, 3))),
    "padding": images(lambda: nn.Conv2d(2, 4, 3, padding=(2, 1))),
    "padding valid": images(lambda: nn.Conv2d(2, 4, 3, padding="valid")),
    "padding same": images(lambda: nn.Conv2d(2, 4, 3, padding="same")),
    "padding same, even kernel": images(lambda: nn.Conv2d(2, 4, (4, 2), padding="same", dilation=(1, 3))),
    "reflect": images(lambda: nn.Conv2d(2, 4, 3, padding=2, padding_mode="reflect")),
    "replicate": images(lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="replicate")),
    "circular, same": images(lambda: nn.Conv2d(2, 4, 4, padding="same", padding_mode="circular")),
    "groups": images(lambda: nn.Conv2d(4, 6, 3, groups=2), 4),
    "depthwise": images(lambda: nn.Conv2d(4, 8, 3, groups=4), 4),
    "dilation": images(lambda: nn.Conv2d(2, 4, 2, dilation=(2, 3))),
    "all of it": images(lambda: nn.Conv2d(4, 4, 3, stride=2, padding=3, dilation=2, groups=2, bias=False), 4, 9),
    "conv1d": series(lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), 2, 9),
    "conv3d": series(lambda: nn.Conv3d(1, 2, 2, stride=(1, 2, 1)), 1, 4, 4, 3),
    "frames": (Frames, (3, 4, 4)),
    "without a batch": (WithoutBatch, (2, 7, 7)),
}


def materialised(factory, shape):
    """A factory whose lazy layers have met a record."""

    def made():
        module = factory()
        module(torch.zeros(1, *shape))
        return module

    return made


def some_records(n, shape, seed=0):
    rng = np.random.default_rng(seed)
    return Records(3 * rng.standard_normal((n, *shape)), rng.integers(0, K, n))


def record_norms(model, theta, records):
    return torch.cat([norms(list(found.values())) for found, _, _ in model._per_record(theta, records)]).numpy()


def known(model):
    ((route, _),) = model._parts.routes.values()
    return set(route.outputs)


@pytest.fixture
def by_vmap(monkeypatch):
    """Makes models whose gradients all come from `vmap(grad)`."""

    def made(factory):
        with monkeypatch.context() as patch:
            patch.setattr("dpray.trainers.record_gradients._candidates", lambda module, trained: {})
            return TorchModule(factory, K)

    return made


@pytest.mark.parametrize("name", LAYERS)
def test_norms_and_sums_equal_those_of_vmap(name, by_vmap):
    factory, shape = materialised(*LAYERS[name]), LAYERS[name][1]
    model, oracle, records = TorchModule(factory, K), by_vmap(factory), some_records(9, shape)
    theta = model.initial()
    expected = record_norms(oracle, theta, records)
    np.testing.assert_allclose(record_norms(model, theta, records), expected, rtol=1e-5)
    clip = float(np.median(expected))
    whole = oracle.clipped_sum(theta, records, clip)
    np.testing.assert_allclose(model.clipped_sum(theta, records, clip), whole, atol=1e-5 * np.linalg.norm(whole))
    assert len(known(model)) >= 2
    assert not known(oracle)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, K)

    def forward(self, x):
        return self.head(self.first(torch.tanh(self.first(x))))


class Tied(nn.Module):
    """One weight in two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, K)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(self.second(torch.tanh(self.first(x))))


class AlsoElsewhere(nn.Module):
    """A layer is called once, and its weight used once more beside it."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, K)

    def forward(self, x):
        return self.head(self.first(x) + torch.tanh(x @ self.first.weight))


class Attending(nn.Module):
    """Uses the weights of layers that it never calls."""

    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, K)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(dim=1))


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def with_head(*layers):
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(K))


def hooked():
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, K))
    module[0].register_forward_hook(lambda layer, arguments, output: output**2)
    return module


def half_frozen():
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, K))
    module[0].weight.requires_grad_(False)
    return module


OTHERS = {
    "used twice": (Twice, (6,), {"head"}),
    "shared weight": (Tied, (6,), {"head"}),
    "weight used elsewhere": (AlsoElsewhere, (6,), {"head"}),
    "attention": (Attending, (4, 6), {"head"}),
    "group norm": (lambda: with_head(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()), (1, 6, 6), {"0", "4"}),
    "transposed": (lambda: with_head(nn.ConvTranspose2d(1, 2, 3)), (1, 4, 4), {"2"}),
    "own subclass": (lambda: with_head(Doubled(6, 6)), (6,), {"2"}),
    "old weight norm": (lambda: with_head(torch.nn.utils.weight_norm(nn.Linear(6, 6))), (6,), {"2"}),
    "weight norm": (lambda: with_head(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))), (6,), {"2"}),
    "hooked": (hooked, (6,), {"1"}),
    "frozen weight, trained bias": (half_frozen, (6,), {"0", "2"}),
    "in place": (lambda: with_head(nn.Linear(6, 6), nn.ReLU(inplace=True)), (6,), {"0", "3"}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_known_layer_is_left_to_vmap(name, by_vmap):
    factory, shape, expected = OTHERS[name]
    factory = materialised(factory, shape)
    model, oracle, records = TorchModule(factory, K), by_vmap(factory), some_records(9, shape)
    theta = model.initial()
    whole = oracle.clipped_sum(theta, records, C)
    np.testing.assert_allclose(model.clipped_sum(theta, records, C), whole, atol=1e-5 * np.linalg.norm(whole))
    np.testing.assert_allclose(record_norms(model, theta, records), record_norms(oracle, theta, records), rtol=1e-5)
    assert known(model) == expected


def test_a_layer_called_now_once_and_now_twice_answers_no_record():
    class Moody(Twice):
        calls = 0

        def forward(self, x):
            Moody.calls += 1
            return self.head(self.first(x)) if Moody.calls == 1 else super().forward(x)

    model = TorchModule(Moody, K)
    with pytest.raises(RuntimeError, match="calls its layers now once and now not, or more often"):
        model.clipped_sum(model.initial(), some_records(3, (6,)), C)


def test_norms_are_those_of_float64_at_every_size():
    rng = np.random.default_rng(0)
    sizes = 10.0 ** np.arange(-44, 38, 2)
    rows = torch.tensor(rng.standard_normal((len(sizes), 3000)) * sizes[:, None], dtype=torch.float32)
    expected = np.linalg.norm(rows.double().numpy(), axis=1)
    np.testing.assert_allclose(norms([Rows(part) for part in rows.split(1100, dim=1)]).numpy(), expected, rtol=1e-6)
    plain = torch.linalg.vector_norm(rows, dim=1).double().numpy()
    assert not np.allclose(plain, expected, rtol=1e-3, atol=0)  # negative control
    outer = norms([Outer(rows[:, :7], rows.flip(0))]).numpy()
    expected = np.linalg.norm(rows[:, :7].double().numpy(), axis=1) * expected[::-1]
    np.testing.assert_allclose(outer, expected, rtol=1e-6)


def peak_bytes(model, records):
    """Most memory that torch holds at once while a client answers."""
    theta = model.initial()
    model.clipped_sum(theta, records, C)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        model.clipped_sum(theta, records, C)
    changes = [
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    return int(np.cumsum([size for _, size in sorted(changes)]).max())


def wide():
    return nn.Sequential(nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, K))


def test_a_clients_memory_is_that_of_theta_and_one_pass(by_vmap):
    model, d = TorchModule(wide, K), 1000 * 1000
    few, many = some_records(512, (1000,)), some_records(2048, (1000,))
    peak = peak_bytes(model, few)
    assert peak <= 4 * 8 * d  # θ in float32, the sum in float64, one pass; a gradient for each record has 4·d bytes
    assert peak_bytes(model, many) <= 1.1 * peak
    assert peak_bytes(by_vmap(wide), some_records(64, (1000,))) > 4 * 8 * d  # negative control
