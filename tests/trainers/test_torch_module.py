"""Any torch module: the same sums as a plain loop of autograd, one record's reach, and the modules that are refused."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpray.platform.cohort.client import Records
from dpray.platform.confine import Confinement
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


def hooked_spectral_norm():
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(F, K)))


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
        (hooked_spectral_norm, "`0` is a SpectralNorm", "weight norm"),
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
    with pytest.raises(ValueError, match=r"outputs of shape \(1, 4\) of one record, not \(1, 5\)"):
        model.evaluate(model.initial(), some_records(3))


class Words(nn.Module):
    """Token numbers to classes; raises on a number beyond its vocabulary."""

    def __init__(self):
        super().__init__()
        self.embedding, self.drop, self.head = nn.Embedding(10, 4), nn.Dropout(0.3), nn.Linear(4, K)

    def forward(self, x):
        return self.head(self.drop(self.embedding(x.long()).mean(dim=1)))


class WordsWithoutZero(Words):
    """Raises on a record of zeros."""

    def forward(self, x):
        return super().forward(x - 1)


def some_words(n, seed=0):
    rng = np.random.default_rng(seed)
    return Records(rng.integers(1, 10, (n, 3)).astype(float), rng.integers(0, K, n))


def with_word(records, word, *rows):
    x = records.x.copy()
    x[list(rows), 1] = word
    return Records(x, records.y)


class Stubborn(TorchModule):
    """Negative control: a chunk that raises is not looked into."""

    def _evaluated(self, parameters, x, y, stream):
        return self._run(parameters, x, y, stream), np.ones(len(y), dtype=bool)


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("rows", [(5,), (0, 13, 14), tuple(range(70))], ids=["one", "three", "all"])
def test_records_that_make_the_module_raise_are_bad_and_leave_the_others_bits(rows, chunk):
    model, records = TorchModule(Words, K, chunk=chunk), some_words(70)
    theta = 3 * model.initial()
    spoilt = with_word(records, 10, *rows)
    y = records.y.astype(float)
    y[list(rows)] = np.nan  # bad in another way, and known to contribute zero
    got = model.clipped_sum(theta, spoilt, C)
    np.testing.assert_array_equal(got, model.clipped_sum(theta, Records(records.x, y), C))
    assert got.any() == (len(rows) < 70)
    np.testing.assert_array_equal(model.usable(spoilt), ~np.isin(np.arange(70), rows))
    np.testing.assert_array_equal(model.mean_gradient(theta, spoilt), model.mean_gradient(theta, Records(records.x, y)))
    np.testing.assert_array_equal(
        model.update(theta, spoilt, {"local_steps": 2}), model.update(theta, Records(records.x, y), {"local_steps": 2})
    )
    with pytest.raises(IndexError):
        Stubborn(Words, K, chunk=chunk).clipped_sum(theta, spoilt, C)


@settings(max_examples=40, deadline=None)
@given(word=st.integers(-3, 13), row=st.integers(0, 69), seed=st.integers(0, 5))
def test_one_record_that_may_raise_moves_the_sum_by_two_clips_at_most(word, row, seed):
    records, theta = some_words(70, seed), 3 * WORDS.initial()
    before, after = (WORDS.clipped_sum(theta, each, C) for each in (records, with_word(records, word, row)))
    assert np.linalg.norm(after - before) <= 2 * C


WORDS = TorchModule(Words, K)


def test_a_module_that_raises_on_zeros_raises_whether_or_not_a_record_is_bad():
    model, records = TorchModule(WordsWithoutZero, K), some_words(70)
    for each in (records, with_word(records, 99, 3), some_words(64), some_words(0)):
        with pytest.raises(RuntimeError, match=r"records of zeros of the shape \(3,\).*IndexError"):
            model.clipped_sum(model.initial(), each, C)
    assert WORDS.clipped_sum(WORDS.initial(), records, C).any()


def test_a_module_with_too_few_outputs_raises_whatever_the_labels_are():
    model = TorchModule(mlp, K + 1)
    with pytest.raises(RuntimeError, match=r"outputs of shape \(1, 4\) of one record, not \(1, 5\)"):
        model.clipped_sum(model.initial(), Records(np.ones((3, F)), np.zeros(3)), C)


class Talkative(TorchModule):
    """Its module works on each record alone and not on all of them together, and says on which."""

    def _run(self, parameters, x, y, stream):
        if len(y) > 1:
            raise MemoryError(f"no room for {x}")
        return super()._run(parameters, x, y, stream)


def test_what_a_module_says_about_records_is_dropped_inside_a_client(capfd, caplog):
    model, records = Talkative(mlp, K), Records(np.full((3, F), 31337.0), np.zeros(3))
    with pytest.raises(RuntimeError, match="31337"):  # to whoever calls it on public records
        model.clipped_sum(model.initial(), records, C)
    calls = [
        lambda: model.clipped_sum(model.initial(), records, C),
        lambda: model.update(model.initial(), records, {}),
        lambda: model.usable(records),
    ]
    for call in calls:
        assert Confinement("key").run("client", call) is None
    assert capfd.readouterr() == ("", "")
    assert caplog.text == ""


def test_a_client_without_records_sends_zero_and_has_none_that_are_usable():
    model, nothing = MODELS[linear], Records(np.empty((0, F)), np.empty(0, dtype=int))
    assert not model.clipped_sum(model.initial(), nothing, C).any()
    assert not model.update(model.initial(), nothing, {}).any()
    assert model.usable(nothing).shape == (0,)


def test_embeddings_are_refused_on_a_gpu_where_an_exception_would_be_the_end():
    with pytest.raises(ValueError, match="embeddings was to run on cuda"):
        TorchModule(Words, K, device="cuda")
    assert TorchModule(Words, K, device="cpu").dimension == WORDS.dimension


CLIPS = [10.0**k for k in range(-15, 16, 3)]


def bound_of_each(model, theta, records, clip):
    """Largest norm of one record's contribution, in units of C."""
    alone = [Records(records.x[[i]], records.y[[i]]) for i in range(len(records))]
    return max(np.linalg.norm(model.clipped_sum(theta, each, clip)) for each in alone) / clip


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1.0, 1e10, 1e17], ids=str)
@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_every_clip_is_kept_at_every_size_of_gradient(clip, scale):
    """Gradients of a bias-free layer are as large as the features; squares of float32 vanish below 10⁻²³."""
    model, records = SCALED, some_records(6)
    found = bound_of_each(model, np.zeros(model.dimension), Records(scale * records.x, records.y), clip)
    assert 0 < found <= 1
    if scale >= 100 * clip:
        assert found == pytest.approx(1, rel=2e-4)  # clipped to C, not to something far below it


