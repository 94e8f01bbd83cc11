"""Features by public constants, and a tuning part that holds nothing of the test part."""

import numpy as np
import pytest

from dpray.experiments.papers.dp_fedsofim import data
from dpray.experiments.papers.dp_fedsofim.data import TASKS, Ground, dealt, random_features, tuning_ground
from dpray.platform.cohort.client import Records
from dpray.platform.datasets import DatasetMissing


def numbered(count, first=0):
    """Records whose only feature is their number."""
    return Records(np.arange(first, first + count, dtype=np.float64)[:, None], np.arange(count) % 3)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(data, "ground", lambda task: Ground(numbered(200), numbered(50, 1000), 3))


def test_random_features_are_bounded_and_each_records_own():
    x = np.random.default_rng(0).random((6, 784))
    features = random_features(x)
    assert features.shape == (6, 256)
    assert np.abs(features).max() <= 1
    np.testing.assert_allclose(random_features(x[2:3]), features[2:3], rtol=0, atol=1e-14)
    np.testing.assert_array_equal(random_features(np.full((1, 784), 0.5)), np.zeros((1, 256)))


def test_settings_are_tuned_on_training_records_alone(small):
    tuning = tuning_ground("cifar10", seed=1)
    trained, scored = set(tuning.train.x.ravel()), set(tuning.scored.x.ravel())
    assert trained | scored == set(range(200))
    assert not trained & scored
    assert len(scored) == 20
    assert len(tuning_ground("pneumonia", seed=1).scored) == 40
    assert set(tuning_ground("cifar10", seed=2).scored.x.ravel()) != scored


@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
def test_records_are_dealt_out_whole(small, kind):
    clients = dealt(data.ground("cifar10").train, kind, 5, seed=3)
    assert sorted(np.concatenate([client.x.ravel() for client in clients])) == list(range(200))
    assert len(clients) == 5


def test_real_data_has_the_declared_sizes(data_dir, monkeypatch):
    monkeypatch.setenv("DPRAY_DATA", str(data_dir))
    found = data._ground(TASKS["pneumonia"], data_dir)
    assert (len(found.train), found.train.x.shape[1], found.classes) == (2_698, data.WIDTH, 2)
    assert TASKS["pneumonia"].records == 2_698
    norms = np.linalg.norm(found.train.x, axis=1)
    assert 3 < np.median(norms) < TASKS["pneumonia"].covariance_clip


def test_a_missing_data_set_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("DPRAY_DATA", str(tmp_path))
    with pytest.raises(DatasetMissing, match=r"cifar10_jpeg"):
        data.ground.__wrapped__("cifar10")
