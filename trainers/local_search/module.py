"""Any torch module as a stack: one call of it by `torch.func.functional_call`, mapped over stacked parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dpray.trainers.local_search.stacked import StackedModel

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dpray.trainers.local_search.stacked import Parameters


class StackedModule(StackedModel):
    """A module made by `factory`, which maps (n, …) features to (n, K) logits, or (n, 1) for two classes.

    Args:
        factory: called without arguments where the records are, under a private seed; picklable.
        classes: K ≥ 2.
        shape: of one record as the module takes it, such as (1, 28, 28); None: as the records are.

    Raises:
        ValueError: for a module that mixes records or keeps statistics of them, or has nothing to train.
    """

    def __init__(self, factory: Callable[[], nn.Module], classes: int, shape: tuple[int, ...] | None = None) -> None:
        self.factory, self.classes, self.shape = factory, classes, shape

    @property
    def dimension(self) -> int:
        raise NotImplementedError

    def initial(self, seed: int) -> Parameters:
        raise NotImplementedError

    def gradients(self, theta: Parameters, x: Tensor, y: Tensor, dropout: float, seed: int) -> Parameters:
        raise NotImplementedError

    def logits(self, theta: Parameters, x: Tensor) -> Tensor:
        raise NotImplementedError
