"""Stacked multi-layer perceptrons and linear heads: forward and backward by hand, every layer one batched product.

| symbol | meaning                                                            | shape            |
|--------|--------------------------------------------------------------------|------------------|
| L      | layers; layer l maps w_{l−1} units to w_l, w_0 = f                 |                  |
| W_l, b_l | its weights and biases                                           | (m, w_{l−1}, w_l), (m, 1, w_l) |
| H_l    | M_l ∘ max(H_{l−1}W_l + b_l, 0), H_0 = X the same for all models    | (m, B, w_l)      |
| M_l    | dropout mask, 0 or 1/(1−p), shared by the stack                    | (B, w_l)         |
| D_l    | gradient at layer l's output before the ReLU; D_L = (P − Y)/B      | (m, B, w_l)      |

∇W_l = H_{l−1}ᵀ D_l, ∇b_l = 1ᵀD_l, D_{l−1} = [H_{l−1} > 0] ∘ D_l W_lᵀ/(1−p): where M is zero, H is, too.
Against autograd this spares the graph. The bracket is `threshold_backward`: a product with a Boolean mask takes longer
than a layer's own.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from dpray.trainers.local_search.stacked import StackedModel

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dpray.trainers.local_search.stacked import Parameters


class StackedMLP(StackedModel):
    """Perceptron f → hidden[0] → … → K with ReLU between; without hidden layers a linear head.

    Two classes have one logit and binary cross-entropy. A layer starts as `torch.nn.Linear` does, uniform on
    ±1/√(its inputs).

    Args:
        features: f.
        classes: K.
        hidden: widths; (64, 64) is DP-HYPE's model for Adult.

    Raises:
        ValueError: sizes that are not whole numbers in range.
    """

    def __init__(self, features: int, classes: int = 2, hidden: tuple[int, ...] = (64, 64)) -> None:
        sizes = (("features", features, 1), ("classes", classes, 2), *(("hidden", width, 1) for width in hidden))
        for name, size, least in sizes:
            if isinstance(size, bool) or not isinstance(size, int) or size < least:
                raise ValueError(f"`{name}` must be a whole number of at least {least}, and {size!r} was given.")
        self.features, self.classes, self.hidden = features, classes, tuple(hidden)

    @property
    def widths(self) -> tuple[int, ...]:
        """w_0 … w_L."""
        return self.features, *self.hidden, 1 if self.classes == 2 else self.classes

    @property
    def dimension(self) -> int:
        """Σ (w_{l−1} + 1) w_l."""
        return sum((inputs + 1) * outputs for inputs, outputs in pairwise(self.widths))

    def initial(self, seed: int) -> Parameters:
        """W_1, b_1, … W_L, b_L of one model."""
        import torch

        generator, theta = torch.Generator().manual_seed(seed), []
        for inputs, outputs in pairwise(self.widths):
            bound = 1 / math.sqrt(inputs)
            for shape in ((inputs, outputs), (1, outputs)):
                theta.append(torch.empty(shape).uniform_(-bound, bound, generator=generator))
        return theta

    def gradients(
        self, theta: Parameters, x: Tensor, y: Tensor, dropout: float, seed: int
    ) -> tuple[Parameters, Tensor]:
        """∇W_1, ∇b_1, …; and the sum of each model's logits."""
        import torch

        masks = self.masks(len(x), dropout, seed) if dropout else None
        inputs = self._forward(theta, x, masks)
        z = torch.baddbmm(theta[-1], inputs[-1], theta[-2])
        finite = z.sum(dim=(1, 2))
        D = _residuals(z, y)
        found = [D] * len(theta)
        for layer in range(len(inputs) - 1, -1, -1):
            H, W = inputs[layer], theta[2 * layer]
            found[2 * layer], found[2 * layer + 1] = torch.bmm(H.transpose(1, 2), D), D.sum(dim=1, keepdim=True)
            if layer:
                D = torch.bmm(D, W.transpose(1, 2))
                if dropout:
                    D.mul_(1 / (1 - dropout))
                torch.ops.aten.threshold_backward.grad_input(D, H, 0, grad_input=D)
        return found, finite

    def logits(self, theta: Parameters, x: Tensor) -> Tensor:
        """H_{L−1}W_L + b_L without dropout, (m, B, K) or (m, B, 1)."""
        import torch

        return torch.baddbmm(theta[-1], self._forward(theta, x, None)[-1], theta[-2])

    def masks(self, records: int, dropout: float, seed: int) -> list[Tensor]:
        """M_1 … M_{L−1} of one step."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        kept = (torch.rand((records, width), generator=generator) >= dropout for width in self.hidden)
        return [each.to(torch.float32).div_(1 - dropout) for each in kept]

    def _forward(self, theta: Parameters, x: Tensor, masks: list[Tensor] | None) -> list[torch.Tensor]:
        """H_0 … H_{L−1}."""
        import torch

        inputs = [x.expand(len(theta[0]), *x.shape)]
        for layer in range(len(self.hidden)):
            H = torch.baddbmm(theta[2 * layer + 1], inputs[-1], theta[2 * layer]).relu_()
            inputs.append(H if masks is None else H.mul_(masks[layer]))
        return inputs


def _residuals(z: Tensor, y: Tensor) -> Tensor:
    """(P − Y)/B, in place of z."""
    if z.shape[2] == 1:
        return z.sigmoid_().sub_(y[:, None]).div_(len(y))
    P = z.softmax(dim=2)
    P[:, range(len(y)), y] -= 1
    return P.div_(len(y))
