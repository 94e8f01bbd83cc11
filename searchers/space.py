"""Candidates from a Ray Tune search space, drawn without looking at any data.

A space is what `tune.Tuner(param_space=...)` takes: a dictionary, nested as one likes, whose leaves are Tune domains or
constants. Candidates are plain JSON (numbers, strings, booleans, None, lists, dictionaries), because they are public:
they stand in the digest of the release that chooses between them, and in saved state.

| domain                                                        | its values            |
|---------------------------------------------------------------|-----------------------|
| `choice`, `grid_search`                                       | all of them           |
| `randint`, `lograndint`, `qrandint`, `qlograndint`            | all of them           |
| `quniform`, `qloguniform`                                     | all multiples of `q`  |
| `uniform`, `loguniform`                                       | drawn, public seed    |
| `randn`, `qrandn` (unbounded), `sample_from`, any callable    | refused, key named    |

Errors name the key by its path, `optimizer/lr`.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray.tune.search.sample import Categorical, Domain, Float, Function, Integer, LogUniform, Normal, Quantized

from dpray.searchers.errors import SpaceError

Config = dict[str, Any]
Path = tuple[str | int, ...]

MOST_CANDIDATES = 10_000
"""More candidates than this are refused: every one of them is a training on every client."""

_MOST_VALUES = 100_000  # a finite domain with more values is drawn from like a continuous one
_DRAWS_PER_CANDIDATE = 50  # how often a draw that came up before is drawn again
_PLACEHOLDERS = {"__fn_ph": "a function (`sample_from`)", "__ref_ph": "a Python object"}  # Tune's marks for non-data


@dataclass(frozen=True)
class Leaf:
    """One searched key of a space: where it sits and how its values come about.

    Attributes:
        path: Keys (and list positions) from the top.
        values: All values if the domain is finite and small enough to list, else None.
        draw: One value from a generator.
    """

    path: Path
    values: tuple[Any, ...] | None
    draw: Callable[[np.random.Generator], Any]

    @property
    def name(self) -> str:
        """The path as Tune prints it."""
        return _name(self.path)


def candidates(space: Mapping[str, Any], count: int | None = None, *, seed: int = 0) -> tuple[Config, ...]:
    """List the candidates of a space: its whole grid, or `count` different draws.

    Args:
        space: Tune search space, nested dictionaries and lists.
        count: How many to draw; None for the whole grid. A finite grid that has no more than `count` is taken whole.
        seed: Public seed of the draws: the same space, count and seed give the same candidates.

    Returns:
        Different complete configurations, constants included, in a fixed order (last key fastest for a grid).

    Raises:
        SpaceError: nothing to search, a key that cannot be searched, or no way to list the grid without `count`.
    """
    if count is not None and count < 1:
        raise SpaceError(f"{count} candidates were asked for; a search needs at least 2.")
    if count is not None and count > MOST_CANDIDATES:
        raise SpaceError(f"{count} candidates were asked for; at most {MOST_CANDIDATES} are allowed.")
    found = leaves(space)
    if not found:
        raise SpaceError(
            "There is nothing to search: the space holds constants only. Give at least one key a domain, "
            "such as tune.choice([...]) or tune.loguniform(low, high)."
        )
    constants = plain(space)
    endless = [leaf.name for leaf in found if leaf.values is None]
    size = math.prod(len(leaf.values or ()) for leaf in found) if not endless else None
    if count is None:
        if endless:
            raise SpaceError(
                f"The space cannot be listed in full because of {', '.join(endless)}: "
                "say how many candidates to draw (for example candidates=16), or give finite domains."
            )
        if size is not None and size > MOST_CANDIDATES:
            raise SpaceError(
                f"The grid of this space has {size} candidates, more than the {MOST_CANDIDATES} that are allowed: "
                "say how many to draw from it (for example candidates=32)."
            )
    whole = size is not None and (count is None or size <= count)
    points = _grid(constants, found) if whole else _draws(constants, found, int(count or 0), seed)
    if len(points) < 2:
        raise SpaceError("There is nothing to search: the space has a single candidate. Give some key two values.")
    return points


def distinct(configs: Sequence[Mapping[str, Any]]) -> tuple[Config, ...]:
    """Check a list of explicit candidates: plain JSON, no domains left, duplicates removed, order kept.

    Raises:
        SpaceError: a candidate holds a domain or a value that is not JSON, or fewer than two are left.
    """
    checked = []
    for index, config in enumerate(configs):
        if leaves(config):
            names = ", ".join(leaf.name for leaf in leaves(config))
            raise SpaceError(f"Candidate {index} still holds a domain ({names}): give values, or pass a space instead.")
        checked.append(plain(config))
    points = _unique(checked)
    if len(points) < 2:
        raise SpaceError(f"There is nothing to search: {len(points)} different candidates were given, 2 are needed.")
    return points


def leaves(space: Mapping[str, Any]) -> tuple[Leaf, ...]:
    """Find the searched keys of a space, in order of appearance; refuses what cannot be searched."""
    return tuple(_leaves(space, ()))


def plain(space: Mapping[str, Any]) -> Config:
    """Copy the constants of a space as plain JSON; searched keys are left out of the copy as None.

    Raises:
        SpaceError: a constant is a callable, a non-finite number or not JSON at all.
    """
    copied = _plain(space, ())
    assert isinstance(copied, dict)
    return copied


def _leaves(value: Any, path: Path) -> Iterator[Leaf]:
    if isinstance(value, Domain):
        yield _leaf(value, path)
    elif isinstance(value, Mapping):
        if set(value) == {"eval"}:
            raise SpaceError(f"{_name(path)} is an expression ('eval'): give its values, as tune.choice([...]).")
        if set(value) == {"grid_search"}:
            yield _grid_leaf(value["grid_search"], path)
            return
        for key, child in value.items():
            if not isinstance(key, str):
                raise SpaceError(f"The key {key!r} under '{_name(path)}' is not a string; keys of a space are strings.")
            yield from _leaves(child, (*path, key))
    elif isinstance(value, (list, tuple)) and not _is_placeholder(value):
        for index, child in enumerate(value):
            yield from _leaves(child, (*path, index))


def _grid_leaf(values: Any, path: Path) -> Leaf:
    if not isinstance(values, (list, tuple)):
        raise SpaceError(f"{_name(path)}: grid_search takes a list of values, got {type(values).__name__}.")
    if any(isinstance(value, Mapping) for value in values):
        # Tune merges a suggested dictionary into {"grid_search": [...]} instead of replacing it.
        raise SpaceError(f"{_name(path)}: grid_search cannot range over dictionaries here; use tune.choice.")
    return _leaf(Categorical(list(values)), path)


def _leaf(domain: Domain, path: Path) -> Leaf:
    name = _name(path)
    if isinstance(domain, Function):
        raise SpaceError(
            f"{name} is drawn by a function (sample_from), which no search can list or bound: "
            "give it a domain, such as tune.choice([...]) or tune.uniform(low, high)."
        )
    sampler = domain.get_sampler()
    inner = sampler.get_sampler() if isinstance(sampler, Quantized) else sampler
    step = sampler.q if isinstance(sampler, Quantized) else None
    if isinstance(domain, Categorical):
        options = tuple(_option(value, path) for value in domain.categories)
        if not options:
            raise SpaceError(f"{name} has no values to choose from.")
        return Leaf(path, options, lambda rng: options[int(rng.integers(len(options)))])
    if isinstance(inner, Normal):
        raise SpaceError(f"{name} is unbounded (a normal distribution): use tune.uniform with bounds.")
    if not isinstance(domain, (Integer, Float)):
        raise SpaceError(f"{name} has a domain of kind {type(domain).__name__}, which cannot be searched.")
    if not (math.isfinite(domain.lower) and math.isfinite(domain.upper)):
        raise SpaceError(f"{name} is unbounded ({domain.lower} to {domain.upper}): give it finite bounds.")
    if isinstance(inner, LogUniform) and domain.lower <= 0:
        raise SpaceError(f"{name} is on a log scale from {domain.lower}: its lower bound must be above 0.")
    values = _listed(domain, step)
    if values is not None and not values:
        raise SpaceError(f"{name} has no values between {domain.lower} and {domain.upper}.")
    if domain.lower > domain.upper:
        raise SpaceError(f"{name} runs from {domain.lower} up to {domain.upper}, which is empty: swap the bounds.")
    return Leaf(path, values, lambda rng: domain.cast(domain.sample(random_state=rng)))


def _listed(domain: Integer | Float, step: float | None) -> tuple[Any, ...] | None:
    """All values of a bounded number, in order; None for a continuum or for more than `_MOST_VALUES`."""
    if isinstance(domain, Float) and step is None:
        return None
    if step is None or (isinstance(domain, Integer) and step == 1):
        first, last, width = math.ceil(domain.lower), math.ceil(domain.upper) - 1, 1.0  # Tune's upper end is exclusive
    else:
        slack = 1e-9  # bounds are multiples of q up to rounding; with q Tune's upper end is inclusive
        first, last, width = math.ceil(domain.lower / step - slack), math.floor(domain.upper / step + slack), step
    if last - first >= _MOST_VALUES:
        return None
    if isinstance(domain, Integer):
        return tuple(int(index * width) for index in range(first, last + 1))
    return tuple(_rounded(index * width) for index in range(first, last + 1))


def _rounded(value: float) -> float:
    """A multiple of q as one would write it: 3 * 0.1 is 0.3."""
    return float(f"{value:.12g}")


def _option(value: Any, path: Path) -> Any:
    if any(True for _ in _leaves(value, path)):
        raise SpaceError(f"{_name(path)} offers a choice between domains: only plain values can be chosen between.")
    return _plain(value, path)


def _plain(value: Any, path: Path) -> Any:
    name = _name(path)
    if isinstance(value, Domain) or (isinstance(value, Mapping) and set(value) == {"grid_search"}):
        return None
    if _is_placeholder(value):
        raise SpaceError(f"{name} is {_PLACEHOLDERS[value[0]]}: a space holds plain values.")
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise SpaceError(f"{name} is {value}: a space holds finite numbers only.")
        return value
    if isinstance(value, Mapping):
        return {key: _plain(child, (*path, key)) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(child, (*path, index)) for index, child in enumerate(value)]
    kind = "a function" if callable(value) else f"a {type(value).__name__}"
    raise SpaceError(f"{name} is {kind}: a space holds domains and plain values.")


def _is_placeholder(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and value[0] in _PLACEHOLDERS


def _grid(constants: Config, found: Sequence[Leaf]) -> tuple[Config, ...]:
    axes = [leaf.values or () for leaf in found]
    return _unique([_filled(constants, found, values) for values in itertools.product(*axes)])


def _draws(constants: Config, found: Sequence[Leaf], count: int, seed: int) -> tuple[Config, ...]:
    rng = np.random.default_rng(seed)
    chosen: dict[str, Config] = {}
    for _ in range(count * _DRAWS_PER_CANDIDATE):
        if len(chosen) == count:
            break
        config = _filled(constants, found, [leaf.draw(rng) for leaf in found])
        chosen.setdefault(_text(config), config)
    if len(chosen) < count:
        raise SpaceError(
            f"{count} different candidates were asked for, but {count * _DRAWS_PER_CANDIDATE} draws from the space "
            f"gave {len(chosen)}: ask for fewer, or widen the space."
        )
    return tuple(chosen.values())


def _filled(constants: Config, found: Sequence[Leaf], values: Sequence[Any]) -> Config:
    config: Config = json.loads(json.dumps(constants))
    for leaf, value in zip(found, values, strict=True):
        node: Any = config
        for key in leaf.path[:-1]:
            node = node[key]
        node[leaf.path[-1]] = json.loads(json.dumps(value))
    return config


def _unique(configs: Sequence[Config]) -> tuple[Config, ...]:
    return tuple({_text(config): config for config in configs}.values())


def _text(config: Config) -> str:
    return json.dumps(config, sort_keys=True)


def _name(path: Path) -> str:
    return "/".join(str(key) for key in path) or "the space"
