"""The settings of a schema by their dotted path: which exist, of what type, and which is meant."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import reduce
from typing import Any, Union, get_args, get_origin, get_type_hints

MIN_SIMILARITY = 0.6
"""Least `difflib` ratio of a key that is suggested; below it suggestions read as random."""

MAX_SUGGESTIONS = 3

_TYPE_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
}


def known_keys(schema: type[Any], prefix: str = "") -> dict[str, Any]:
    """Every setting and section of a dataclass: dotted path -> annotated type, parents first.

    A section that takes the value of another one by `${...}` is listed, its settings are not:
    they have one place to be set.
    """
    keys: dict[str, Any] = {}
    annotations = get_type_hints(schema)
    for field in fields(schema):
        path = prefix + field.name
        annotation = annotations[field.name]
        keys[path] = annotation
        if is_section(annotation) and not isinstance(field.default, str):
            keys |= known_keys(annotation, f"{path}.")
    return keys


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and is_dataclass(annotation)


def is_choice(annotation: Any) -> bool:
    """Whether the setting is one of a few words."""
    return isinstance(annotation, type) and issubclass(annotation, Enum)


def is_free_form(key: str, keys: Mapping[str, Any]) -> bool:
    """Whether `key` lies in a mapping whose keys the schema does not name, such as `task`."""
    parts = key.split(".")
    parents = (".".join(parts[:length]) for length in range(1, len(parts)))
    return any(get_origin(keys.get(parent)) is dict for parent in parents)


def value_at(config: Any, key: str) -> Any:
    """The value of a setting in a dataclass instance."""
    return reduce(getattr, key.split("."), config)


def nearest_keys(key: str, keys: Iterable[str]) -> list[str]:
    """The known keys that `key` may have meant, best first; [] when nothing is close.

    Names are compared without their section, so a setting in the wrong section is found; the
    section decides the order of settings that share a name.
    """
    name = _name(key)
    scores = {path: _similarity(name, _name(path)) for path in keys if path != key}
    best = max(scores.values(), default=0.0)
    if best < MIN_SIMILARITY:
        return []
    closest = [path for path, score in scores.items() if score == best]
    return sorted(closest, key=lambda path: -_similarity(key, path))[:MAX_SUGGESTIONS]


def expected(annotation: Any) -> str:
    """What a setting of this type may be, for an error message."""
    if annotation in _TYPE_NAMES:
        return _TYPE_NAMES[annotation]
    if is_choice(annotation):
        return "one of " + ", ".join(annotation.__members__)
    if is_section(annotation):
        names = ", ".join(field.name for field in fields(annotation))
        return f"a section with the keys {names}"
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is list:
        return f"a list, each element {expected(arguments[0])}"
    if origin is dict:
        return "a mapping"
    if origin in (types.UnionType, Union):
        return " or ".join("null" if arm is type(None) else expected(arm) for arm in arguments)
    return str(annotation)


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def _similarity(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()
