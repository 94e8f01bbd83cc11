"""SGD with momentum and StepLR over a stack of models, each at a rate, decay and momentum of its own.

| symbol  | meaning                                                       | code       | shape  |
|---------|---------------------------------------------------------------|------------|--------|
| Θ, V    | parameters, momenta                                           |            | (m, …) |
| η, γ, β | learning rate now, its factor, momentum of each model         |            | (m,)   |
| E, B    | epochs, records of a minibatch                                |            |        |

Every step: V ← βV + ∇, Θ ← Θ − ηV, which is `torch.optim.SGD`. After every `step_epochs` epochs: η ← γη.

Minibatches and dropout masks follow from the seed and the number of the epoch and step alone: they are the same for
every model of the stack, whatever else is in it and whoever has left it. A model leaves when it has diverged, when its
rate has become zero (nothing moves it any more) or when it is stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dpray.trainers.local_search.settings import LocalTraining, Score
from dpray.trainers.local_search.stacked import StackedModel, hits, losses

if TYPE_CHECKING:
    from torch import Tensor

_AT_ONCE = 1 << 24  # numbers of logits and features formed together when records are scored


@dataclass(frozen=True)
class Part:
    """Some of a client's records: x (n, …) float32, y (n,) int64."""

    x: Tensor
    y: Tensor


class Descent:
    """One stack under way.

    Args:
        model: the architecture; what its module keeps while it is trained here stays here (`StackedModel.fresh`).
        settings: one candidate each, alike in what `LocalTraining.stackable` names.
        seed: private; of the first parameters, the minibatches and the dropout masks.

    Attributes:
        members: places in `settings` of the models that are still in the stack.
    """

    def __init__(self, model: StackedModel, settings: Sequence[LocalTraining], seed: int) -> None:
        import torch

        self._model, self._seed, self._common = model.fresh(), seed, settings[0]
        self.members = np.arange(len(settings))
        start = model.initial(int(np.random.default_rng([seed, 0]).integers(1 << 63)))
        self._theta = [each.expand(len(settings), *each.shape).clone() for each in start]
        self._momenta = [torch.zeros_like(each) for each in self._theta]
        rates = [[each.learning_rate, each.gamma, each.momentum] for each in settings]
        self._rates = torch.tensor(rates, dtype=torch.float64)
        self._shape_rates()

    def epoch(self, number: int, data: Part) -> None:
        """Pass over the training part once, the `number`-th time, from 1."""
        import torch

        common, n = self._common, len(data.y)
        rng = np.random.default_rng([self._seed, number])
        order = torch.from_numpy(rng.permutation(n))
        x, y = data.x[order], data.y[order]
        for start in range(0, n, common.batch_size):
            if not len(self.members):
                return
            batch = slice(start, start + common.batch_size)
            self._step(x[batch], y[batch], int(rng.integers(1 << 63)))
        if number % common.step_epochs == 0:
            self._rates[:, 0] *= self._rates[:, 1]
            self._shape_rates()

    def _step(self, x: Tensor, y: Tensor, seed: int) -> None:
        gradients, finite = self._model.gradients(self._theta, x, y, self._common.dropout, seed)
        alive = finite.isfinite()
        if not bool(alive.all()):
            gradients = [each[alive] for each in gradients]
            self.keep(alive)
        for theta, momentum, gradient, (eta, beta) in zip(
            self._theta, self._momenta, gradients, self._shaped, strict=True
        ):
            momentum.mul_(beta).add_(gradient)
            theta.addcmul_(momentum, eta, value=-1)

    def _shape_rates(self) -> None:
        """η and β as they multiply each parameter, (m, 1, …)."""
        eta, _, beta = self._rates.float().unbind(dim=1)
        shapes = [(len(each), *(1,) * (each.ndim - 1)) for each in self._theta]
        self._shaped = [(eta.reshape(shape), beta.reshape(shape)) for shape in shapes]

    def keep(self, which: Tensor) -> None:
        """Let all models leave the stack but these, (m,) Boolean."""
        self._theta, self._momenta = [each[which] for each in self._theta], [each[which] for each in self._momenta]
        self._rates, self.members = self._rates[which], self.members[which.numpy()]
        self._shape_rates()

    @property
    def at_rest(self) -> Tensor:
        """Which models nothing moves any more, (m,) Boolean."""
        return self._rates[:, 0] == 0

    def scores(self, judges: Part, score: Score) -> Tensor:
        """Of every model in the stack, (m,) float64, higher is better; NaN for one that has diverged."""
        import torch

        judged = []
        rows = max(1, _AT_ONCE // (max(len(self.members), 1) * (judges.x[0].numel() + 1)))
        for start in range(0, len(judges.y), rows):
            x, y = judges.x[start : start + rows], judges.y[start : start + rows]
            z = self._model.logits(self._theta, x)
            judged.append(hits(z, y) if score == "accuracy" else -losses(z, y))
        found = torch.cat(judged, dim=1).double().mean(dim=1)
        return found.masked_fill(~found.isfinite(), float("nan"))
