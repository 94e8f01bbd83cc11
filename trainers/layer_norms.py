"""Clipping without per-record gradients where a layer's form allows it: their norms, and their weighted sums.

| symbol | meaning | shape |
|---|---|---|
| m | records held at once | scalar |
| a | input of a layer, for each record | (m, …) |
| δ | gradient of the record's loss at the layer's output | (m, …) |
| P | positions at which a layer applies the same weight (pixels of a convolution, words of a sentence) | scalar |
| g | a record's gradient of one parameter | (m, size) |
| w | min(1, C′/‖g_x‖), ‖g_x‖ over all parameters; zero for records that do not count | (m,) float64 |

    linear layer, P = 1     g = δ ⊗ a,   ‖g‖ = ‖δ‖·‖a‖,   Σ w g = (diag(w) δ)ᵀ a      nothing of size (m, in·out)
    P > 1, convolutions     g = Σ_p δ_p ⊗ a_p = δ aᵀ,      a patches of the input   (m, size), one product a record

(Goodfellow 2015; Rochette, Manoel & Tramel 2019.) With P > 1 the gradient itself is formed, in float32, and its own
norm taken: positions can cancel, so that a norm found another way need not be that of what is added.

Guarantee: what is added for a record has norm at most C′(1 + 2·10⁻⁶), whatever the rounding in a and δ was, and depends
on its own a, δ and w alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

SUMMED = 64
"""Records added in float32: a sum of m vectors of norm ≤ C errs by 2⁻²⁴·C·m(m+1)/2 at most, in any order."""

_NORM_BLOCK = 1024
_SMALL_NORM = 1e-10  # below it float32 squares may have vanished: even 2³¹ lost ones of 10⁻³⁸ do not matter above
_PATCHES = 2**20  # numbers of unfolded inputs at once: they stay in the cache


class Gradient(Protocol):
    """Gradients of one parameter for m records."""

    def norms(self) -> Tensor:
        """‖g‖ of each record, (m,) float64, to about 10⁻⁶ but for squares below 10⁻³⁸; not finite where g is large."""

    def exact_norms(self, which: Tensor) -> Tensor:
        """‖g‖ of some records (mask), at every size; not finite only where g is not."""

    def first(self, m: int) -> Gradient:
        """Those of the first m records."""

    def add(self, places: Sequence[Tensor], segments: Sequence[slice], weights: Tensor, summed: int) -> None:
        """Add Σ w g over each segment of the records to its place, (size,) float64.

        Args:
            places: one a segment.
            segments: consecutive records, as one client has them.
            weights: (m,) float64; a record of weight zero adds nothing, even where it is not finite.
            summed: records added in float32 before float64 takes over.
        """


@dataclass(frozen=True)
class Rows:
    """Gradients as they are, (m, size) float32."""

    rows: Tensor

    def norms(self) -> Tensor:
        """As `Gradient.norms`: float32 within short blocks."""
        return _fast_norms(self.rows)

    def exact_norms(self, which: Tensor) -> Tensor:
        """As `Gradient.exact_norms`."""
        return _exact_norms(self.rows[which])

    def first(self, m: int) -> Rows:
        """As `Gradient.first`."""
        return Rows(self.rows[:m])

    def add(self, places: Sequence[Tensor], segments: Sequence[slice], weights: Tensor, summed: int) -> None:
        """As `Gradient.add`: products and plain sums, since matrix products may be set to less than float32."""
        clipped = _without(self.rows, weights) * weights.float()[:, None]
        for place, segment in zip(places, segments, strict=True):
            for i in range(segment.start, segment.stop, summed):
                place.add_(clipped[i : min(i + summed, segment.stop)].sum(dim=0))


@dataclass(frozen=True)
class Outer:
    """Gradients δ ⊗ a of a linear layer's weight at one position: δ (m, out), a (m, in); products in float64."""

    delta: Tensor
    a: Tensor

    def norms(self) -> Tensor:
        """As `Gradient.norms`: a large input makes a gradient of a δ whose squares vanish, so both are exact."""
        return _row_norms(self.delta) * _row_norms(self.a)

    def exact_norms(self, which: Tensor) -> Tensor:
        """As `Gradient.exact_norms`."""
        return _exact_norms(self.delta[which]) * _exact_norms(self.a[which])

    def first(self, m: int) -> Outer:
        """As `Gradient.first`."""
        return Outer(self.delta[:m], self.a[:m])

    def add(self, places: Sequence[Tensor], segments: Sequence[slice], weights: Tensor, summed: int) -> None:
        """As `Gradient.add`."""
        delta = _without(self.delta, weights).double() * weights[:, None]
        a = _without(self.a, weights).double()
        for place, segment in zip(places, segments, strict=True):
            place.view(delta.shape[1], a.shape[1]).addmm_(delta[segment].T, a[segment])


def linear(a: Tensor, delta: Tensor) -> tuple[Gradient, Gradient]:
    """Gradients of weight (out, in) and bias of a linear layer: a (m, …, in), δ (m, …, out)."""
    m = len(a)
    if a.numel() == m * a.shape[-1]:
        return Outer(delta.reshape(m, -1), a.reshape(m, -1)), Rows(delta.reshape(m, -1))
    a, delta = a.reshape(m, -1, a.shape[-1]), delta.reshape(m, -1, delta.shape[-1])
    return Rows((delta.transpose(1, 2) @ a).flatten(1)), Rows(delta.sum(dim=1))


