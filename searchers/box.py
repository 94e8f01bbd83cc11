"""The box a local search moves in: between a Ray Tune space of floats and points of ℝᵈ.

| symbol | meaning                                                           | shape |
|--------|-------------------------------------------------------------------|-------|
| d      | searched keys, in order of appearance                             |       |
| θ      | point of the box: the value of `uniform`, its natural log for `loguniform` | (d,) |

A local search follows gradients, so every searched key is a float between two bounds; whole numbers, choices and grids
are refused by name. Errors name a key by its path, `optimizer/lr`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from ray.tune.search.sample import Categorical, Domain, Float, Integer, LogUniform, Quantized

from dpray.searchers import space as spaces
from dpray.searchers.batch import Config
from dpray.searchers.errors import SpaceError

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Box:
    """A box in ℝᵈ and the configurations its points stand for; public.

    Attributes:
        names: paths of the searched keys, (d,).
        lower, upper: bounds in the coordinates of θ, (d,) float64, lower < upper.
        logarithmic: which coordinates are natural logs of their value, (d,) bool.
    """

    names: tuple[str, ...]
    lower: FloatArray
    upper: FloatArray
    logarithmic: NDArray[np.bool_]
    _paths: tuple[spaces.Path, ...]
    _ranges: tuple[tuple[float, float], ...]
    _constants: Config

    @classmethod
    def of(cls, space: Mapping[str, Any]) -> Box:
        """The box of a Tune space.

        Raises:
            SpaceError: nothing to search; a key is a whole number, a choice, a grid, quantised, unbounded or computed.
        """
        constants, found = spaces.plain(space), spaces.leaves(space)
        if not found:
            raise SpaceError(
                "There is nothing to search: the space holds constants only. Give at least one key a range, "
                "tune.uniform(low, high) or tune.loguniform(low, high)."
            )
        domains = [_continuous(leaf.name, _at(space, leaf.path)) for leaf in found]
        logarithmic = np.array([isinstance(domain.get_sampler(), LogUniform) for domain in domains])
        bounds = np.array([[domain.lower, domain.upper] for domain in domains], dtype=np.float64)
        bounds[logarithmic] = np.log(bounds[logarithmic])
        paths = tuple(leaf.path for leaf in found)
        names = tuple(leaf.name for leaf in found)
        ranges = tuple((float(domain.lower), float(domain.upper)) for domain in domains)
        return cls(names, bounds[:, 0].copy(), bounds[:, 1].copy(), logarithmic, paths, ranges, constants)

    @property
    def dimension(self) -> int:
        """d."""
        return len(self.names)

    @property
    def center(self) -> FloatArray:
        """The middle of the box, (d,)."""
        return np.asarray((self.lower + self.upper) / 2, dtype=np.float64)

    def project(self, theta: ArrayLike) -> FloatArray:
        """The nearest point of the box; (…, d) → (…, d)."""
        return np.asarray(np.clip(np.asarray(theta, dtype=np.float64), self.lower, self.upper), dtype=np.float64)

    def config(self, theta: ArrayLike) -> Config:
        """The configuration a point stands for, constants included, within the bounds of the space."""
        point = self.project(theta)
        config: Config = json.loads(json.dumps(self._constants))
        for j, path in enumerate(self._paths):
            node: Any = config
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = self._value(j, float(point[j]))
        return config

    def _value(self, j: int, coordinate: float) -> float:
        if not self.logarithmic[j]:
            return coordinate
        low, high = self._ranges[j]
        return min(max(math.exp(coordinate), low), high)

    def theta(self, config: Mapping[str, Any]) -> FloatArray:
        """The point of a configuration, (d,).

        Raises:
            SpaceError: a searched key is missing, not a finite number, or outside its bounds.
        """
        found = np.empty(self.dimension)
        for j, (name, path) in enumerate(zip(self.names, self._paths, strict=True)):
            try:
                value = _at(config, path)
            except (KeyError, IndexError, TypeError):
                raise SpaceError(f"The starting point has no {name}: give every searched key a value.") from None
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise SpaceError(f"The starting point has {name} = {value!r}: give a finite number.")
            inside = value > 0 if self.logarithmic[j] else True
            found[j] = math.log(value) if self.logarithmic[j] and inside else value
            slack = 1e-12 * max(1.0, abs(self.lower[j]), abs(self.upper[j]))
            if not inside or not self.lower[j] - slack <= found[j] <= self.upper[j] + slack:
                raise SpaceError(f"The starting point has {name} = {value!r}, outside its range in the space.")
        return self.project(found)

    def per_dimension(self, what: str, given: float | Mapping[str, float]) -> FloatArray:
        """A positive number for every coordinate, given once or by name; (d,).

        Raises:
            ValueError: a number is not finite and positive, a name is unknown or missing.
        """
        if isinstance(given, Mapping):
            odd = sorted(set(given) ^ set(self.names))
            if odd:
                raise ValueError(f"{what} must name every searched key ({', '.join(self.names)}); see {odd[0]}.")
            values = [given[name] for name in self.names]
        else:
            values = [given] * self.dimension
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{what} must be finite and above 0, and {value!r} was given.")
        return np.array(values, dtype=np.float64)

    def describe(self) -> dict[str, Any]:
        """Plain JSON, as the space gave it: part of a release's public request and of saved state."""
        return {
            "names": list(self.names),
            "ranges": [list(bounds) for bounds in self._ranges],
            "logarithmic": self.logarithmic.tolist(),
            "constants": self._constants,
        }


def _at(node: Any, path: spaces.Path) -> Any:
    for key in path:
        node = node[key]
    return node


def _continuous(name: str, domain: Any) -> Float:
    advice = "A search that follows gradients needs tune.uniform(low, high) or tune.loguniform(low, high) there."
    if not isinstance(domain, Domain):
        raise SpaceError(f"{name} is a grid_search. {advice}")
    if isinstance(domain, Categorical):
        raise SpaceError(f"{name} is a choice between listed values. {advice}")
    if isinstance(domain, Integer):
        raise SpaceError(f"{name} is a whole number. {advice}")
    if not isinstance(domain, Float) or isinstance(domain.get_sampler(), Quantized):
        raise SpaceError(f"{name} is quantised or of another kind ({domain}). {advice}")
    if not domain.lower < domain.upper:
        raise SpaceError(f"{name} runs from {domain.lower} to {domain.upper}, which leaves nothing to search.")
    return domain
