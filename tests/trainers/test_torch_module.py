"""Any torch module: the same sums as a plain loop of autograd, one record's reach, and the modules that are refused."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpray.platform.cohort.client import Records
from dpray.trainers.models import LinearHead
from dpray.trainers.torch_module import MARGIN, TorchModule

torch = pytest.importorskip("torch")
nn = torch.nn
F, K, C = 6, 4, 0.8


def mlp():
    return nn.Sequential(nn.Linear(F, 8), nn.Tanh(), nn.GroupNorm(2, 8), nn.Linear(8, K))


def convolutional():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, K))


def frozen_backbone():
    module = nn.Sequential(nn.Linear(F, 5), nn.ReLU(), nn.Linear(5, K))
    module[0].requires_grad_(False)
    return module


def dropout():
    return nn.Sequential(nn.Linear(F, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, K))


def linear():
    return nn.Linear(F, K)


def some_records(n, shape=(F,), seed=0):
    rng = np.random.default_rng(seed)
    return Records(2 * rng.standard_normal((n, *shape)), rng.integers(0, K, n))


def autograd_loop(factory, theta, records, clip):
    """Σ of clipped gradients, one backward pass a record, float64 throughout."""
    module = factory().double()
    trained = [value for value in module.parameters() if value.requires_grad]
    with torch.no_grad():
        for value, part in zip(trained, torch.tensor(theta).split([v.numel() for v in trained]), strict=True):
            value.copy_(part.view_as(value))
    total = np.zeros(len(theta))
    for x, y in zip(records.x, records.y, strict=True):
        loss = nn.functional.cross_entropy(module(torch.tensor(x)[None]), torch.tensor([y]))
        gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, trained)]).numpy()
        total += gradient * min(1, clip / np.linalg.norm(gradient))
    return total


@pytest.mark.parametrize(("factory", "shape"), [(mlp, (F,)), (convolutional, (1, 8, 8))], ids=["mlp", "convolutional"])
def test_clipped_sum_equals_an_autograd_loop(factory, shape):
    model, records = TorchModule(factory, K), some_records(90, shape)
    theta = model.initial()
    expected = autograd_loop(factory, theta, records, C / (1 + MARGIN))
    got = model.clipped_sum(theta, records, C)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.linalg.norm(expected))


class SumOfTwo(nn.Module):
    """Two parameters whose gradients are one and the same tensor."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(F, K)), nn.Parameter(torch.randn(F, K))

    def forward(self, x):
        return x @ (self.first + self.second)


def test_gradients_that_share_memory_are_clipped_once():
    model, records = TorchModule(SumOfTwo, K), some_records(40)
    expected = autograd_loop(SumOfTwo, model.initial(), records, C / (1 + MARGIN))
    np.testing.assert_allclose(model.clipped_sum(model.initial(), records, C), expected, atol=1e-5)


def test_frozen_parameters_are_not_trained():
    model, records = TorchModule(frozen_backbone, K), some_records(20)
    assert model.dimension == 5 * K + K
    torch.manual_seed(0)  # the factory's own parameters, as the model made them
    expected = autograd_loop(frozen_backbone, model.initial(), records, C / (1 + MARGIN))
    np.testing.assert_allclose(model.clipped_sum(model.initial(), records, C), expected, atol=1e-5)


def test_it_agrees_with_the_closed_form_of_a_linear_head():
    model, head, records = TorchModule(linear, K), LinearHead(F, K), some_records(70)
    theta = model.initial()
    W = np.vstack([theta[: F * K].reshape(K, F).T, theta[F * K :]])
    u = model.clipped_sum(theta, records, C)
    expected = head.clipped_sum(W.reshape(-1), records, C / (1 + MARGIN)).reshape(F + 1, K)
    np.testing.assert_allclose(u[: F * K].reshape(K, F).T, expected[:-1], atol=1e-5)
    np.testing.assert_allclose(u[F * K :], expected[-1], atol=1e-5)
    assert model.accuracy(theta, records) == head.accuracy(W.reshape(-1), records)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_chunk_changes_rounding_only(chunk):
    records = some_records(70)
    whole, parts = TorchModule(mlp, K), TorchModule(mlp, K, chunk=chunk)
    expected = whole.clipped_sum(whole.initial(), records, C)
    np.testing.assert_allclose(parts.clipped_sum(parts.initial(), records, C), expected, atol=1e-5)


def test_large_modules_get_short_chunks():
    model = TorchModule(lambda: nn.Linear(2**15, 2**5), 2**5)
    assert model.chunk * model.dimension <= 2**24
    assert model.chunk >= 1


@pytest.mark.parametrize(("value", "label"), [(np.nan, 0), (np.inf, 0), (1e300, 0), (1e200, 1), (1.0, K), (1.0, -1)])
def test_a_bad_record_contributes_zero(value, label):
    model, records = TorchModule(mlp, K), some_records(8)
    x, y = np.vstack([records.x, np.ones(F)]), np.append(records.y, label)
    x[-1, 2] = value
    theta = model.initial()
    got = model.clipped_sum(theta, Records(x, y), C)
    np.testing.assert_allclose(got, model.clipped_sum(theta, records, C), atol=1e-6)
    np.testing.assert_allclose(
        model.mean_gradient(theta, Records(x, y)), model.mean_gradient(theta, records), atol=1e-6
    )