def convolution(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, a: Tensor, delta: Tensor) -> tuple[Gradient, Gradient]:
    """Gradients of weight (out, in/groups, *kernel) and bias of a convolution.

    Args:
        layer: gives kernel, stride, dilation, groups and padding.
        a: (m, N, in, *sizes), N the batch within one record, usually 1.
        delta: (m, N, out, *sizes).
    """
    import torch

    m, N = a.shape[:2]
    inputs, delta = _padded(layer, a.flatten(0, 1)), delta.flatten(0, 1).flatten(2)
    groups, P = layer.groups, delta.shape[2]
    delta = delta.reshape(m * N, groups, -1, P)
    size = layer.in_channels // groups * prod(layer.kernel_size)
    step = min(m * N, max(1, _PATCHES // (groups * size * P)))
    patches = _patches(layer, inputs)
    block = inputs.new_empty(step, *patches.shape[1:])  # one for all blocks: new memory would cost more than the copy
    weight = delta.new_empty(m * N * groups, delta.shape[2], size)
    for i in range(0, m * N, step):
        rows = block[: m * N - i].copy_(patches[i : i + step]).view(-1, size, P)
        torch.bmm(delta[i : i + step].flatten(0, 1), rows.mT, out=weight[i * groups : (i + step) * groups])
    bias = delta.sum(dim=3)
    return Rows(_within_record(weight, m, N)), Rows(_within_record(bias, m, N))


def norms(gradients: Sequence[Gradient]) -> Tensor:
    """‖g_x‖ over all parameters, (m,) float64; not finite where a gradient is not."""
    import torch

    found: Tensor = torch.linalg.vector_norm(torch.stack([each.norms() for each in gradients]), dim=0)
    unsure = _unsure(found)
    if bool(unsure.any()):
        exact = torch.stack([each.exact_norms(unsure) for each in gradients])
        found[unsure] = torch.linalg.vector_norm(exact, dim=0)
    return found


def _row_norms(rows: Tensor) -> Tensor:
    """Norm of each row, (m,) float64."""
    found = _fast_norms(rows)
    unsure = _unsure(found)
    if bool(unsure.any()):
        found[unsure] = _exact_norms(rows[unsure])
    return found


def _unsure(found: Tensor) -> Tensor:
    """Whether float32 squares may have under- or overflowed in a norm."""
    return ~((found > _SMALL_NORM) & found.isfinite())


def _exact_norms(rows: Tensor) -> Tensor:
    import torch

    found: Tensor = torch.linalg.vector_norm(rows.double(), dim=1)
    return found


def _fast_norms(rows: Tensor) -> Tensor:
    """Norm of each row; float32 within short blocks only, where it is exact to about 10⁻⁶."""
    import torch

    whole = rows.shape[1] // _NORM_BLOCK * _NORM_BLOCK
    blocks = torch.linalg.vector_norm(rows[:, :whole].reshape(len(rows), -1, _NORM_BLOCK), dim=2).double()
    rest = torch.linalg.vector_norm(rows[:, whole:], dim=1).double()
    norms: Tensor = torch.linalg.vector_norm(torch.cat([blocks, rest[:, None]], dim=1), dim=1)
    return norms


def _without(rows: Tensor, weights: Tensor) -> Tensor:
    """The rows, those of weight zero being zero: 0·NaN is NaN."""
    unused = weights == 0
    return rows.masked_fill(unused[:, None], 0.0) if bool(unused.any()) else rows


def _within_record(each: Tensor, m: int, N: int) -> Tensor:
    """Sum over the batch within each record, (m, size)."""
    return each.reshape(m, -1) if N == 1 else each.reshape(m, N, -1).sum(dim=1)


def _padded(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, a: Tensor) -> Tensor:
    """The input with its borders, as the layer's forward pass pads it."""
    from torch.nn.functional import pad

    borders: list[int] = []
    for i in reversed(range(len(layer.kernel_size))):
        if layer.padding == "same":  # an odd number of border cells: the larger half at the end
            both = layer.dilation[i] * (layer.kernel_size[i] - 1)
            borders += [both // 2, both - both // 2]
        else:
            each = 0 if layer.padding == "valid" else int(layer.padding[i])
            borders += [each, each]
    if not any(borders):
        return a  # `pad` would copy it
    return pad(a, borders, mode="constant" if layer.padding_mode == "zeros" else layer.padding_mode)


def _patches(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, a: Tensor) -> Tensor:
    """View of all patches that the kernel meets, (m, in, *kernel, *positions): no copy."""
    a = a.contiguous()
    pairs = zip(a.shape[2:], layer.dilation, layer.kernel_size, layer.stride, strict=True)
    positions = [(size - dilation * (kernel - 1) - 1) // stride + 1 for size, dilation, kernel, stride in pairs]
    strides = a.stride()
    within = [stride * each for stride, each in zip(strides[2:], layer.dilation, strict=True)]
    between = [stride * each for stride, each in zip(strides[2:], layer.stride, strict=True)]
    shape = (*a.shape[:2], *layer.kernel_size, *positions)
    return a.as_strided(shape, (*strides[:2], *within, *between), a.storage_offset())
