"""A stack of models: m copies of one architecture with parameters of their own, on the same minibatches.

| symbol | meaning                                                     | code      | shape     |
|--------|-------------------------------------------------------------|-----------|-----------|
| m      | models in the stack, one a candidate                        |           |           |
| Θ      | their parameters, one tensor a layer's weight or bias       | `theta`   | (m, …)    |
| X, y   | a minibatch, the same for all of them                       | `x`, `y`  | (B, …), (B,) |
| Z      | logits; K_out = 1 stands for two classes (binary cross-entropy), else one per class | `z` | (m, B, K_out) |
| ℓ      | mean cross-entropy over the minibatch                       |           | (m,)      |

Everything is float32: scores decide a vote at the client, and nothing else is made of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    Parameters = list[Tensor]


class StackedModel(ABC):
    """An architecture whose copies are trained side by side. Picklable; makes its tensors where it runs.

    Attributes:
        classes: K; labels are 0 … K−1.
    """

    classes: int

    @property
    @abstractmethod
    def dimension(self) -> int:
        """Number of parameters of one model."""

    @abstractmethod
    def initial(self, seed: int) -> Parameters:
        """One fresh model, tensors without the stack's axis; the same for the same seed."""

    @abstractmethod
    def gradients(self, theta: Parameters, x: Tensor, y: Tensor, dropout: float, seed: int) -> Parameters:
        """∇ℓ of every model by itself, shaped like `theta`; may be computed in buffers that the next call reuses.

        Args:
            theta: (m, …) each.
            x: (B, …) float32.
            y: (B,) int64.
            dropout: probability for hidden units.
            seed: of this step's dropout masks, which all models share.
        """

    @abstractmethod
    def logits(self, theta: Parameters, x: Tensor) -> Tensor:
        """Z in evaluation mode, (m, B, K_out)."""

    def refuse_dropout(self, dropout: float) -> None:
        """Refuse a dropout probability this model cannot take (`ValueError`)."""
