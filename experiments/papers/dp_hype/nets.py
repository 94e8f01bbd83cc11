"""The paper's networks, as factories; widths and image sizes can be reduced.

| task  | network                                                                        | the authors'           |
|-------|--------------------------------------------------------------------------------|------------------------|
| mnist | conv 3×3 (w), conv 3×3 (2w), max-pool, fc 4w, 10; dropout .25 and .5           | w = 32, 28 × 28        |
| cifar | conv 3×3 (w, w), max-pool, conv 3×3 (2w, 4w), max-pool, mean, 10; dropout .25  | w = 32, 32 × 32        |

Adult's MLP (108, 64, 64, 1; ReLU, dropout .2) is the product's own `StackedMLP`.

The authors' network for CIFAR-10 has batch norm, which mixes the records of a batch and keeps statistics of them. Group
norm (8 groups) stands in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class MnistNet:
    """A factory of the network for MNIST.

    Args:
        side: pixels of a side.
        width: w.
    """

    side: int = 28
    width: int = 32

    def __call__(self) -> nn.Module:
        """A fresh network."""
        from torch import nn

        w, left = self.width, (self.side - 4) // 2
        return nn.Sequential(
            nn.Conv2d(1, w, 3),
            nn.ReLU(),
            nn.Conv2d(w, 2 * w, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(2 * w * left * left, 4 * w),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(4 * w, 10),
        )


@dataclass(frozen=True)
class CifarNet:
    """A factory of the network for CIFAR-10, for images of any even size.

    Args:
        width: w.
    """

    width: int = 32

    def __call__(self) -> nn.Module:
        """A fresh network."""
        from torch import nn

        w = self.width

        def block(*widths: int) -> list[nn.Module]:
            layers: list[nn.Module] = []
            for inner, outer in pairwise(widths):
                convolution = nn.Conv2d(inner, outer, 3, padding=1, bias=False)
                layers += [convolution, nn.GroupNorm(min(8, outer), outer), nn.ReLU()]
            return [*layers, nn.MaxPool2d(2), nn.Dropout(0.25)]

        return nn.Sequential(
            *block(3, w, w), *block(w, 2 * w, 4 * w), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * w, 10)
        )
