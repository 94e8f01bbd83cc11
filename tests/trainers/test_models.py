"""The linear head's clipped sums: golden numbers, torch's per-record gradients, and what one record can move."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax

from dpray.platform.cohort.client import Records, Stack
from dpray.trainers.models import LinearHead, class_labels, take

GOLDEN = Path(__file__).parents[1] / "golden"
F, K, C = 5, 3, 1.2


def some_records(n, seed=0, features=F, classes=K):
    rng = np.random.default_rng(seed)
    return Records(2 * rng.standard_normal((n, features)), rng.integers(0, classes, n))


def some_theta(seed=0, features=F, classes=K):
    return np.random.default_rng([seed, 1]).standard_normal((features + 1) * classes)


def test_clipped_sum_golden():
    golden = json.loads((GOLDEN / "clipped_sum_linear_head.json").read_text())
    head = LinearHead(features=3, classes=3)
    theta = np.array(golden["W_with_bias_last"]).reshape(-1)
    records = Records(np.array(golden["X"]), np.array(golden["y"]))
    np.testing.assert_allclose(
        head.clipped_sum(theta, records, golden["clip"]),
        np.array(golden["clipped_sum"]).reshape(-1),
        rtol=0,
        atol=1e-14,
    )
    norms = [np.linalg.norm(head.clipped_sum(theta, take(records, [i]), 1e6)) for i in range(len(records))]
    np.testing.assert_allclose(norms, golden["norms"], rtol=1e-14)


def per_record_gradients(theta, records, features=F, classes=K):
    """Torch's own gradients in float64, (n, d), bias in the last row of W."""
    import torch

    W = torch.tensor(theta.reshape(features + 1, classes))

    def loss(W, x, y):
        return torch.nn.functional.cross_entropy((x @ W[:-1] + W[-1])[None], y[None])

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    return gradients(W, torch.tensor(records.x), torch.tensor(records.y)).flatten(1).numpy()


def clipped(gradients, clip):
    return gradients * np.minimum(1, clip / np.linalg.norm(gradients, axis=1))[:, None]


def test_clipped_sum_equals_vmap_gradients_clipped_one_by_one():
    records, theta = some_records(200), some_theta()
    gradients = per_record_gradients(theta, records)
    assert 0.2 < np.mean(np.linalg.norm(gradients, axis=1) > C) < 0.98  # some are clipped, some are not
    expected = clipped(gradients, C).sum(axis=0)
    np.testing.assert_allclose(LinearHead(F, K).clipped_sum(theta, records, C), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", [[1], [7, 1, 300, 2], [4000, 200, 3000, 5000, 1], [3] * 40])
def test_a_hosts_pass_equals_its_clients_one_by_one(sizes):
    head, theta = LinearHead(F, K), some_theta()
    shards = [some_records(n, seed) for seed, n in enumerate(sizes)]
    expected = [head.clipped_sum(theta, shard, C) for shard in shards]
    np.testing.assert_allclose(head.clipped_sums(theta, Stack.of(shards), C), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(head.clipped_sums(theta, shards, C), expected, rtol=1e-12, atol=1e-12)


def test_a_client_without_records_sends_zero():
    shards = [some_records(4), Records(np.empty((0, F)), np.empty(0, dtype=int)), some_records(2, 1)]
    sums = LinearHead(F, K).clipped_sums(some_theta(), Stack.of(shards), C)
    assert not sums[1].any()
    assert sums[0].any()
    assert sums[2].any()


def test_features_are_not_copied():
    head, stack = LinearHead(F, K), Stack.of([some_records(6), some_records(5, 1)])
    head.clipped_sums(some_theta(), stack, C)
    assert np.shares_memory(head._design(stack).x, stack.x)


def test_the_design_is_made_once_for_the_same_records_and_anew_for_others():
    head, theta = LinearHead(F, K), some_theta()
    stack = Stack.of([some_records(6), some_records(5, 1)])
    design = head._design(stack)
    assert head._design(stack[0:2]) is design
    other = Stack(stack.x.copy(), stack.y.copy(), stack.offsets)
    other.x.flags.writeable = True
    other.x += 1
    expected = [head.clipped_sum(theta, shard, C) for shard in other]
    np.testing.assert_allclose(head.clipped_sums(theta, other, C), expected, rtol=1e-12)


def test_it_travels_without_what_it_has_seen():
    head = LinearHead(F, K)
    bare = len(pickle.dumps(head))
    head.clipped_sums(some_theta(), [some_records(500)], C)
    assert len(pickle.dumps(head)) == bare
    sent = pickle.loads(pickle.dumps(head))
    np.testing.assert_array_equal(
        sent.clipped_sum(some_theta(), some_records(9), C), head.clipped_sum(some_theta(), some_records(9), C)
    )


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64, np.float32, np.float64])
def test_labels_of_any_numeric_type_count_the_same(dtype):
    records = some_records(30)
    other = Records(records.x, records.y.astype(dtype))
    head = LinearHead(F, K)
    np.testing.assert_array_equal(head.clipped_sum(some_theta(), records, C), head.clipped_sum(some_theta(), other, C))


