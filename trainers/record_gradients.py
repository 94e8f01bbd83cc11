"""Gradients of a module's records in one backward pass: layer by layer where a layer is known, else by `vmap(grad)`.

| symbol | meaning | shape |
|---|---|---|
| x, y | records and labels of one pass | (m, …), (m,) |
| a, δ | input of a known layer, and gradient of the loss at its output, for each record | (m, …) |
| e | a zero added to a known layer's output: δ is the gradient for it | (m, …) |

The module is a function of *one* record, and `vmap` runs it for many at once: what a record's output depends on is that
record, whatever the module does between its layers (functional calls, reshaping, pooling). No list of safe operations
is needed, and none that mixes records can be expressed.

A layer is *known* if it is exactly a `Linear` or `Conv1d/2d/3d`, is called once for a record, has plain parameters of
its own and no hooks, and nothing else uses them. That is read off the graph of one record of zeros. All other trained
parameters (of norms, embeddings, attention, transposed convolutions; shared or re-parametrised weights; layers used
twice) get a gradient per record in the same pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dpray.trainers.layer_norms import SUMMED, Gradient, Rows, convolution, linear

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_HELD = 8 * SUMMED
_NUMBERS = 2**25  # of float32 that the records of one pass keep at once, 128 MiB; one record always runs


@dataclass
class _Tape:
    """What happens at candidate layers while one forward pass runs."""

    runs: bool = False
    zeros: Mapping[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)

    def hook(self, name: str) -> Callable[..., Tensor | None]:
        """The forward hook of a layer."""

        def at_layer(layer: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            if not self.runs:
                return None
            self.calls[name] += 1
            if len(arguments) == 1:
                self.inputs[name], self.outputs[name] = arguments[0], output
            return output + self.zeros[name] if name in self.zeros else None

        return at_layer

    def called_once(self) -> set[str]:
        """Layers called once, with their input alone."""
        return {name for name, calls in self.calls.items() if calls == 1 and name in self.inputs}

    @contextmanager
    def running(self, zeros: Mapping[str, Tensor]) -> Iterator[None]:
        """One forward pass; nothing is kept afterwards."""
        self.runs, self.zeros = True, zeros
        try:
            yield
        finally:
            self.runs, self.zeros = False, {}
            for kept in (self.inputs, self.outputs, self.calls):
                kept.clear()


@dataclass(frozen=True)
class Route:
    """How gradients of records of one shape are found, and how many records one pass holds.

    Args:
        outputs: shape of a known layer's output for one record, by the layer's name.
        direct: trained parameters of known layers.
        held: records of one pass.
        gradients: (e of known layers, other parameters), module, parameters, x, y ↦ (δ, gradients), a; of many records.
    """

    outputs: Mapping[str, torch.Size]
    direct: frozenset[str]
    held: int
    gradients: Callable[..., Any]


class RecordGradients:
    """Gradients of each record's loss for the trained parameters of a module.

    Args:
        module: on its device. It gets hooks, and is never run: passes are given copies of it, hooks and all.
        loss: of (a copy, parameters by name, x, y) for one record.
        trained: names of the trained parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[nn.Module, dict[str, Tensor], Tensor, Tensor], Tensor],
        trained: tuple[str, ...],
    ) -> None:
        self._loss, self._trained, self._tape = loss, trained, _Tape()
        self._layers = _candidates(module, trained)
        for name, layer in self._layers.items():
            layer.register_forward_hook(self._tape.hook(name))

    def route(self, module: nn.Module, parameters: dict[str, Tensor], like: Tensor) -> Route:
        """The route for records like this one, of which shape and type are used: found with a record of zeros."""
        import torch

        x, y = torch.zeros_like(like), torch.zeros((), dtype=torch.int64, device=like.device)
        leaves = {name: value.detach().clone().requires_grad_() for name, value in parameters.items()}
        saved = _Saved(leaves)
        with self._tape.running({}), torch.autograd.graph.saved_tensors_hooks(saved.weigh, lambda tensor: tensor):
            value, tape = self._loss(module, leaves, x, y), self._tape
            shapes = {name: (tape.inputs[name].shape, tape.outputs[name].shape) for name in tape.called_once()}
        uses = _uses(value, leaves)
        if value.requires_grad:
            torch.autograd.grad(value, list(leaves.values()), allow_unused=True)  # raises where training would
        own = {name: self._trained_of(name) for name in shapes}
        known = {name: shape for name, shape in shapes.items() if all(uses[each] == 1 for each in own[name])}
        direct = frozenset(each for name in known for each in own[name])
        factored = {_of(name, "weight") for name, (a, _) in known.items() if _is_linear(self._layers[name], a)}
        rows = sum(value.numel() for name, value in leaves.items() if name not in factored)
        held = min(_HELD, max(1, _NUMBERS // (2 * rows + 3 * saved.numbers + 1)))
        outputs = {name: output for name, (_, output) in known.items()}
        return Route(outputs, direct, held // SUMMED * SUMMED or held, self._vectorised(frozenset(known)))

    def of(
        self, route: Route, module: nn.Module, parameters: dict[str, Tensor], x: Tensor, y: Tensor
    ) -> dict[str, Gradient]:
        """Gradients of m records, by name of parameter in the order of the trained ones."""
        zero = next(iter(parameters.values())).new_zeros(())
        zeros = {name: zero.expand(len(x), *output) for name, output in route.outputs.items()}
        others = {name: value for name, value in parameters.items() if name not in route.direct}
        (deltas, rest), inputs = route.gradients((zeros, others), module, parameters, x, y)
        found: dict[str, Gradient] = {name: Rows(value.flatten(1)) for name, value in rest.items()}
        for name in route.outputs:
            weight, bias = _layer_gradients(self._layers[name], inputs[name], deltas[name])
            found |= {_of(name, "weight"): weight, _of(name, "bias"): bias}
        return {name: found[name] for name in self._trained}

    def _vectorised(self, known: frozenset[str]) -> Callable[..., Any]:
        import torch

        def loss(
            traced: tuple[dict[str, Tensor], dict[str, Tensor]],
            module: nn.Module,
            parameters: dict[str, Tensor],
            x: Tensor,
            y: Tensor,
        ) -> tuple[Tensor, dict[str, Tensor]]:
            zeros, others = traced
            with self._tape.running(zeros):
                value = self._loss(module, parameters | others, x, y)
                if not known <= self._tape.called_once():
                    raise RuntimeError("The module calls its layers now once and now not, or more often.")
                return value, {name: self._tape.inputs[name] for name in known}

        gradients = torch.func.grad(loss, has_aux=True)
        vectorised: Callable[..., Any] = torch.func.vmap(
            gradients, in_dims=((0, None), None, None, 0, 0), randomness="different"
        )
        return vectorised

    def _trained_of(self, layer: str) -> list[str]:
        return [name for name in (_of(layer, "weight"), _of(layer, "bias")) if name in self._trained]


class _Saved:
    """Counts the numbers that autograd keeps of one record, parameters left out."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._not = {_place(value) for value in parameters.values()}
        self._sizes: dict[int, int] = {}

    def weigh(self, tensor: Tensor) -> Tensor:
        if _place(tensor) not in self._not:
            self._sizes[_place(tensor)] = max(tensor.numel(), self._sizes.get(_place(tensor), 0))
        return tensor

    @property
    def numbers(self) -> int:
        return sum(self._sizes.values())


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _candidates(module: nn.Module, trained: tuple[str, ...]) -> dict[str, nn.Module]:
    """Layers that may turn out to be known, by name."""
    from torch import nn

    holders = Counter(value for _, value in module.named_parameters(remove_duplicate=False))
    found = {}
    for name, layer in module.named_modules():
        own = dict(layer.named_parameters(recurse=False))
        alone = all(holders[value] == 1 for value in own.values())
        plain = "weight" in own and own.keys() <= {"weight", "bias"} and not _hooked(layer)
        trains = any(_of(name, each) in trained for each in own)
        if type(layer) in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d) and alone and plain and trains:
            found[name] = layer
    return found


def _hooked(layer: nn.Module) -> bool:
    """Whether hooks, such as those of weight norm, take part in what a layer does."""
    return any((layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks))


def _of(layer: str, parameter: str) -> str:
    """Name of a layer's parameter in the whole module; a layer may be the whole module."""
    return f"{layer}.{parameter}" if layer else parameter


def _is_linear(layer: nn.Module, inputs: torch.Size) -> bool:
    """Whether a layer's weight has gradients that are products: linear, at one position."""
    from torch import nn

    return isinstance(layer, nn.Linear) and inputs.numel() == layer.in_features


def _layer_gradients(layer: nn.Module, a: Tensor, delta: Tensor) -> tuple[Gradient, Gradient]:
    """Gradients of a known layer's weight and bias, from its inputs and the gradients at its outputs."""
    from torch import nn

    if isinstance(layer, nn.Linear):
        return linear(a, delta)
    assert isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    if a.dim() == len(layer.kernel_size) + 2:  # a record without a batch dimension of its own
        a, delta = a.unsqueeze(1), delta.unsqueeze(1)
    return convolution(layer, a, delta)


def _uses(value: Tensor, leaves: Mapping[str, Tensor]) -> Counter[str]:
    """How often each parameter enters the graph of a value."""
    names = {id(leaf): name for name, leaf in leaves.items()}
    uses, waiting, seen = Counter[str](), [value.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for after, _ in node.next_functions:
            leaf = id(getattr(after, "variable", None))
            uses.update([names[leaf]] if leaf in names else [])
            waiting.append(after)
    return uses