SCALED = TorchModule(lambda: nn.Linear(F, K, bias=False), K)


def test_float32_squares_alone_would_keep_no_small_clip(monkeypatch):
    """Negative control of the test above, at the ends of what is allowed."""
    records, theta = Records(1e-24 * some_records(6).x, some_records(6).y), np.zeros(SCALED.dimension)
    monkeypatch.setattr("dpray.trainers.torch_module.CLIPS", (0.0, 1e20))
    assert bound_of_each(SCALED, theta, records, 1e-27) <= 1
    monkeypatch.setattr("dpray.trainers.layer_norms._row_norms", lambda rows: rows.norm(dim=1).double())
    monkeypatch.setattr("dpray.trainers.layer_norms._unsure", lambda found: torch.zeros(found.shape, dtype=bool))
    assert bound_of_each(SCALED, theta, records, 1e-27) > 10


def test_a_weight_too_small_for_float32_is_not_rounded_up(monkeypatch):
    """C/‖g‖ of about 0.6 and 0.9 times the smallest number float32 has, which both would become."""
    monkeypatch.setattr("dpray.trainers.record_gradients._candidates", lambda module, trained: {})
    model = TorchModule(lambda: nn.Linear(F, K, bias=False), K)  # a gradient for each record, in float32
    theta = np.zeros(model.dimension)
    direction = some_records(1).x / np.linalg.norm(some_records(1).x) / np.sqrt(0.75)  # ‖softmax − onehot‖² = 3/4
    sets = [Records(direction * 1e-15 / (2.0**-149 * part), np.array([0])) for part in (0.6, 0.9)]
    assert all(bound_of_each(model, theta, records, 1e-15) == 0 for records in sets)
    monkeypatch.setattr("dpray.trainers.torch_module._SMALL_WEIGHT", 1e-300)  # negative control
    assert [bound_of_each(model, theta, records, 1e-15) > 1.05 for records in sets] == [True, True]


@pytest.mark.parametrize("clip", [0.0, 1e-30, 1e-23, 1e30, np.inf, np.nan])
def test_a_clip_that_float32_cannot_hold_is_refused(clip):
    model = MODELS[linear]
    with pytest.raises(ValueError, match=r"between 1e-20 and 1e\+20, and .* was given"):
        model.clipped_sum(model.initial(), some_records(3), clip)
