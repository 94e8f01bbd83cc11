"""A search space as a recipe writes it: one line a setting, turned into Ray Tune's own domains.

| recipe | Tune | meaning |
|---|---|---|
| `{grid: [a, b]}` | `grid_search` | every listed value |
| `{choice: [a, b]}` | `choice` | one of the listed values |
| `{uniform: [low, high]}` | `uniform` | evenly in [low, high) |
| `{loguniform: [low, high]}` | `loguniform` | evenly in log, 0 < low |
| `{randint: [low, high]}` | `randint` | whole number, low ≤ x < high |
| `value` | the value | fixed |
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpray.experiments.reading import describe

LISTED = ("grid", "choice")
RANGES = ("uniform", "loguniform", "randint")
_EXAMPLES = {
    "grid": "{grid: [0.1, 1.0]}",
    "choice": "{choice: [0.1, 1.0]}",
    "uniform": "{uniform: [0.0, 1.0]}",
    "loguniform": "{loguniform: [0.001, 1.0]}",
    "randint": "{randint: [1, 10]}",
}


@dataclass(frozen=True)
class Domain:
    """What one setting may be. `arguments` are the listed values, or (low, high) of a range."""

    kind: str
    arguments: tuple[Any, ...]

    @property
    def size(self) -> int | None:
        """Number of different values; None for a continuous range."""
        match self.kind:
            case "grid" | "choice":
                return len(self.arguments)
            case "randint":
                return int(self.arguments[1] - self.arguments[0])
            case _:
                return None

    @property
    def extremes(self) -> tuple[Any, ...]:
        """Values that bound what the setting can become: all listed ones, or the ends of the range."""
        if self.kind == "randint":
            return (self.arguments[0], self.arguments[1] - 1)
        return self.arguments

    def to_tune(self) -> Any:
        """The same domain as Ray Tune's object (imports Ray)."""
        from ray import tune

        if self.kind == "grid":
            return tune.grid_search(list(self.arguments))
        if self.kind == "choice":
            return tune.choice(list(self.arguments))
        return getattr(tune, self.kind)(*self.arguments)

    def written(self) -> dict[str, list[Any]]:
        """As a recipe writes it."""
        return {self.kind: list(self.arguments)}


Setting = Domain | bool | int | float | str


def parse_setting(key: str, value: Any) -> Setting:
    """Read one entry of a space.

    Raises:
        ValueError: with a sentence that names the key.
    """
    if isinstance(value, bool | int | float | str):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(
            f"`{key}` must be a fixed value or a domain such as {_EXAMPLES['grid']}, and {describe(value)} was given."
        )
    if len(value) != 1 or next(iter(value)) not in _EXAMPLES:
        nearest = difflib.get_close_matches(str(next(iter(value), "")), _EXAMPLES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"`{key}` must be one domain, and {dict(value)!r} was given; did you mean `{nearest}`, as in "
            f"{_EXAMPLES[nearest]}? Known: {', '.join(_EXAMPLES)}."
        )
    kind, given = next(iter(value.items()))
    if not isinstance(given, list):
        raise ValueError(f"`{key}.{kind}` must be a list, as in {_EXAMPLES[kind]}, and {describe(given)} was given.")
    return Domain(kind, _listed(key, given)) if kind in LISTED else Domain(kind, _range(key, kind, given))


def _listed(key: str, given: list[Any]) -> tuple[Any, ...]:
    if not given:
        raise ValueError(f"`{key}` lists no values; give at least one.")
    for value in given:
        if not isinstance(value, bool | int | float | str) or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(
                f"`{key}` may list finite numbers, truth values and text, and {describe(value)} was given."
            )
    kinds = [(type(value), value) for value in given]
    if len(set(kinds)) < len(kinds):
        raise ValueError(
            f"`{key}` lists a value twice: {given}; every candidate takes votes from its twin, so list each once."
        )
    return tuple(given)


def _range(key: str, kind: str, given: list[Any]) -> tuple[Any, ...]:
    allowed = int if kind == "randint" else int | float
    numbers = [value for value in given if isinstance(value, allowed) and not isinstance(value, bool)]
    if len(given) != 2 or len(numbers) != 2 or not all(math.isfinite(value) for value in numbers):
        what = "whole numbers" if kind == "randint" else "finite numbers"
        raise ValueError(f"`{key}.{kind}` must be two {what}, [low, high], and {given!r} was given.")
    low, high = numbers
    if low >= high:
        raise ValueError(f"`{key}.{kind}` must have low < high, and [{low}, {high}] was given.")
    if kind == "loguniform" and low <= 0:
        raise ValueError(f"`{key}.loguniform` must start above 0, and {low} was given.")
    return (low, high)


def count(space: Mapping[str, Setting]) -> int | None:
    """Number of points in a space; None when a range is continuous."""
    sizes = [setting.size if isinstance(setting, Domain) else 1 for setting in space.values()]
    return None if None in sizes else math.prod(size for size in sizes if size is not None)
