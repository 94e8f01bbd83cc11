"""Turn a validator's errors into sentences: the key's path, what was given, what is allowed, the nearest known name."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from dpray.experiments.reading import describe

_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
    "dict_type": "a mapping of keys",
    "list_type": "a list",
    "finite_number": "a finite number",
}
_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}


def sentences(error: ValidationError, model: type[BaseModel], path: str | None = None) -> tuple[str, ...]:
    """One sentence for each thing wrong, misspelt keys first.

    Args:
        error: what pydantic found.
        model: the model that was being validated.
        path: how to name the place, instead of the error's own path.
    """
    seen: dict[tuple[Any, ...], list[Any]] = {}
    # misspelt keys first: they explain the missing ones
    for detail in sorted(error.errors(include_url=False), key=lambda detail: detail["type"] != "extra_forbidden"):
        place, owner = _locate(detail["loc"], model)
        seen.setdefault(place, []).append((detail, owner))
    return tuple(
        _sentence(path or ".".join(map(str, place)), [detail for detail, _ in found], found[0][1], model)
        for place, found in seen.items()
    )


def unknown(path: str, key: str, known: Sequence[str], what: str = "a key of a recipe") -> str:
    """Sentence that refuses a name and offers the nearest known one."""
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    offer = f"; did you mean `{nearest[0]}`?" if nearest else "."
    return f"`{path}` is not {what}{offer} Known here: {', '.join(sorted(known))}."


def _sentence(path: str, details: list[Any], owner: type[BaseModel], root: type[BaseModel]) -> str:
    detail, kind = details[0], details[0]["type"]
    given = describe(detail["input"])
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    if kind == "extra_forbidden":
        return _unknown_key(path, str(detail["loc"][-1]), owner, root)
    if kind == "union_tag_not_found":
        return f"`{path}.{_tag(detail)}` is missing."
    if kind == "missing":
        return f"`{path}` is missing."
    if kind == "union_tag_invalid":
        what = {"algorithm": "a known algorithm", "name": "a registered name"}[_tag(detail)]
        return unknown(f"{path}.{_tag(detail)}: {detail['ctx']['tag']}", detail["ctx"]["tag"], _tags(detail), what)
    if len(details) > 1:
        return f"`{path}` must be {' or '.join(dict.fromkeys(map(_wanted, details)))}, and {given} was given."
    return f"`{path}` must be {_wanted(detail)}, and {given} was given."


def _wanted(detail: Any) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in _BOUNDS:
        word, name = _BOUNDS[kind]
        return f"{word} {context[name]}"
    if kind == "literal_error":
        return str(context["expected"]).replace("True", "true").replace("'", "`")
    if kind == "string_pattern_mismatch":
        return "a name of letters, digits, dots, dashes and underscores"
    if kind in ("string_too_short", "string_too_long"):
        return "a name of 1 to 100 characters"
    return _WANTED.get(kind, str(detail["msg"]))


def _tag(detail: Any) -> str:
    """The key that chooses between the alternatives of a union."""
    return str(detail["ctx"]["discriminator"]).strip("'")


def _tags(detail: Any) -> list[str]:
    return [tag.strip().strip("'") for tag in str(detail["ctx"]["expected_tags"]).split(",")]


def _unknown_key(path: str, key: str, owner: type[BaseModel], root: type[BaseModel]) -> str:
    here = list(owner.model_fields)
    if difflib.get_close_matches(key, here, n=1, cutoff=0.6):
        return unknown(path, key, here)
    for place, name in _everywhere(root):
        if name == key and place == path:
            return f"`{path}` means nothing to the chosen algorithm; delete it. Known here: {', '.join(sorted(here))}."
        if name == key:
            return f"`{path}` is not a key of a recipe; did you mean `{place}`? Known here: {', '.join(sorted(here))}."
    return unknown(path, key, here)


def _locate(loc: tuple[Any, ...], root: type[BaseModel]) -> tuple[tuple[Any, ...], type[BaseModel]]:
    """Path without the tags pydantic puts in for a union, and the model that owns its last key."""
    model, place = root, list[Any]()
    alternatives: tuple[type[BaseModel], ...] = ()
    tag, one_of_several = "", False
    for index, part in enumerate(loc):
        if one_of_several:  # this part says which of them was tried
            one_of_several = False
            continue
        if alternatives:  # this part is the tag that chose one of them
            model = next(option for option in alternatives if part in get_args(option.model_fields[tag].annotation))
            alternatives = ()
            continue
        place.append(part)
        inner, one_of_several = _sections(model, part), _plain_union(model, part)
        if len(inner) > 1:
            alternatives, tag = inner, str(model.model_fields[part].discriminator)
        elif inner and index < len(loc) - 1:
            model = inner[0]
    return tuple(place), model


def _sections(model: type[BaseModel], key: Any) -> tuple[type[BaseModel], ...]:
    """Models a field's value may be: none for a plain value, several for a tagged union."""
    field = model.model_fields.get(key) if isinstance(key, str) else None
    if field is None:
        return ()
    options = get_args(field.annotation) or (field.annotation,)
    return tuple(option for option in options if isinstance(option, type) and issubclass(option, BaseModel))


def _plain_union(model: type[BaseModel], key: Any) -> bool:
    """Whether a field takes values of several kinds, none of them a section."""
    field = model.model_fields.get(key) if isinstance(key, str) else None
    if field is None or get_origin(field.annotation) not in (Union, UnionType):
        return False
    return not _sections(model, key) and sum(kind is not NoneType for kind in get_args(field.annotation)) > 1


def _everywhere(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """All keys of a recipe with their paths."""
    for key in model.model_fields:
        yield prefix + key, key
        for section in _sections(model, key):
            yield from _everywhere(section, f"{prefix}{key}.")
