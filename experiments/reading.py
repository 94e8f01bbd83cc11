"""Read a recipe's YAML: safe types only, no surprises, every objection a sentence.

PyYAML follows YAML 1.1, where `1e-5` is text, `no` is false, `010` is eight and `1:30` is ninety. Budgets stand here,
so plain scalars are resolved by the core schema of YAML 1.2 instead, and a key given twice is refused, not overwritten.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any, ClassVar

import yaml


class RecipeError(Exception):
    """A recipe that cannot be run. `problems` holds one sentence each: the key, what was given, what is allowed."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class _CoreSchemaLoader(yaml.SafeLoader):
    """SafeLoader with the scalar rules of YAML 1.2; a duplicate key is an error."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}  # type: ignore[misc]

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Hashable, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise RecipeError(f"Line {line}: a key must be text, and {key!r} was given.")
            if key in seen:
                raise RecipeError(f"Line {line}: the key `{key}` is given twice (first on line {seen[key]}); keep one.")
            seen[key] = line
        return super().construct_mapping(node, deep=deep)


_SCALARS: tuple[tuple[str, str, str], ...] = (
    ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("tag:yaml.org,2002:int", r"^[-+]?(?:0|[1-9][0-9]*)$", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+0123456789.",
    ),
)


class _CoreSchemaDumper(yaml.SafeDumper):
    """Writes what `read_yaml` reads back unchanged: text that would look like a number or a truth value is quoted."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}  # type: ignore[misc]


for _tag, _pattern, _first in _SCALARS:
    for _class in (_CoreSchemaLoader, _CoreSchemaDumper):
        _class.add_implicit_resolver(_tag, re.compile(_pattern), ["" if c == "\0" else c for c in _first])


def read_yaml(text: str, name: str = "The recipe") -> dict[str, Any]:
    """Parse YAML text into a mapping of plain values (text, numbers, booleans, lists, mappings).

    Args:
        text: the document.
        name: how to call it in an error.

    Raises:
        RecipeError: not YAML, several documents, an object tag, a duplicate key, or no mapping at the top.
    """
    try:
        document = yaml.load(text, Loader=_CoreSchemaLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        why = getattr(error, "problem", None) or str(error)
        raise RecipeError(f"{name} is not plain YAML:{where}: {why}.") from None
    if not isinstance(document, dict):
        given = "nothing" if document is None else f"{describe(document)}"
        raise RecipeError(
            f"{name} must be a mapping of keys such as `population:` and `budget:`, and {given} was given."
        )
    return document


def write_yaml(document: dict[str, Any]) -> str:
    """Write a mapping of plain values so that `read_yaml` gives it back, keys in their order."""
    return yaml.dump(document, Dumper=_CoreSchemaDumper, sort_keys=False, allow_unicode=True)


def describe(value: Any) -> str:
    """Say a YAML value the way its author wrote it, with its kind: "'six' (text)"."""
    match value:
        case None:
            return "nothing (null)"
        case bool():
            return f"{str(value).lower()} (a truth value)"
        case int():
            return f"{value} (a whole number)"
        case float():
            return f"{value!r} (a number)"
        case str():
            shown = value if len(value) <= 60 else value[:57] + "..."
            return f"{shown!r} (text)"
        case list() | tuple():
            return "a list"
        case dict():
            return "a mapping"
        case _:
            return f"{value!r}"
