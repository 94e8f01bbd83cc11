"""Any torch module as a model: one gradient per record by `vmap(grad)`, clipped in the norm over all its parameters.

| symbol | meaning | shape |
|---|---|---|
| θ | trainable parameters in the module's order, flat, float64 | (d,) |
| g_x | gradient of one record's cross-entropy, float32 inside the module | (d,) |
| C | clip bound on ‖g_x‖ | scalar |
| u | Σ_x min(1, C′/‖g_x‖) g_x with C′ = C/(1+10⁻⁴), summed in float64 | (d,) |

A record is *bad*, and contributes zero, if a value of it is not finite, its label is no class, its gradient is not
finite, or the module raises on it (an index beyond an embedding). It is replaced by one of zeros in its place, so that
all others are computed as they would have been.

Every record goes through the module alone, so no module can mix records in a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpray.platform.cohort.client import Records
from dpray.trainers.models import BoolArray, FloatArray, Model, class_labels
from dpray.trainers.torch_refusals import place_of, refuse_mixing

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

MARGIN = 1e-4  # between float32 gradients and the real numbers the sensitivity is about
CHUNK = 64
CLIPS = (1e-20, 1e20)  # bounds that float32 holds with room on both sides
_SUMMED = 32  # records added in float32: 32² roundings of 2⁻²⁴·C, twice, stay below the margin of 2C·10⁻⁴
_NORM_BLOCK = 1024
_SMALL_NORM = 1e-10  # below it float32 squares may have vanished: even 2³¹ lost ones of 10⁻³⁸ do not matter above
_SMALL_WEIGHT = 2.0**-126  # smaller ones are no normal float32 numbers, and could be rounded up
_CHUNK_NUMBERS = 2**24  # per-record gradients held at once: 64 MiB of float32 however large the module


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
        device: `cuda` when there is one, else `cpu`; always `cpu` for modules with embeddings.

    Raises:
        ValueError: for a module that mixes records, or without trainable parameters, or with embeddings on a GPU.

    Guarantee: replacing one record by anything moves `clipped_sum` by at most 2C(1 + `relative_error`): the clip is to
    C/(1+10⁻⁴), gradients are float32, and at most 32 of them are added before float64 takes over. A module that raises
    on a record of zeros raises for all records and contributes nothing (`RuntimeError`). Asked of the module: whether
    it raises must not depend on the dropout mask, and on a GPU no value may make a kernel fail, which would end the
    device for the whole process.
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
        """u of one client, (d,). A C outside `CLIPS` is refused (`ValueError`)."""
        import torch

        self.refuse_clip(clip)
        parts = self._parts
        total = torch.zeros(self.dimension, dtype=torch.float64, device=parts.device)
        room = torch.empty(self.chunk * max(parts.sizes), device=parts.device)
        limit = clip / (1 + MARGIN)
        for gradients, good in self._per_record(theta, records):
            rows = [gradients[name].flatten(1) for name in parts.names]
            exact = limit / _norms(rows).clamp(min=limit)  # never divides by a zero norm
            weights = exact.float()
            counted = good & (exact >= _SMALL_WEIGHT)  # false for gradients that are not finite
            if not bool(counted.all()):
                weights = weights.masked_fill(~counted, 0.0)
                rows = [row.masked_fill(~counted[:, None], 0.0) for row in rows]
            for place, row in zip(torch.split(total, list(parts.sizes)), rows, strict=True):
                # a product and a plain sum: a matrix product may be set to less than float32
                clipped = torch.mul(row, weights[:, None], out=room[: row.numel()].view(row.shape))
                for i in range(0, len(row), _SUMMED):
                    place.add_(clipped[i : i + _SUMMED].sum(dim=0))
        return np.asarray(total.cpu().numpy())

    def refuse_clip(self, clip: float) -> None:
        """Refuse a C that float32 cannot hold."""
        least, most = CLIPS
        if not least <= clip <= most:
            raise ValueError(
                f"The clip of a float32 module must lie between {least:g} and {most:g}, and {clip} was given: choose "
                "one of the size of its gradients."
            )

    def usable(self, records: Records) -> BoolArray:
        """As `Model.usable`, and the module does not raise on the record at its initial parameters."""
        found = [good.cpu().numpy() for _, good in self._per_record(self.initial(), records)]
        return np.concatenate([np.empty(0, dtype=np.bool_), *found])

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
        A record of zeros goes along behind the last one: if the module raises on it, it must do so whether or not
        there are bad records to replace.
        """
        import torch

        parts = self._parts
        parameters = self._parameters(theta)
        x, y, good = _cleaned(records, self.classes)
        parts.module.train(parts.random)
        stream = sha256(f"{self.seed}:".encode() + (theta.tobytes() if parts.random else b"")).hexdigest()
        for i in range(0, len(y) + 1, self.chunk):
            chunk = slice(i, i + self.chunk)
            rows, labels = x[chunk], y[chunk]
            if i + self.chunk > len(y):
                rows, labels = np.concatenate([rows, np.zeros((1, *x.shape[1:]), x.dtype)]), np.append(labels, 0)
            gradients, sound = self._evaluated(parameters, rows, labels, f"{stream}:{i}")
            m = len(good[chunk])
            if m:
                counted = torch.tensor(good[chunk] & sound[:m], device=parts.device)
                yield {name: values[:m] for name, values in gradients.items()}, counted

    def _evaluated(
        self, parameters: dict[str, Tensor], x: NDArray[np.float32], y: NDArray[np.int64], stream: str
    ) -> tuple[dict[str, Tensor], BoolArray]:
        """Gradients of one chunk, and on which of its records the module does not raise.

        Where it raises, each record is tried alone, and those that fail are replaced by zeros.

        The text of a module's exception may hold values of records. It is told to whoever calls the model itself, on
        public records (`FederatedTrainer`'s trial, `check_records_alone`); inside a client, `Confinement` drops every
        exception unread, so that none reaches the driver.
        """
        with suppress(Exception):
            return self._run(parameters, x, y, stream), np.ones(len(y), dtype=np.bool_)
        sound = np.ones(len(y), dtype=np.bool_)
        for j in range(len(y)):
            try:
                self._run(parameters, x[j : j + 1], y[j : j + 1], stream)
            except Exception:
                sound[j] = False
        x, y = x.copy(), np.where(sound, y, 0)
        x[~sound] = 0.0
        try:
            return self._run(parameters, x, y, stream), sound
        except Exception as error:
            raise RuntimeError(
                f"The module raises on records of zeros of the shape {x.shape[1:]}, which stand in for bad records, or "
                f"on {len(y)} records together, so that no record can be answered: {type(error).__name__}: {error}"
            ) from error

    def _run(
        self, parameters: dict[str, Tensor], x: NDArray[np.float32], y: NDArray[np.int64], stream: str
    ) -> dict[str, Tensor]:
        import torch

        parts = self._parts
        with _repeatable(parts, stream):
            return parts.gradients(parameters, *(torch.tensor(each, device=parts.device) for each in (x, y)))

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
            self._functional = _split(self.factory, self.classes, self.seed, self.device)
        return self._functional


