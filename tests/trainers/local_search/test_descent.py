"""Training a stack equals training each model alone with torch's own optimiser, on the same minibatches and masks."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from dpray.trainers.local_search.descent import Descent, Part
from dpray.trainers.local_search.mlp import StackedMLP
from dpray.trainers.local_search.module import StackedModule
from dpray.trainers.local_search.settings import LocalTraining
from dpray.trainers.local_search.stacked import losses

F, SEED = 9, 11
RATES = [(0.5, 0.9, 0.25), (0.1, 0.0, 1.0), (0.05, 0.9, 0.99), (1e-3, 0.5, 0.1), (0.1, 0.9, 0.0), (0.0, 0.9, 1.0)]


class Perceptron(nn.Module):
    """The oracle of `StackedMLP`: layers of torch, dropout masks handed in."""

    def __init__(self, widths):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.masks = None

    def forward(self, x):
        for number, layer in enumerate(self.layers[:-1]):
            x = functional.relu(layer(x))
            if self.training and self.masks is not None:
                x = x * self.masks[number]
        return self.layers[-1](x)


def convolution():
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 3)), nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(16, 3)
    )


def some_data(classes, n=70):
    rng = np.random.default_rng(5)
    x = rng.standard_normal((n, F)).astype(np.float32)
    y = (x @ rng.standard_normal((F, classes))).argmax(axis=1)
    return Part(torch.from_numpy(x), torch.from_numpy(y))


def settings(dropout=0.0, **common):
    return [
        LocalTraining(learning_rate=eta, momentum=beta, gamma=gamma, batch_size=16, epochs=4, dropout=dropout, **common)
        for eta, beta, gamma in RATES
    ]


def loss_of(z, y):
    return losses(z[None], y).mean()


def plain_loop(net, each, data, before_step):
    """One candidate, as one would write it: the same order of minibatches, torch's SGD and StepLR."""
    optimiser = torch.optim.SGD(net.parameters(), lr=each.learning_rate, momentum=each.momentum)
    schedule = torch.optim.lr_scheduler.StepLR(optimiser, each.step_epochs, each.gamma)
    net.train()
    for epoch in range(1, each.epochs + 1):
        rng = np.random.default_rng([SEED, epoch])
        order = torch.from_numpy(rng.permutation(len(data.y)))
        for start in range(0, len(order), each.batch_size):
            rows = order[start : start + each.batch_size]
            before_step(net, len(rows), int(rng.integers(1 << 63)))
            optimiser.zero_grad()
            loss_of(net(data.x[rows]), data.y[rows]).backward()
            optimiser.step()
        schedule.step()
    net.eval()
    with torch.no_grad():
        return float(loss_of(net(data.x), data.y))


def stacked(model, every, data):
    descent = Descent(model, every, SEED)
    with torch.no_grad():
        for epoch in range(1, every[0].epochs + 1):
            descent.epoch(epoch, data)
        return -descent.scores(data, "loss").numpy()


def first_parameters(model):
    return model.initial(int(np.random.default_rng([SEED, 0]).integers(1 << 63)))


@pytest.mark.parametrize("step_epochs", [1, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(("hidden", "classes"), [((8, 6), 2), ((), 2), ((5,), 4), ((), 3)], ids=str)
def test_a_perceptron_ends_where_the_plain_loop_ends(hidden, classes, dropout, step_epochs):
    model, data, every = StackedMLP(F, classes, hidden), some_data(classes), settings(dropout, step_epochs=step_epochs)

    def masked(net, records, seed):
        net.masks = model.masks(records, dropout, seed) if dropout else None

    expected = []
    for each in every:
        net = Perceptron(model.widths)
        with torch.no_grad():
            for parameter, value in zip(net.parameters(), first_parameters(model), strict=True):
                parameter.copy_(value.T if parameter.ndim == 2 else value[0])
        expected.append(plain_loop(net, each, data, masked))
    np.testing.assert_allclose(stacked(model, every, data), expected, rtol=0, atol=1e-4)
    assert np.ptp(expected) > 0.05  # the candidates do differ


def test_a_module_with_dropout_ends_where_the_plain_loop_ends():
    """Dropout of the module itself: seeded alike, one model draws what the stack shares."""
    model, data, every = StackedModule(convolution, 3), some_data(3), settings()

    def seeded(net, records, seed):
        torch.manual_seed(seed)

    expected = []
    for each in every:
        net = convolution()
        with torch.no_grad():
            for parameter, value in zip(net.parameters(), first_parameters(model), strict=True):
                parameter.copy_(value)
        expected.append(plain_loop(net, each, data, seeded))
    np.testing.assert_allclose(stacked(model, every, data), expected, rtol=0, atol=1e-4)
    assert np.ptp(expected) > 0.05


def test_the_comparison_notices_another_momentum():
    """Negative control: the tolerance tells .9 from .89."""
    model, data = StackedMLP(F, 2, (8, 6)), some_data(2)
    one, other = (LocalTraining(learning_rate=0.1, momentum=beta, batch_size=16, epochs=4) for beta in (0.9, 0.89))
    found = stacked(model, [one, other], data)
    assert abs(found[0] - found[1]) > 1e-4


def test_a_diverged_model_leaves_at_once_and_the_others_go_on():
    model, data = StackedMLP(F, 3, (8,)), some_data(3)
    sane = settings()
    wild = LocalTraining(learning_rate=1e30, momentum=0.9, batch_size=16, epochs=4)
    mixed = Descent(model, [sane[0], wild, *sane[1:]], SEED)
    with torch.no_grad():
        mixed.epoch(1, data)
        assert mixed.members.tolist() == [0, *range(2, len(sane) + 1)]
        for epoch in range(2, 5):
            mixed.epoch(epoch, data)
        found = -mixed.scores(data, "loss").numpy()
    np.testing.assert_allclose(found, stacked(model, sane, data), rtol=0, atol=1e-5)


def test_a_stack_in_which_all_diverge_ends_empty():
    model, data = StackedMLP(F, 3, (8,)), some_data(3)
    wild = LocalTraining(learning_rate=1e30, momentum=0.9, batch_size=16)
    descent = Descent(model, [wild, wild], SEED)
    with torch.no_grad():
        descent.epoch(1, data)
        descent.epoch(2, data)
    assert descent.members.tolist() == []
