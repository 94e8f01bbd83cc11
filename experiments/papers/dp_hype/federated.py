"""What every candidate is worth: federated averaging of all candidates at once, scored on records that did not vote.

| symbol | meaning                                                                             | shape    |
|--------|-------------------------------------------------------------------------------------|----------|
| m      | candidates trained side by side                                                     |          |
| Θ      | their global models                                                                 | (m, …)   |
| Θ_i    | the same after client i's E local epochs                                            | (m, …)   |
| η, γ, β | rate of the first epoch, factor on it after each epoch, momentum; anew every round  | (m,)     |

FedAvg (McMahan et al. 2017): Θ ← Σ |D_i| Θ_i / Σ |D_i| over the clients drawn for the round, the same for all
candidates; SGD in minibatches at the clients. Every candidate starts from parameters of its own, as the authors'
do. No noise, no clipping: this is what a choice is worth, not a private training (`private.py` has that).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dpray.experiments.papers.dp_hype.grid import Config
from dpray.platform.cohort.client import Records

if TYPE_CHECKING:
    from torch import Tensor

    from dpray.trainers.local_search import StackedModel

_RATES = ("learning_rate", "gamma", "momentum")
_TESTED_AT_ONCE = 1_000


def accuracies(
    model: StackedModel,
    configs: Sequence[Config],
    clients: Sequence[Records],
    test: Records,
    *,
    rounds: int,
    share: float,
    epochs: int,
    batch: int,
    dropout: float,
    seed: int,
) -> NDArray[np.float64]:
    """Accuracy of each candidate's global model after all rounds, (m,), with a share of the clients a round.

    A model that diverged predicts class 0, as an argmax of NaN does. Candidates whose rate is 0 after the first epoch
    (γ = 0) are trained for that epoch only, and those of rate 0 not at all: the parameters are the same.
    """
    import torch

    starts = [model.initial(_seed(seed, "start", number)) for number in range(len(configs))]
    stack = [torch.stack(parts) for parts in zip(*starts, strict=True)]
    with torch.no_grad():
        for chosen, own_epochs in _groups(configs, epochs, model.together):
            own = [part[chosen] for part in stack]
            rates = [torch.tensor([configs[i][name] for i in chosen]) for name in _RATES]
            for t in range(rounds):
                drawn = _drawn(clients, share, _seed(seed, "clients", t))
                own = _round(model, own, rates, drawn, (own_epochs, batch, dropout), _seed(seed, "round", t))
            for part, trained in zip(stack, own, strict=True):
                part[chosen] = trained
    return tested(model, stack, test)


def tested(model: StackedModel, theta: list[Tensor], test: Records) -> NDArray[np.float64]:
    """Share of the records that each model predicts right, (m,)."""
    import torch

    right = np.zeros(len(theta[0]))
    with torch.inference_mode():
        for first in range(0, len(test), _TESTED_AT_ONCE):
            rows = slice(first, first + _TESTED_AT_ONCE)
            z = model.logits(theta, torch.from_numpy(np.ascontiguousarray(test.x[rows])))
            classes = (z[..., 0] > 0).long() if z.shape[-1] == 1 else z.nan_to_num(nan=-torch.inf).argmax(dim=-1)
            right += (classes == torch.from_numpy(np.asarray(test.y[rows]))).sum(dim=1).numpy()
    return right / len(test)


def _drawn(clients: Sequence[Records], share: float, seed: int) -> list[Records]:
    """The clients of one round: a share of them, at least one."""
    count = max(1, round(share * len(clients)))
    return [clients[i] for i in np.random.default_rng(seed).permutation(len(clients))[:count]]


def _groups(configs: Sequence[Config], epochs: int, together: int) -> list[tuple[list[int], int]]:
    """Candidates that move in as many epochs, as many of them as are best trained at once."""
    moving = [number for number, config in enumerate(configs) if config["learning_rate"] > 0]
    always = [number for number in moving if configs[number]["gamma"] > 0]
    once = [number for number in moving if configs[number]["gamma"] == 0]
    return [
        (group[first : first + together], own)
        for group, own in ((always, epochs), (once, 1))
        for first in range(0, len(group), together)
    ]


def _round(
    model: StackedModel,
    theta: list[Tensor],
    rates: Sequence[Tensor],
    clients: Sequence[Records],
    training: tuple[int, int, float],
    seed: int,
) -> list[Tensor]:
    """Θ after one round: the mean of the clients' Θ_i, weighted by their records."""
    import torch

    total = sum(len(records) for records in clients)
    mean = [torch.zeros_like(part, dtype=torch.float64) for part in theta]
    for number, records in enumerate(clients):
        trained = _descended(model, theta, rates, records, training, _seed(seed, "client", number))
        for sum_of, part in zip(mean, trained, strict=True):
            sum_of.add_(part, alpha=len(records) / total)
    return [part.float() for part in mean]


def _descended(
    model: StackedModel,
    theta: list[Tensor],
    rates: Sequence[Tensor],
    records: Records,
    training: tuple[int, int, float],
    seed: int,
) -> list[Tensor]:
    """Θ_i: SGD with momentum and a step schedule from Θ, on one client's records."""
    import torch

    epochs, size, dropout = training
    rng = np.random.default_rng(seed)
    x, y = torch.from_numpy(np.ascontiguousarray(records.x)), torch.from_numpy(np.asarray(records.y, dtype=np.int64))
    theta = [part.clone() for part in theta]
    velocity = [torch.zeros_like(part) for part in theta]
    learning_rate, gamma, momentum = ([rate.reshape(-1, *[1] * (part.dim() - 1)) for part in theta] for rate in rates)
    for epoch in range(epochs):
        order = torch.from_numpy(rng.permutation(len(records)))
        downhill = [-rate * factor**epoch for rate, factor in zip(learning_rate, gamma, strict=True)]
        for first in range(0, len(records), size):
            batch = order[first : first + size]
            gradients, _ = model.gradients(theta, x[batch], y[batch], dropout, int(rng.integers(2**62)))
            for part, speed, gradient, step, beta in zip(theta, velocity, gradients, downhill, momentum, strict=True):
                speed.mul_(beta).add_(gradient)
                part.addcmul_(speed, step)
    return theta


def _seed(seed: int, name: str, number: int) -> int:
    return int(np.random.default_rng([seed, len(name), number]).integers(2**62))