def _split(factory: Callable[[], nn.Module], classes: int, seed: int, device: str | None) -> _Functional:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = factory()
    refuse_mixing(module)
    place = place_of(module, device)
    module = module.float().to(place)
    trained = {name: value.detach() for name, value in module.named_parameters() if value.requires_grad}
    if not trained:
        raise ValueError("The module has no parameter that requires a gradient: there is nothing to train.")
    fixed = {name: value.detach() for name, value in module.named_parameters() if not value.requires_grad} | dict(
        module.named_buffers()
    )

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        output = torch.func.functional_call(module, parameters | fixed, (x[None],))
        if output.shape != (1, classes):
            raise ValueError(
                f"The module made outputs of shape {tuple(output.shape)} of one record, not (1, {classes})."
            )
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


def _norms(rows: list[Tensor]) -> Tensor:
    """‖g_x‖ over all parameters, (m,) float64; float64 throughout where float32 squares may have under- or overflowed.

    Args:
        rows: gradients by parameter, (m, size) each.
    """
    import torch

    norms: Tensor = torch.linalg.vector_norm(torch.stack([_fast_norms(row) for row in rows]), dim=0)
    unsure = ~((norms > _SMALL_NORM) & norms.isfinite())
    if bool(unsure.any()):
        wide = [torch.linalg.vector_norm(row[unsure].double(), dim=1) for row in rows]
        norms[unsure] = torch.linalg.vector_norm(torch.stack(wide), dim=0)
    return norms


def _fast_norms(rows: Tensor) -> Tensor:
    """Norm of each row; float32 within short blocks only, where it is exact to about 10⁻⁶."""
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
    good: BoolArray = known & np.isfinite(x).all(axis=tuple(range(1, x.ndim)))
    if not good.all():
        x = x.copy()
        x[~good] = 0.0
    return x, labels, good


@contextmanager
def _repeatable(parts: _Functional, stream: str) -> Iterator[None]:
    """Dropout masks that follow from θ, the public seed and the chunk alone, and deterministic kernels on a GPU."""
    import torch

    if not parts.random and parts.device.type == "cpu":
        yield
        return
    devices = [parts.device] if parts.device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=devices),
        torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False),
    ):
        torch.manual_seed(int.from_bytes(sha256(stream.encode()).digest()[:7]))
        yield