BAD = [
    ("NaN", np.nan, 0),
    ("infinite", np.inf, 0),
    ("minus infinite", -np.inf, 0),
    ("too large to square", 1e300, 0),
    ("label beyond the classes", 1.0, K),
    ("label below zero", 1.0, -1),
    ("label between classes", 1.0, 0.5),
    ("label NaN", 1.0, np.nan),
    ("label infinite", 1.0, np.inf),
]


@pytest.mark.parametrize(("value", "label"), [bad[1:] for bad in BAD], ids=[bad[0] for bad in BAD])
def test_a_bad_record_contributes_zero(value, label):
    head, theta, records = LinearHead(F, K), some_theta(), some_records(8)
    x, y = np.vstack([records.x, np.ones(F)]), np.append(records.y.astype(float), label)
    x[-1, 2] = value
    others = head.clipped_sum(theta, records, C)
    np.testing.assert_allclose(head.clipped_sum(theta, Records(x, y), C), others, rtol=0, atol=1e-14)
    np.testing.assert_allclose(head.mean_gradient(theta, Records(x, y)), head.mean_gradient(theta, records), atol=1e-14)


def test_a_client_cannot_change_the_bits_of_another():
    head, theta = LinearHead(F, K), some_theta()
    shards = [some_records(20, seed) for seed in range(4)]
    before = head.clipped_sums(theta, Stack.of(shards), C)
    x = shards[1].x.copy()
    x[3], x[4] = np.nan, 1e300
    shards[1] = Records(x, np.full(20, 99))
    after = head.clipped_sums(theta, Stack.of(shards), C)
    np.testing.assert_array_equal(after[[0, 2, 3]], before[[0, 2, 3]])
    assert not after[1].any()


ANYTHING = st.one_of(st.floats(width=64), st.sampled_from([0.0, np.nan, np.inf, -np.inf, 1e300, -1e300, 1e154, 1e-320]))
LABELS = st.one_of(st.integers(-5, 5), st.floats(width=64))


def moved_by_one_record(head, x, y, row, value, label, *, clip, scale):
    """How far the sum moves when one record is replaced, in units of C."""
    theta = scale * some_theta(features=head.features, classes=head.classes)
    with np.errstate(all="ignore"):
        before = head.clipped_sum(theta, Records(x, y), clip)
        other_x, other_y = x.copy(), y.copy()
        other_x[row], other_y[row] = value, label
        after = head.clipped_sum(theta, Records(other_x, other_y), clip)
    assert np.isfinite(after).all()
    return np.linalg.norm(after - before)


@settings(max_examples=300, deadline=None)
@given(
    value=st.lists(ANYTHING, min_size=F, max_size=F),
    label=LABELS,
    row=st.integers(0, 11),
    scale=st.sampled_from([0.0, 1.0, 1e3, 1e150]),
)
def test_one_record_moves_the_sum_by_two_clips_at_most(value, label, row, scale):
    records, head = some_records(12), LinearHead(F, K)
    y = records.y.astype(float)
    moved = moved_by_one_record(head, records.x, y, row, value, label, clip=C, scale=scale)
    assert moved <= 2 * C * (1 + head.relative_error)


def test_without_the_clip_one_record_moves_it_further():
    """Negative control of the test above."""
    records, head = some_records(12), LinearHead(F, K)
    value = np.full(F, 50.0)
    moved = moved_by_one_record(head, records.x, records.y.astype(float), 0, value, 1, clip=np.inf, scale=1.0)
    assert moved > 2 * C


