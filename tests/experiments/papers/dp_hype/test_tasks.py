"""The grid, the networks and the populations."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from dpray.experiments.papers.dp_hype.grid import GRID, SANE, standing_for
from dpray.experiments.papers.dp_hype.measured import local_losses, local_scores, measured, worths
from dpray.experiments.papers.dp_hype.nets import CifarNet, MnistNet
from dpray.experiments.papers.dp_hype.tasks import TASKS, Condition, Task

FEW = Task("adult", "adult", epochs=1, dropout=0.2, sampled=(1, 0.5), records=600, tested=400)


def size(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_the_grid_is_the_papers():
    assert len({tuple(config.values()) for config in GRID}) == len(GRID) == 100
    assert GRID[0] == {"learning_rate": 0.5, "gamma": 0.0, "momentum": 0.0}
    assert GRID[17] == {"learning_rate": 0.1, "gamma": 0.99, "momentum": 0.9}
    assert len(SANE) == 24
    assert Counter(standing_for(config)["learning_rate"] for config in GRID)[0.0] == 50


def test_networks_are_the_papers_at_its_size():
    """1 199 882: convolutions 320 and 18 496, fully connected 9 216 · 128 + 128 and 1 290."""
    assert size(MnistNet()()) == 320 + 18_496 + 9_216 * 128 + 128 + 1_290
    convolutions = 9 * (3 * 32 + 32 * 32 + 32 * 64 + 64 * 128)
    assert size(CifarNet()()) == convolutions + 2 * (32 + 32 + 64 + 128) + 1_290


@pytest.mark.parametrize(("net", "shape"), [(MnistNet(10, 8), (1, 10, 10)), (CifarNet(4), (3, 8, 8))])
def test_reduced_networks_take_reduced_images(net, shape):
    import torch

    assert net()(torch.zeros(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("partition", ["iid", "dir0.5"])
def test_a_population_is_dealt_out_whole_and_nobody_votes_on_the_test_part(data_dir, monkeypatch, partition):
    monkeypatch.setenv("DPRAY_DATA", str(data_dir))
    ground = Condition(FEW, partition, 10, 3).ground()
    assert sum(len(client) for client in ground.clients) == 600
    assert len(ground.test) == 400
    assert min(len(client) for client in ground.clients) >= 5
    again = Condition(FEW, partition, 10, 3).ground()
    assert all((a.x == b.x).all() for a, b in zip(ground.clients, again.clients, strict=True))
    other = Condition(FEW, partition, 10, 4).ground()
    assert not np.array_equal(ground.test.x, other.test.x)


def test_adults_whole_data_is_used_as_in_the_paper(data_dir, monkeypatch):
    monkeypatch.setenv("DPRAY_DATA", str(data_dir))
    ground = Condition(TASKS["adult"], "iid", 250, 0).ground()
    assert sum(len(client) for client in ground.clients) == 32_561
    assert len(ground.test) == 16_281
    amounts = np.concatenate([client.x for client in ground.clients])[:, [0, 10, 27, 63, 64, 65]]
    assert np.abs(amounts.mean(axis=0)).max() < 0.12  # the published columns, in units that were meant for them
    assert amounts.std(axis=0) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("name", "channels", "side", "edge", "units"), [("mnist", 1, 28, 4, (0.13, 0.31)), ("cifar", 3, 16, 0, (0.5, 0.25))]
)
def test_images_are_reduced_by_means_of_four_pixels_and_public_constants(name, channels, side, edge, units):
    """By loops; and a record's features are the same without the others."""
    task, small = TASKS[name], (side - 2 * edge) // 2
    x = np.random.default_rng(0).random((2, channels * side * side))
    found = Condition(task, "iid", 2, 0)._features(x)
    assert task.side == small
    for record, image in zip(found, x.reshape(2, channels, side, side), strict=True):
        means = [
            image[c, edge + 2 * i : edge + 2 * i + 2, edge + 2 * j : edge + 2 * j + 2].mean()
            for c in range(channels)
            for i in range(small)
            for j in range(small)
        ]
        np.testing.assert_allclose(record, (np.array(means) - units[0]) / units[1], rtol=1e-12)
    np.testing.assert_array_equal(Condition(task, "iid", 2, 0)._features(x[1:])[0], found[1])


def test_numbers_of_a_population_are_computed_once(data_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("DPRAY_DATA", str(data_dir))
    condition = Condition(FEW, "iid", 4, 3)
    found = measured(condition, tmp_path)
    assert found.local.shape == (4, 100)
    assert found.worth.shape == (100,)
    assert np.nanmin(found.local) >= 0
    assert np.nanmax(found.local) <= 1
    assert [path.name for path in tmp_path.iterdir()] == ["adult-iid-4-3.npz"]
    monkeypatch.setattr(Condition, "ground", lambda self: pytest.fail("the data was read again"))
    again = measured(condition, tmp_path)
    np.testing.assert_array_equal(again.local, found.local)
    np.testing.assert_array_equal(again.worth, found.worth)


def test_losses_are_kept_beside_the_accuracies(data_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("DPRAY_DATA", str(data_dir))
    condition = Condition(FEW, "iid", 2, 3)
    losses = local_losses(condition, tmp_path)
    assert losses.shape == (2, 100)
    assert np.nanmax(losses) < 0
    np.testing.assert_array_equal(local_losses(condition, tmp_path), losses)
    assert [path.name for path in tmp_path.iterdir()] == ["adult-iid-2-3-loss.npz"]


def test_slow_candidates_that_share_a_training_have_the_scores_of_their_own(data_dir, monkeypatch):
    monkeypatch.setenv("DPRAY_DATA", str(data_dir))
    both = [Condition(task, "iid", 3, 3) for task in (FEW, dataclasses.replace(FEW, slow=0.0))]
    ground, slow = both[0].ground(), [GRID[50], GRID[59], GRID[99]]
    shared, alone = (local_scores(condition, ground, slow) for condition in both)
    np.testing.assert_allclose(shared, alone, atol=1e-9)
    shared, alone = (worths(condition, ground, slow) for condition in both)
    np.testing.assert_allclose(shared, alone, atol=0.003)


def test_all_clients_take_part_where_they_are_not_alike():
    task = TASKS["adult"]
    assert task.federation("iid") == (5, 0.2)
    assert task.federation("dir30") == task.federation("dir0.5") == (2, 1.0)
