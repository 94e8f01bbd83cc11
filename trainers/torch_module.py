"""Any torch module as a model: one gradient per record by `vmap(grad)`, clipped in the norm over all its parameters.

| symbol | meaning | shape |
|---|---|---|
| θ | trainable parameters in the module's order, flat, float64 | (d,) |
| g_x | gradient of one record's cross-entropy, float32 inside the module | (d,) |
| C | clip bound on ‖g_x‖ | scalar |
| u | Σ_x min(1, C′/‖g_x‖) g_x with C′ = C/(1+10⁻⁴), summed in float64 | (d,) |

Every record goes through the module alone, so no module can mix records in a gradient. Modules whose *purpose* is to
mix them (batch norm and its kin) are refused by name, because alone they would not do what they are there for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpray.platform.cohort.client import Records
from dpray.trainers.models import BoolArray, FloatArray, Model, class_labels

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

MARGIN = 1e-4  # between float32 gradients and the real numbers the sensitivity is about
CHUNK = 64
_SUMMED = 32  # records added in float32: 32² roundings of 2⁻²⁴·C, twice, stay below the margin of 2C·10⁻⁴
_NORM_BLOCK = 1024
_CHUNK_NUMBERS = 2**24  # per-record gradients held at once: 64 MiB of float32 however large the module
_INSTEAD = {
    "BatchNorm1d": "GroupNorm or LayerNorm",
    "BatchNorm2d": "GroupNorm(groups, channels)",
    "BatchNorm3d": "GroupNorm(groups, channels)",
    "LazyBatchNorm1d": "GroupNorm or LayerNorm",
    "LazyBatchNorm2d": "GroupNorm(groups, channels)",
    "LazyBatchNorm3d": "GroupNorm(groups, channels)",
    "SyncBatchNorm": "GroupNorm(groups, channels)",
    "InstanceNorm1d": "the same layer with track_running_stats=False, or GroupNorm",
    "InstanceNorm2d": "the same layer with track_running_stats=False, or GroupNorm",
    "InstanceNorm3d": "the same layer with track_running_stats=False, or GroupNorm",
    "_SpectralNorm": "weight norm, or no constraint (its power iteration changes with every call)",
}


def refuse_mixing(module: nn.Module) -> None:
    """Check that no part of a module is made to mix records or to keep running statistics of them.

    Raises:
        ValueError: naming the part, its type and what to use instead.
    """
    for name, part in module.named_modules():
        kinds = [kind.__name__ for kind in type(part).__mro__]
        found = next((kind for kind in kinds if kind in _INSTEAD), None)
        if found is None or (found.startswith("InstanceNorm") and not getattr(part, "track_running_stats", False)):
            continue
        raise ValueError(
            f"`{name or 'the module itself'}` is a {found}: it mixes records or keeps statistics of them, so one "
            f"record would reach every gradient and the clip would bound nothing. Use {_INSTEAD[found]} instead."
        )


@dataclass(frozen=True)
class _Functional:
    """A module split into what is trained and what is fixed (public), on its device."""

    module: nn.Module
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    sizes: tuple[int, ...]
    fixed: dict[str, Tensor]
    gradients: Callable[..., dict[str, Tensor]]
    device: torch.device
    random: bool


class TorchModule(Model):
    """A module made by `factory`, trained on records whose labels are class numbers.

    Args:
        factory: called without arguments, in every process, under `seed`; returns the module, which maps (n, …)
            features to (n, K) logits. Parameters that do not require a gradient, and buffers, are fixed and public.
        classes: K.
        chunk: records whose gradients are held at once, at most 64; fewer for large modules.
        seed: of the initial parameters and of dropout. Public.
        device: `cuda` when there is one, else `cpu`.

    Raises:
        ValueError: for a module that mixes records, or without trainable parameters.

    Guarantee: replacing one record by anything moves `clipped_sum` by at most 2C(1 + `relative_error`): the clip is to
    C/(1+10⁻⁴), gradients are float32, and at most 32 of them are added before float64 takes over.
    """

    relative_error = MARGIN

    def __init__(
        self,
        factory: Callable[[], nn.Module],
        classes: int,
        *,
        chunk: int = CHUNK,
        seed: int = 0,
        device: str | None = None,
    ) -> None:
        if not 1 <= chunk <= CHUNK:
            raise ValueError(
                f"`chunk` must be from 1 to {CHUNK}, and {chunk} was given: longer float32 chunks lose the margin."
            )
        if classes < 2:
            raise ValueError(f"A classifier needs at least 2 classes, and {classes} was given.")
        self.factory = factory
        self.classes = classes
        self.seed = seed
        self.device = device
        self._functional: _Functional | None = None
        self.dimension = sum(self._parts.sizes)
        self.chunk = max(1, min(chunk, _CHUNK_NUMBERS // self.dimension))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_functional": None}

    def initial(self) -> FloatArray:
        """The factory's own initial parameters under `seed`."""
        parts = self._parts
        values = dict(parts.module.named_parameters())
        return np.concatenate([values[name].detach().double().cpu().numpy().reshape(-1) for name in parts.names])

    def clipped_sum(self, theta: FloatArray, records: Records, clip: float) -> FloatArray:
        """u of one client, (d,)."""
        import torch

        parts = self._parts
        total = torch.zeros(self.dimension, dtype=torch.float64, device=parts.device)
        room = torch.empty(self.chunk * max(parts.sizes), device=parts.device)
        limit = clip / (1 + MARGIN)
        for gradients, good in self._per_record(theta, records):
            rows = [gradients[name].flatten(1) for name in parts.names]
            norms = torch.linalg.vector_norm(torch.stack([_norms(row) for row in rows]), dim=0)
            weights = (limit / norms.clamp(min=limit)).float()  # never divides by a zero norm
            counted = good & norms.isfinite()
            if not bool(counted.all()):
                weights = weights.masked_fill(~counted, 0.0)
                rows = [row.masked_fill(~counted[:, None], 0.0) for row in rows]
            for place, row in zip(torch.split(total, list(parts.sizes)), rows, strict=True):
                # a product and a plain sum: a matrix product may be set to less than float32
                clipped = torch.mul(row, weights[:, None], out=room[: row.numel()].view(row.shape))
                for i in range(0, len(row), _SUMMED):
                    place.add_(clipped[i : i + _SUMMED].sum(dim=0))
        return np.asarray(total.cpu().numpy())

    def mean_gradient(self, theta: FloatArray, records: Records) -> FloatArray:
        """Mean of the gradients that are finite, (d,)."""
        import torch

        total = torch.zeros(self.dimension, dtype=torch.float64, device=self._parts.device)
        count = 0
        for gradients, good in self._per_record(theta, records):
            rows = torch.cat([gradients[name].flatten(1) for name in self._parts.names], dim=1)
            counted = good & rows.isfinite().all(dim=1)
            total += rows[counted].double().sum(dim=0)
            count += int(counted.sum())
        return np.asarray((total / max(count, 1)).cpu().numpy())

    def logits(self, theta: FloatArray, x: NDArray[Any]) -> FloatArray:
        """Scores of the classes in evaluation mode, (n, K)."""
        import torch

        parts = self._parts
        parameters = self._parameters(theta)
        parts.module.eval()
        found = []
        with torch.no_grad():
            for i in range(0, max(len(x), 1), 1024):
                rows = torch.tensor(np.asarray(x[i : i + 1024], dtype=np.float32), device=parts.device)
                found.append(torch.func.functional_call(parts.module, parameters | parts.fixed, (rows,)).double().cpu())
        z = torch.cat(found).numpy()
        if z.shape != (len(x), self.classes):
            raise ValueError(
                f"The module made outputs of shape {z.shape}; {self.classes} classes need ({len(x)}, {self.classes})."
            )
        return np.asarray(z)

    def _per_record(self, theta: FloatArray, records: Records) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Gradients of each chunk of records, {name: (m, …)}, and which of them are of good records.

        A bad record is replaced by zeros and keeps its place: what another one meets (its dropout mask) must not move.
        """
        import torch

        parts = self._parts
        parameters = self._parameters(theta)
        x, y, good = _cleaned(records, self.classes)
        parts.module.train(parts.random)
        with _repeatable(parts, self.seed, theta):
            for i in range(0, len(y), self.chunk):
                rows = slice(i, i + self.chunk)
                on_device = [torch.tensor(values[rows], device=parts.device) for values in (x, y, good)]
                yield parts.gradients(parameters, *on_device[:2]), on_device[2]

    def _parameters(self, theta: FloatArray) -> dict[str, Tensor]:
        import torch

        parts = self._parts
        flat = torch.tensor(theta, dtype=torch.float32, device=parts.device)
        pieces = zip(parts.names, torch.split(flat, list(parts.sizes)), parts.shapes, strict=True)
        return {name: piece.reshape(shape) for name, piece, shape in pieces}

    @property
    def _parts(self) -> _Functional:
        """Made once in each process, never shipped."""
        if self._functional is None:
            self._functional = _split(self.factory, self.seed, self.device)
        return self._functional


def _split(factory: Callable[[], nn.Module], seed: int, device: str | None) -> _Functional:
    import torch

    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = factory()
    refuse_mixing(module)
    module = module.float().to(place)
    trained = {name: value.detach() for name, value in module.named_parameters() if value.requires_grad}
    if not trained:
        raise ValueError("The module has no parameter that requires a gradient: there is nothing to train.")
    fixed = {name: value.detach() for name, value in module.named_parameters() if not value.requires_grad} | dict(
        module.named_buffers()
    )

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        output = torch.func.functional_call(module, parameters | fixed, (x[None],))
        return torch.nn.functional.cross_entropy(output, y[None])

    return _Functional(
        module=module,
        names=tuple(trained),
        shapes=tuple(value.shape for value in trained.values()),
        sizes=tuple(value.numel() for value in trained.values()),
        fixed=fixed,
        gradients=torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0), randomness="different"),
        device=place,
        random=any("Dropout" in kind.__name__ for part in module.modules() for kind in type(part).__mro__),
    )


def _norms(rows: Tensor) -> Tensor:
    """Norm of each row in float64; float32 within short blocks only, where it is exact to about 10⁻⁶."""
    import torch

    whole = rows.shape[1] // _NORM_BLOCK * _NORM_BLOCK
    blocks = torch.linalg.vector_norm(rows[:, :whole].reshape(len(rows), -1, _NORM_BLOCK), dim=2).double()
    rest = torch.linalg.vector_norm(rows[:, whole:], dim=1).double()
    norms: Tensor = torch.linalg.vector_norm(torch.cat([blocks, rest[:, None]], dim=1), dim=1)
    return norms


def _cleaned(records: Records, classes: int) -> tuple[NDArray[np.float32], NDArray[np.int64], BoolArray]:
    """Features in float32 with bad records zeroed, labels, and which records are good."""
    labels, known = class_labels(np.asarray(records.y).reshape(-1), classes)
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.asarray(records.x, dtype=np.float32)
    if len(x) != len(labels):
        raise ValueError(
            f"A client's records have {len(x)} rows of features and {len(labels)} labels; they must be as many."
        )
    good: BoolArray = known & np.isfinite(x).reshape(len(x), -1).all(axis=1)
    if not good.all():
        x = x.copy()
        x[~good] = 0.0
    return x, labels, good


@contextmanager
def _repeatable(parts: _Functional, seed: int, theta: FloatArray) -> Iterator[None]:
    """Dropout masks that follow from θ and the public seed alone, and deterministic kernels on a GPU."""
    import torch

    if not parts.random and parts.device.type == "cpu":
        yield
        return
    devices = [parts.device] if parts.device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=devices),
        torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False),
    ):
        torch.manual_seed(int.from_bytes(sha256(f"{seed}:".encode() + theta.tobytes()).digest()[:7]))
        yield
