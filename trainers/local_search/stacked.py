"""A stack of models: m copies of one architecture with parameters of their own, on the same minibatches.

| symbol | meaning                                                                  | code     | shape        |
|--------|--------------------------------------------------------------------------|----------|--------------|
| m      | models in the stack, one a candidate                                     |          |              |
| Θ      | their parameters, one tensor for each weight or bias                     | `theta`  | (m, …)       |
| X, y   | records, the same for all of them                                        | `x`, `y` | (B, …), (B,) |
| Z      | logits; a single one stands for two classes, its sigmoid P(class 1)      | `z`      | (m, B, K)    |
| ℓ      | cross-entropy of a record, in nats                                       |          | (m, B)       |

All of it is float32: scores decide a ballot at the client, and nothing else is made of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    Parameters = list[Tensor]

CACHE = 3 << 19
"""Bytes of parameters, momenta and gradients that a stack of cheap layers should not exceed: a core's own cache."""


class StackedModel(ABC):
    """An architecture whose copies are trained side by side. Picklable; makes its tensors where it runs.

    Attributes:
        classes: K; labels are 0 … K−1.
        own_dropout: it brings its own dropout layers, and takes no probability from the settings.
    """

    classes: int
    own_dropout: bool = False

    @property
    @abstractmethod
    def dimension(self) -> int:
        """Number of parameters of one model."""

    @property
    def together(self) -> int:
        """How many are best trained at once: as many as the cache holds."""
        return max(1, CACHE // (3 * 4 * self.dimension))

    def fresh(self) -> StackedModel:
        """The same model as if it had never been used, for one training; itself where a model keeps nothing."""
        return self

    @abstractmethod
    def initial(self, seed: int) -> Parameters:
        """One fresh model, tensors without the stack's axis; the same for the same seed."""

    @abstractmethod
    def gradients(
        self, theta: Parameters, x: Tensor, y: Tensor, dropout: float, seed: int
    ) -> tuple[Parameters, Tensor]:
        """∇ of each model's mean ℓ, shaped like `theta`; and (m,) numbers, finite for models that have not diverged.

        Args:
            theta: (m, …) each.
            x: (B, …) float32.
            y: (B,) int64.
            dropout: probability with which a hidden unit is left out.
            seed: of this step's dropout masks, which all models share.
        """

    @abstractmethod
    def logits(self, theta: Parameters, x: Tensor) -> Tensor:
        """Z in evaluation mode, (m, B, K), or (m, B, 1)."""


def losses(z: Tensor, y: Tensor) -> Tensor:
    """ℓ of every record under every model, (m, B)."""
    from torch.nn import functional

    if z.shape[2] == 1:
        target = y.to(z.dtype).expand(z.shape[:2])
        return functional.binary_cross_entropy_with_logits(z[:, :, 0], target, reduction="none")
    return functional.cross_entropy(z.transpose(1, 2), y.expand(z.shape[:2]), reduction="none")


def hits(z: Tensor, y: Tensor) -> Tensor:
    """1 where a model is right, (m, B); the first class where logits are equal. NaN where a logit is not finite."""
    found = (z[:, :, 0] > 0).long() if z.shape[2] == 1 else z.argmax(dim=2)
    return (found == y).to(z.dtype).masked_fill(~z.isfinite().all(dim=2), float("nan"))
