"""Any torch module as a stack: `functional_call` for one model, mapped over stacked parameters by `vmap`.

A step costs Python the same whatever is stacked, so small modules gain most (an MLP of Adult's size four times and
more). Convolutions are bound by arithmetic: a stack of them takes about as long as one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpray.trainers.local_search.stacked import StackedModel, losses
from dpray.trainers.module_copies import fresh, seeded
from dpray.trainers.torch_refusals import refuse_mixing

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dpray.trainers.local_search.stacked import Parameters

_WIDER = 10  # a stack's fixed cost in Python is that much larger than of kernels by hand


@dataclass(frozen=True)
class _Functional:
    """A module taken apart: what is trained, what is fixed, and its mapped gradient and logits."""

    module: nn.Module
    names: tuple[str, ...]
    size: int
    gradients: Callable[..., Any]
    logits: Callable[..., Any]


class StackedModule(StackedModel):
    """Copies of the module made by `factory`, which maps (n, …) features to (n, K) logits, or (n, 1) for two classes.

    Its parameters that require a gradient are trained; others, and buffers, are the factory's. Dropout in the module
    draws one mask for the stack. What a module changes in itself (a buffer, an attribute) lasts for one training of one
    stack, which has a copy of its own: nothing of it reaches another client, split or stack. Not covered is what a
    module keeps outside of itself, in its class, a global or a closure.

    Args:
        factory: called without arguments where the records are, under a private seed; picklable.
        classes: K.
        shape: of one record as the module takes it, such as (1, 28, 28); None: as the records are.

    Raises:
        ValueError: for a module that mixes records or keeps statistics of them (`vmap` cannot stack those), or that
            has nothing to train, or that cannot be copied.
    """

    own_dropout = True

    def __init__(self, factory: Callable[[], nn.Module], classes: int, shape: tuple[int, ...] | None = None) -> None:
        if isinstance(classes, bool) or not isinstance(classes, int) or classes < 2:
            raise ValueError(f"`classes` must be a whole number of at least 2, and {classes!r} was given.")
        self.factory, self.classes, self.shape = factory, classes, shape
        self._pristine: nn.Module | None = None
        self._made: _Functional | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pristine": None, "_made": None}

    def fresh(self) -> StackedModule:
        """See `StackedModel.fresh`: the module is copied as the factory made it, and never run itself."""
        other = copy(self)
        other._pristine = self._module
        return other

    @property
    def dimension(self) -> int:
        """Number of trained parameters."""
        return self._parts.size

    @property
    def together(self) -> int:
        """See `StackedModel.together`."""
        return _WIDER * super().together

    def initial(self, seed: int) -> Parameters:
        """The factory's own initial parameters under the seed."""
        with seeded(seed):
            module = self.factory().float()
        return [value.detach() for value in module.parameters() if value.requires_grad]

    def gradients(
        self, theta: Parameters, x: Tensor, y: Tensor, dropout: float, seed: int
    ) -> tuple[Parameters, Tensor]:
        """As the module's autograd has them, and each model's loss."""
        parts = self._parts
        parts.module.train()
        with seeded(seed):
            found, loss = parts.gradients(tuple(theta), self._shaped(x), y)
        return list(found), loss

    def logits(self, theta: Parameters, x: Tensor) -> Tensor:
        """Of the module in evaluation mode."""
        parts = self._parts
        parts.module.eval()
        with seeded(0):
            z: Tensor = parts.logits(tuple(theta), self._shaped(x))
        return z

    def _shaped(self, x: Tensor) -> Tensor:
        return x if self.shape is None else x.reshape(len(x), *self.shape)

    @property
    def _parts(self) -> _Functional:
        """Made once for each training, never shipped."""
        if self._made is None:
            self._made = _taken_apart(fresh(self._module), self.classes)
        return self._made

    @property
    def _module(self) -> nn.Module:
        """Made once in each process, never shipped and never run."""
        if self._pristine is None:
            with seeded(0):
                module = self.factory()
            refuse_mixing(module)
            self._pristine = module.float()
        return self._pristine


def _taken_apart(module: nn.Module, classes: int) -> _Functional:
    from torch.func import functional_call, grad_and_value, vmap

    trained = {name: value for name, value in module.named_parameters() if value.requires_grad}
    if not trained:
        raise ValueError("The module has no parameter that requires a gradient: there is nothing to train.")
    names = tuple(trained)

    def logits(theta: tuple[Tensor, ...], x: Tensor) -> Tensor:
        z: Tensor = functional_call(module, dict(zip(names, theta, strict=True)), (x,))
        widths = (1, classes) if classes == 2 else (classes,)
        if z.ndim != 2 or len(z) != len(x) or z.shape[1] not in widths:
            raise ValueError(
                f"The module made outputs of shape {tuple(z.shape)} of {len(x)} records in {classes} classes."
            )
        return z

    def loss(theta: tuple[Tensor, ...], x: Tensor, y: Tensor) -> Tensor:
        return losses(logits(theta, x)[None], y).mean()

    return _Functional(
        module=module,
        names=names,
        size=sum(math.prod(value.shape) for value in trained.values()),
        gradients=vmap(grad_and_value(loss), in_dims=(0, None, None), randomness="same"),
        logits=vmap(logits, in_dims=(0, None), randomness="same"),
    )