ANYTHING = st.one_of(st.floats(width=64), st.sampled_from([np.nan, np.inf, -np.inf, 1e300, 1e38, 1e20, 0.0]))


@settings(max_examples=80, deadline=None)
@given(
    value=st.lists(ANYTHING, min_size=F, max_size=F),
    label=st.one_of(st.integers(-3, 6), st.floats(width=64)),
    row=st.integers(0, 69),
)
@pytest.mark.parametrize("factory", [linear, dropout])
def test_one_record_moves_the_sum_by_two_clips_at_most(factory, value, label, row):
    model, records = MODELS[factory], some_records(70)
    theta = 3 * model.initial()
    before = model.clipped_sum(theta, records, C)
    x, y = records.x.copy(), records.y.astype(float)
    x[row], y[row] = value, label
    after = model.clipped_sum(theta, Records(x, y), C)
    assert np.isfinite(after).all()
    assert np.linalg.norm(after - before) <= 2 * C


MODELS = {linear: TorchModule(linear, K), dropout: TorchModule(dropout, K)}


def test_without_the_clip_one_record_moves_it_further():
    """Negative control of the test above."""
    model, records = MODELS[linear], some_records(70)
    x = records.x.copy()
    x[5] = 50.0
    sums = [model.clipped_sum(3 * model.initial(), Records(each, records.y), 1e9) for each in (records.x, x)]
    assert np.linalg.norm(sums[0] - sums[1]) > 2 * C


def batch_norm():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))


def inner_batch_norm():
    return nn.Sequential(nn.Linear(F, 4), nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4)))


def synchronised():
    return nn.Sequential(nn.SyncBatchNorm(4))


def tracking_instance_norm():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True))


def spectral_norm():
    return torch.nn.utils.parametrizations.spectral_norm(nn.Linear(F, K))


def own_batch_norm():
    class Mine(nn.BatchNorm1d):
        pass

    return Mine(4)


@pytest.mark.parametrize(
    ("factory", "name", "instead"),
    [
        (batch_norm, "`1` is a BatchNorm2d", "GroupNorm"),
        (inner_batch_norm, "`1.1` is a BatchNorm1d", "LayerNorm"),
        (synchronised, "`0` is a SyncBatchNorm", "GroupNorm"),
        (tracking_instance_norm, "`1` is a InstanceNorm2d", "track_running_stats=False"),
        (spectral_norm, "is a _SpectralNorm", "weight norm"),
        (own_batch_norm, "`the module itself` is a BatchNorm1d", "GroupNorm"),
    ],
)
def test_modules_that_mix_records_are_refused_by_name(factory, name, instead):
    with pytest.raises(ValueError, match="one record would reach every gradient") as refusal:
        TorchModule(factory, K)
    assert name in str(refusal.value)
    assert instead in str(refusal.value)


def test_instance_norm_without_statistics_is_fine():
    def factory():
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4), nn.Flatten(), nn.Linear(144, K))

    model = TorchModule(factory, K)
    assert model.clipped_sum(model.initial(), some_records(3, (1, 8, 8)), C).any()


def test_dropout_follows_from_theta_and_seed_alone():
    model, records = TorchModule(dropout, K), some_records(100)
    theta = model.initial()
    first = model.clipped_sum(theta, records, C)
    state = torch.random.get_rng_state()
    again = pickle.loads(pickle.dumps(model)).clipped_sum(theta, records, C)
    np.testing.assert_array_equal(first, again)
    assert torch.equal(state, torch.random.get_rng_state())  # nobody else's randomness was used
    assert not np.allclose(first, TorchModule(dropout, K, seed=1).clipped_sum(theta, records, C))


def test_it_travels_small_and_arrives_the_same():
    model = TorchModule(convolutional, K)
    packed = pickle.dumps(model)
    assert len(packed) < 1000
    arrived = pickle.loads(packed)
    assert arrived._functional is None
    np.testing.assert_array_equal(arrived.initial(), model.initial())


def test_one_local_step_is_minus_the_mean_gradient():
    model, records = TorchModule(mlp, K), some_records(70)
    theta = model.initial()
    expected = -autograd_loop(mlp, theta, records, 1e9) / 70
    np.testing.assert_allclose(model.update(theta, records, {}), expected, atol=1e-6)


def test_refusals():
    with pytest.raises(ValueError, match="from 1 to 64, and 65"):
        TorchModule(mlp, K, chunk=65)
    with pytest.raises(ValueError, match="at least 2 classes"):
        TorchModule(mlp, 1)
    with pytest.raises(ValueError, match="nothing to train"):
        TorchModule(nn.ReLU, K)
    model = TorchModule(mlp, 5)
    with pytest.raises(ValueError, match=r"outputs of shape \(3, 4\); 5 classes"):
        model.evaluate(model.initial(), some_records(3))