@pytest.mark.parametrize("logit", [340.0, 365.0, 371.0, 374.0])
@pytest.mark.parametrize("clip", [1e-15, 1e-20])
def test_residuals_too_small_to_be_squared_are_clipped_all_the_same(logit, clip):
    """Large features make a gradient far beyond C of residuals whose squares lose digits, or vanish in float64."""
    head, theta = LinearHead(1, 3), np.array([0, 0, 0, logit, 0, 0.0])
    records = Records(np.array([[1e154]]), np.array([0]))
    a = np.exp(-logit)
    assert a * 1e154 > clip
    assert abs(a * a / 1e-280) < 1  # negative control: plain squares are not to be trusted here …
    if logit > 370:
        assert abs(np.sqrt(2 * a * a) / (np.sqrt(2) * a) - 1) > 1e-3  # … and are wrong by more than any margin
    u = head.clipped_sum(theta, records, clip)
    assert np.linalg.norm(u / clip) == pytest.approx(1, rel=head.relative_error)
    folds = head.fold_sums(theta[None], head.prepare(records), np.ones((1, 1), dtype=bool), clip)
    np.testing.assert_allclose(folds[0], u, rtol=1e-12)


def test_usable_records_are_those_that_are_not_bad():
    head, records = LinearHead(F, K), some_records(len(BAD) + 2)
    x, y = records.x.copy(), records.y.astype(float)
    for row, (_, value, label) in enumerate(BAD):
        x[row, 2], y[row] = value, label
    assert head.usable(Records(x, y)).tolist() == [False] * len(BAD) + [True] * 2
    assert head.usable(records).all()


def test_two_clips_are_reached_by_opposite_records():
    head, theta = LinearHead(1, 2), np.zeros(4)
    sums = [head.clipped_sum(theta, Records(np.array([[1e3]]), np.array([label])), C) for label in (0, 1)]
    assert np.linalg.norm(sums[0] - sums[1]) == pytest.approx(2 * C, rel=1e-12)


def test_fold_sums_are_clipped_sums_of_the_members():
    head, records = LinearHead(F, K), some_records(30)
    y = records.y.copy()
    y[4] = 99
    records = Records(records.x, y)
    rng = np.random.default_rng(3)
    thetas, members = rng.standard_normal((4, head.dimension)), rng.random((4, 30)) < 0.6
    expected = [head.clipped_sum(t, take(records, rows), C) for t, rows in zip(thetas, members, strict=True)]
    sums = head.fold_sums(thetas, head.prepare(records), members, C)
    np.testing.assert_allclose(sums, expected, rtol=1e-12, atol=1e-12)


def test_an_update_is_local_descent_on_the_mean_gradient():
    head, records, theta = LinearHead(F, K), some_records(40), some_theta()
    np.testing.assert_allclose(
        head.update(theta, records, {}), -per_record_gradients(theta, records).mean(0), atol=1e-13
    )
    local = theta.copy()
    for _ in range(3):
        local -= 0.3 * per_record_gradients(local, records).mean(axis=0)
    update = head.update(theta, records, {"local_steps": 3, "local_rate": 0.3})
    np.testing.assert_allclose(update, local - theta, atol=1e-12)


def test_losses_and_accuracy_on_public_records():
    head, records, theta = LinearHead(F, K), some_records(50), some_theta()
    z = np.hstack([records.x, np.ones((50, 1))]) @ theta.reshape(F + 1, K)
    expected = -log_softmax(z, axis=1)[np.arange(50), records.y]
    np.testing.assert_allclose(head.losses(theta, records), expected, rtol=1e-12)
    assert head.evaluate(theta, records) == {
        "accuracy": pytest.approx(np.mean(z.argmax(1) == records.y)),
        "loss": pytest.approx(expected.mean()),
    }
    assert np.isinf(head.losses(theta, Records(records.x[:1], np.array([K]))))


def test_refusals():
    with pytest.raises(ValueError, match="at least 1 feature and 2 classes"):
        LinearHead(0, 10)
    with pytest.raises(ValueError, match=r"shape \(n, 5\), and \(4, 6\) was given"):
        LinearHead(F, K).clipped_sum(some_theta(), some_records(4, features=6), C)
    with pytest.raises(NotImplementedError, match="TrainingTask"):
        LinearHead(F, K).fit_and_score({}, some_records(4), np.random.default_rng(0))


def test_class_labels_marks_what_is_no_class():
    labels, known = class_labels(np.array([0.0, 2.0, 3.0, -1.0, 1.5, np.nan, np.inf]), 3)
    assert labels.tolist() == [0, 2, 0, 0, 0, 0, 0]
    assert known.tolist() == [True, True, False, False, False, False, False]
