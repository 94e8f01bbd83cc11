"""Any torch module as a model: one gradient per record in one backward pass, clipped in the norm over all parameters.

| symbol | meaning | shape |
|---|---|---|
| θ | trainable parameters in the module's order, flat, float64 | (d,) |
| g_x | gradient of one record's cross-entropy, float32 inside the module | (d,) |
| C | clip bound on ‖g_x‖ | scalar |
| u | Σ_x min(1, C′/‖g_x‖) g_x with C′ = C/(1+10⁻⁴), summed in float64 | (d,) |

A record is *bad*, and contributes zero, if a value of it is not finite, its label is no class, its gradient is not
finite, or the module raises on it (an index beyond an embedding). It is replaced by one of zeros in its place, so that
all others are computed as they would have been.

Every record goes through the module alone (`record_gradients`), so no module can mix records in a gradient; and every
pass runs on a fresh copy of it (`module_copies`), so nothing that it keeps reaches another pass. Linear
layers and convolutions are clipped by the norms of their layers' gradients (`layer_norms`), without a gradient of size
d for each record: memory is that of θ and of the records of one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpray.platform.cohort.client import Records, Stack
from dpray.trainers.layer_norms import SUMMED, Gradient, norms
from dpray.trainers.models import BoolArray, FloatArray, IntArray, Model, class_labels
from dpray.trainers.module_copies import fresh, seeded
from dpray.trainers.record_gradients import RecordGradients, Route
from dpray.trainers.torch_refusals import place_of, refuse_mixing

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

MARGIN = 1e-4  # between float32 gradients and the real numbers the sensitivity is about
CLIPS = (1e-20, 1e20)  # bounds that float32 holds with room on both sides
_SMALL_WEIGHT = 2.0**-126  # smaller ones are no normal float32 numbers, and could be rounded up


@dataclass(frozen=True)
class _Functional:
    """A module and what is trained in it, on its device.

    Attributes:
        module: as the factory made it. It is never run; its copies are.
        routes: by shape of a record; with each, whether the module drew random numbers on a record of zeros.
        random: it has a layer of dropout, and is in training mode therefore.
    """

    module: nn.Module
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    sizes: tuple[int, ...]
    gradients: RecordGradients
    routes: dict[tuple[int, ...], tuple[Route, bool]]
    device: torch.device
    random: bool


class TorchModule(Model):
    """A module made by `factory`, trained on records whose labels are class numbers.

    Args:
        factory: called without arguments, in every process, under `seed`; returns the module, which maps (n, …)
            features to (n, K) logits. Parameters that do not require a gradient, and buffers, are fixed and public:
            every pass finds them, and all else that the module holds, as the factory left them.
        classes: K.
        chunk: records added up in float32 before float64 takes over, at most 64. How many one pass holds follows from
            the module: at most 512, or as many as keep some 128 MiB.
        seed: of the initial parameters and of dropout. Public.
        device: `cuda` when there is one, else `cpu`; always `cpu` for modules with embeddings.

    Dropout stays on in training: every record gets a mask of its own that follows from θ, `seed` and its place among
    the client's records, never from values; so does whatever a module draws from torch, NumPy or Python without a
    layer of dropout, however many passes there are. Modules that mix records by purpose (batch norm) are refused by
    name.

    Raises:
        ValueError: for a module that mixes records, or without trainable parameters, or with embeddings on a GPU, or
            that cannot be copied.

    Guarantee: replacing one record by anything moves `clipped_sum` by at most 2C(1 + `relative_error`). Clipped to
    C' = C/(1+10⁻⁴), with norms exact to 2·10⁻⁶, records move an exact sum by 2C'(1 + 2·10⁻⁶). Sums of m ≤ 64 records in
    float32 err by 2⁻²⁴·C·m(m+1)/2 at most, before and after: together 2C(1 + 0.4·10⁻⁴). In `clipped_sums`, a client's
    row depends on its own records and on how many others have. A module that raises on a record of zeros raises for
    all records and contributes nothing (`RuntimeError`). Asked of the module: whether it raises must not depend on what
    it draws; it keeps nothing of a record outside of itself, where a copy does not reach (in its class, a global, a
    closure, an object whose `__deepcopy__` returns itself), and changes no settings of the process; and on a GPU no
    value may make a kernel fail, which would end the device for the whole process.
    """

    relative_error = MARGIN

    def __init__(
        self,
        factory: Callable[[], nn.Module],
        classes: int,
        *,
        chunk: int = SUMMED,
        seed: int = 0,
        device: str | None = None,
    ) -> None:
        if not 1 <= chunk <= SUMMED:
            raise ValueError(
                f"`chunk` must be from 1 to {SUMMED}, and {chunk} was given: longer float32 chunks lose the margin."
            )
        if classes < 2:
            raise ValueError(f"A classifier needs at least 2 classes, and {classes} was given.")
        self.factory = factory
        self.classes = classes
        self.chunk = chunk
        self.seed = seed
        self.device = device
        self._functional: _Functional | None = None
        self.dimension = sum(self._parts.sizes)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_functional": None}

    def initial(self) -> FloatArray:
        """The factory's own initial parameters under `seed`."""
        parts = self._parts
        values = dict(parts.module.named_parameters())
        return np.concatenate([values[name].detach().double().cpu().numpy().reshape(-1) for name in parts.names])

    def named(self, theta: FloatArray) -> dict[str, FloatArray]:
        """Trainable parameters by the module's own names and shapes, for its `load_state_dict(…, strict=False)`."""
        parts = self._parts
        pieces = np.split(theta, np.cumsum(parts.sizes)[:-1])
        return {
            name: piece.reshape(shape) for name, shape, piece in zip(parts.names, parts.shapes, pieces, strict=True)
        }

    def clipped_sum(self, theta: FloatArray, records: Records, clip: float) -> FloatArray:
        """u of one client, (d,). A C outside `CLIPS` is refused (`ValueError`)."""
        self.refuse_clip(clip)
        return np.asarray(self._sums(theta, Stack.of([records]), clip / (1 + MARGIN))[0][0])

    def clipped_sums(self, theta: FloatArray, shards: Sequence[Records], clip: float) -> FloatArray | None:
        """u of each client, (clients, d), records of several clients in one pass.

        Where random numbers are drawn, clients are left to be asked one by one (None): a mask follows from a record's
        place, which should not depend on which other clients a host has.
        """
        self.refuse_clip(clip)
        stack = shards if isinstance(shards, Stack) else Stack.of(shards)
        if self._draws(self._parameters(theta), stack.x.shape[1:]):
            return None
        return self._sums(theta, stack, clip / (1 + MARGIN))[0]

    def refuse_clip(self, clip: float) -> None:
        """Refuse a C that float32 cannot hold."""
        least, most = CLIPS
        if not least <= clip <= most:
            raise ValueError(
                f"The clip of a float32 module must lie between {least:g} and {most:g}, and {clip} was given: choose "
                "one of the size of its gradients."
            )

    def check_records(self, shape: tuple[int, ...]) -> None:
        """Refuse records of a shape on which the module, or its gradient, raises, as it does on one of zeros."""
        zeros = Records(np.zeros((1, *shape)), np.zeros(1, dtype=np.int64))
        try:
            self._route(self._parameters(self.initial()), shape)
            self.clipped_sum(self.initial(), zeros, 1.0)
        except Exception as error:
            raise ValueError(
                f"The module does not take the clients' records, of the shape {shape}: {error}. Give a module that "
                "does, or records of the shape it is made for."
            ) from error

    def usable(self, records: Records) -> BoolArray:
        """As `Model.usable`, and the module does not raise on the record at its initial parameters."""
        found = [good.cpu().numpy() for _, good, _ in self._per_record(self.initial(), records)]
        return np.concatenate([np.empty(0, dtype=np.bool_), *found])

    def mean_gradient(self, theta: FloatArray, records: Records) -> FloatArray:
        """Mean of the gradients that are finite, (d,)."""
        sums, counted = self._sums(theta, Stack.of([records]), None)
        return np.asarray(sums[0] / max(counted, 1))

    def logits(self, theta: FloatArray, x: NDArray[Any]) -> FloatArray:
        """Scores of the classes in evaluation mode, (n, K): each record alone, as in training."""
        import torch

        parts = self._parts
        parameters = self._parameters(theta)
        found = [torch.zeros(0, self.classes, dtype=torch.float64)]
        with torch.no_grad():
            for i in range(0, len(x), 1024):
                rows = torch.tensor(np.asarray(x[i : i + 1024], dtype=np.float32), device=parts.device)
                with seeded(_number(f"{self.seed}:logits:{i}"), parts.device):
                    module = fresh(parts.module, parameters)
                    module.eval()
                    found.append(_each(module, rows, self.classes).double().cpu())
        return np.asarray(torch.cat(found).numpy())

    def _sums(self, theta: FloatArray, stack: Stack, limit: float | None) -> tuple[FloatArray, int]:
        """Sums of gradients clipped to the limit, of each client (clients, d), and how many records count."""
        import torch

        parts, count = self._parts, 0
        sums = torch.zeros((len(stack), self.dimension), dtype=torch.float64, device=parts.device)
        columns = torch.split(sums, list(parts.sizes), dim=1)
        for gradients, good, first in self._per_record(theta, stack):
            weights = _weights(norms(list(gradients.values())), good, limit)
            clients, segments = _segments(stack.offsets, first, first + len(good))
            for gradient, column in zip(gradients.values(), columns, strict=True):
                gradient.add([column[client] for client in clients], segments, weights, self.chunk)
            count += int((weights > 0).sum())
            del gradients, gradient  # before the next pass has its own
        return np.asarray(sums.cpu().numpy()), count

    def _per_record(
        self, theta: FloatArray, records: Records | Stack
    ) -> Iterator[tuple[dict[str, Gradient], Tensor, int]]:
        """Of each pass: gradients of its records by parameter, which are of good records, and the first one's place.

        A bad record is replaced by zeros and keeps its place: what another one meets (its dropout mask) must not move.
        A record of zeros goes along behind the last one: if the module raises on it, it must do so whether or not
        there are bad records to replace.
        """
        import torch

        parts, n = self._parts, len(records.x)
        parameters, shape = self._parameters(theta), records.x.shape[1:]
        random = self._draws(parameters, shape)
        stream = sha256(f"{self.seed}:".encode() + (theta.tobytes() if random else b"")).hexdigest()
        held = self._route(parameters, shape)[0].held
        for i in range(0, max(n, 1), held):
            x, y, good = _cleaned(records.x[i : i + held], records.y[i : i + held], self.classes)
            if i + held >= n:
                x, y = np.concatenate([x, np.zeros((1, *x.shape[1:]), x.dtype)]), np.append(y, 0)
            gradients, sound = self._evaluated(parameters, x, y, f"{stream}:{i}")
            m = len(good)
            if m:
                counted = torch.tensor(good & sound[:m], device=parts.device)
                yield {name: values.first(m) for name, values in gradients.items()}, counted, i
            del gradients

    def _evaluated(
        self, parameters: dict[str, Tensor], x: NDArray[np.float32], y: NDArray[np.int64], stream: str
    ) -> tuple[dict[str, Gradient], BoolArray]:
        """Gradients of one pass, and on which of its records the module does not raise.

        Where it raises, each record is tried alone, and those that fail are replaced by zeros. Every try has a copy of
        the module and the same random numbers, so that the last one finds for the other records what it would have
        found without them.

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
    ) -> dict[str, Gradient]:
        import torch

        parts, (route, _) = self._parts, self._route(parameters, x.shape[1:])
        with seeded(_number(stream), parts.device):
            module = self._fresh(parameters)
            given = {name: value.detach() for name, value in module.named_parameters() if name in parameters}
            return parts.gradients.of(
                route, module, given, *(torch.tensor(each, device=parts.device) for each in (x, y))
            )

    def _fresh(self, parameters: dict[str, Tensor]) -> nn.Module:
        """A copy of the module for one pass, in the mode in which it is trained."""
        module = fresh(self._parts.module, parameters)
        module.train(self._parts.random)
        return module

    def _draws(self, parameters: dict[str, Tensor], shape: tuple[int, ...]) -> bool:
        """Whether the module draws random numbers, by its layers or as it did on a record of zeros."""
        return self._parts.random or self._route(parameters, shape)[1]

    def _route(self, parameters: dict[str, Tensor], shape: tuple[int, ...]) -> tuple[Route, bool]:
        """How gradients of records of a shape are found, and whether that drew random numbers of torch.

        Once in each process, with a record of zeros.
        """
        import torch

        parts = self._parts
        if shape not in parts.routes:
            try:
                with seeded(0, parts.device):
                    before = _generators(parts.device)
                    zeros = torch.zeros(shape, device=parts.device)
                    route = parts.gradients.route(self._fresh(parameters), parameters, zeros)
                    drew = any(not torch.equal(*pair) for pair in zip(before, _generators(parts.device), strict=True))
                    parts.routes[shape] = route, drew
            except Exception as error:
                raise RuntimeError(
                    f"The module raises on records of zeros of the shape {shape}, which stand in for bad records, so "
                    f"that no record can be answered: {type(error).__name__}: {error}"
                ) from error
        return parts.routes[shape]

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
    fresh(module)  # refuses one that cannot be copied, before anything is spent

    def loss(copy: nn.Module, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        output = _of_one(torch.func.functional_call(copy, parameters, (x[None],)), classes)
        return torch.nn.functional.cross_entropy(output, y[None])

    return _Functional(
        module=module,
        names=tuple(trained),
        shapes=tuple(value.shape for value in trained.values()),
        sizes=tuple(value.numel() for value in trained.values()),
        gradients=RecordGradients(module, loss, tuple(trained)),
        routes={},
        device=place,
        random=any("Dropout" in kind.__name__ for part in module.modules() for kind in type(part).__mro__),
    )


def _each(module: nn.Module, x: Tensor, classes: int) -> Tensor:
    """Outputs of the module, (n, K), each from one record: what mixes a batch finds one record in it."""
    import torch

    return torch.func.vmap(lambda row: _of_one(module(row[None]), classes)[0], randomness="different")(x)


def _of_one(output: Tensor, classes: int) -> Tensor:
    """What a module made of a batch of one record, (1, K)."""
    if output.shape != (1, classes):
        raise ValueError(f"The module made outputs of shape {tuple(output.shape)} of one record, not (1, {classes}).")
    return output


def _weights(found: Tensor, good: Tensor, limit: float | None) -> Tensor:
    """w of each record, (m,) float64, from norms that are not finite where gradients are not; limit None: 0 or 1."""
    import torch

    exact = torch.ones_like(found) if limit is None else limit / found.clamp(min=limit)  # never divides by a zero norm
    counted = good & found.isfinite() & (exact >= _SMALL_WEIGHT)
    return exact.masked_fill(~counted, 0.0)


def _segments(offsets: IntArray, first: int, last: int) -> tuple[range, list[slice]]:
    """Clients with records from `first` to `last` of a stack, and where theirs lie, counted from `first`."""
    clients = range(
        int(np.searchsorted(offsets, first, side="right")) - 1, int(np.searchsorted(offsets, last, side="left"))
    )
    return clients, [slice(max(int(offsets[i]) - first, 0), min(int(offsets[i + 1]), last) - first) for i in clients]


def _cleaned(
    x: NDArray[Any], y: NDArray[Any], classes: int
) -> tuple[NDArray[np.float32], NDArray[np.int64], BoolArray]:
    """Features in float32 with bad records zeroed, labels, and which records are good."""
    labels, known = class_labels(y.reshape(-1), classes)
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.asarray(x, dtype=np.float32)
    good: BoolArray = known & np.isfinite(x).all(axis=tuple(range(1, x.ndim)))
    if not good.all():
        x = x.copy()
        x[~good] = 0.0
    return x, labels, good


def _number(stream: str) -> int:
    """A seed that follows from a text."""
    return int.from_bytes(sha256(stream.encode()).digest()[:7])


def _generators(device: torch.device) -> list[Tensor]:
    """States of torch's generators that a module on the device may draw from."""
    import torch

    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
