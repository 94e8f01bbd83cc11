"""Stacked multi-layer perceptrons and linear heads, forward and backward by hand in batched products."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpray.trainers.local_search.stacked import StackedModel

if TYPE_CHECKING:
    from torch import Tensor

    from dpray.trainers.local_search.stacked import Parameters


class StackedMLP(StackedModel):
    """features → hidden[0] → … → K, ReLU between; without hidden layers a linear head.

    Two classes have one logit and binary cross-entropy. Layers start as `torch.nn.Linear` does.

    Args:
        features: f.
        classes: K ≥ 2.
        hidden: widths; (64, 64) is DP-HYPE's model for Adult.
    """

    def __init__(self, features: int, classes: int = 2, hidden: tuple[int, ...] = (64, 64)) -> None:
        self.features, self.classes, self.hidden = features, classes, tuple(hidden)

    @property
    def dimension(self) -> int:
        raise NotImplementedError

    def initial(self, seed: int) -> Parameters:
        raise NotImplementedError

    def gradients(self, theta: Parameters, x: Tensor, y: Tensor, dropout: float, seed: int) -> Parameters:
        raise NotImplementedError

    def logits(self, theta: Parameters, x: Tensor) -> Tensor:
        raise NotImplementedError
