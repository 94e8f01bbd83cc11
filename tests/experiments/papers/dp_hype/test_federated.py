"""Federated averaging of many candidates at once, against torch's own optimiser one by one."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from dpray.experiments.papers.dp_hype import federated
from dpray.experiments.papers.dp_hype.grid import GRID, standing_for
from dpray.platform.cohort.client import Records
from dpray.trainers.local_search import StackedMLP

FEATURES = 6
MODEL = StackedMLP(FEATURES, 2, (5,))
CONFIGS = [
    {"learning_rate": 0.5, "gamma": 0.25, "momentum": 0.9},
    {"learning_rate": 0.05, "gamma": 1.0, "momentum": 0.0},
    {"learning_rate": 0.3, "gamma": 0.0, "momentum": 0.9},
]


def records(count, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, FEATURES)).astype(np.float32)
    return Records(x, (x @ np.arange(FEATURES) > 0).astype(np.int64))


def alone(config, start, clients, epochs, rounds):
    """One candidate by torch.optim.SGD and StepLR, all of a client's records in one minibatch; the mean by hand."""
    globally = [part.clone() for part in start]
    for _ in range(rounds):
        sums = [torch.zeros_like(part, dtype=torch.float64) for part in globally]
        for client in clients:
            theta = [part.clone().requires_grad_() for part in globally]
            optimiser = torch.optim.SGD(theta, lr=config["learning_rate"], momentum=config["momentum"])
            scheduler = torch.optim.lr_scheduler.StepLR(optimiser, 1, config["gamma"])
            for _ in range(epochs):
                optimiser.zero_grad()
                hidden = torch.relu(torch.from_numpy(client.x) @ theta[0] + theta[1])
                z = (hidden @ theta[2] + theta[3])[:, 0]
                binary_cross_entropy_with_logits(z, torch.from_numpy(client.y).float()).backward()
                optimiser.step()
                scheduler.step()
            for total, part in zip(sums, theta, strict=True):
                total.add_(part.detach(), alpha=len(client))
        globally = [(total / sum(len(client) for client in clients)).float() for total in sums]
    return globally


def test_every_candidate_is_what_torch_would_train_alone(monkeypatch):
    clients, kept = [records(20, 1), records(60, 2), records(7, 3)], []
    monkeypatch.setattr(federated, "tested", lambda model, theta, test: kept.append(theta))
    shared = {"rounds": 3, "share": 1.0, "epochs": 4, "batch": 64, "dropout": 0.0, "seed": 5}
    federated.accuracies(MODEL, CONFIGS, clients, records(10), **shared)
    for number, config in enumerate(CONFIGS):
        start = MODEL.initial(federated._seed(5, "start", number))
        expected = alone(config, start, clients, 4, 3)
        for stacked, part in zip(kept[0], expected, strict=True):
            torch.testing.assert_close(stacked[number], part, rtol=1e-4, atol=1e-5)


def test_candidates_do_not_depend_on_which_are_trained_beside_them(monkeypatch):
    """Apart from where they start, which follows from their place: here they all start alike."""
    monkeypatch.setattr(StackedMLP, "initial", lambda self, seed, real=StackedMLP.initial: real(self, 1))
    clients, test = [records(80, seed) for seed in range(5)], records(500, 9)
    shared = {"rounds": 2, "share": 0.6, "epochs": 3, "batch": 64, "dropout": 0.2, "seed": 5}
    together = federated.accuracies(MODEL, CONFIGS, clients, test, **shared)
    by_one = [federated.accuracies(MODEL, [config], clients, test, **shared)[0] for config in CONFIGS]
    assert together == pytest.approx(by_one, abs=0.005)


def test_training_learns_and_a_candidate_that_stands_still_does_not():
    clients, test = [records(100, seed) for seed in range(4)], records(2000, 9)
    still = {"learning_rate": 0.0, "gamma": 1.0, "momentum": 0.0}
    shared = {"rounds": 3, "share": 0.5, "epochs": 5, "batch": 64, "dropout": 0.0, "seed": 3}
    found = federated.accuracies(MODEL, [CONFIGS[0], still], clients, test, **shared)
    stack = [part[None] for part in MODEL.initial(federated._seed(3, "start", 1))]
    assert found[0] > 0.9
    assert found[1] == federated.tested(MODEL, stack, test)[0]


def test_a_diverged_model_predicts_class_0():
    theta = [torch.full((1, *part.shape), torch.nan) for part in MODEL.initial(0)]
    test = records(200)
    assert federated.tested(MODEL, theta, test)[0] == np.mean(test.y == 0)
    three = StackedMLP(FEATURES, 3, ())
    theta = [torch.full((1, *part.shape), torch.nan) for part in three.initial(0)]
    assert federated.tested(three, theta, test)[0] == np.mean(test.y == 0)


def test_a_slow_candidate_is_worth_what_the_one_that_stands_for_it_is():
    """The fastest of the slow ones: rate 1e-6 with momentum, through a whole training, as often as the paper trains."""
    slow = next(config for config in GRID if config == {"learning_rate": 1e-6, "gamma": 1.0, "momentum": 0.9})
    assert standing_for(slow)["learning_rate"] == 0.0
    clients, test = [records(300, seed) for seed in range(3)], records(5000, 9)
    shared = {"rounds": 5, "share": 1.0, "epochs": 5, "batch": 64, "dropout": 0.0, "seed": 3}
    found = [federated.accuracies(MODEL, [config], clients, test, **shared)[0] for config in (slow, standing_for(slow))]
    assert found[0] == pytest.approx(found[1], abs=0.002)


def test_the_drawn_clients_are_a_share_and_differ_by_round():
    clients = [records(5, seed) for seed in range(20)]
    drawn = [federated._drawn(clients, 0.25, seed) for seed in range(30)]
    assert {len(each) for each in drawn} == {5}
    assert len({id(client) for each in drawn for client in each}) == 20


def test_images_are_trained_too():
    from dpray.experiments.papers.dp_hype.nets import CifarNet
    from dpray.trainers.local_search import StackedModule

    rng = np.random.default_rng(0)
    x = rng.random((40, 3 * 8 * 8)).astype(np.float32)
    clients = [Records(x, rng.integers(0, 10, 40))]
    model = StackedModule(CifarNet(2), 10, (3, 8, 8))
    shared = {"rounds": 1, "share": 1.0, "epochs": 1, "batch": 64, "dropout": 0.0, "seed": 0}
    found = federated.accuracies(model, CONFIGS, clients, clients[0], **shared)
    assert found.shape == (3,)
    assert ((found >= 0) & (found <= 1)).all()
    assert isinstance(CifarNet(2)()[0], nn.Conv2d)
