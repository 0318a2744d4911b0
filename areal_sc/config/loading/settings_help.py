"""What `--help` says of every setting: its default, what it may be, and what it means."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field
from inspect import cleandoc
from typing import Any

from omegaconf import MISSING

from areal_sc.config.fields import MEANING, RANGE, is_choice, is_section, schema_fields
from areal_sc.config.loading.explain import expected

_INDENT = 6
_UNITS = {"_s": "seconds", "_minutes": "minutes", "_bytes": "bytes"}
"""What a number is counted in, by the end of its name; other units stand in the meaning."""


def settings_help(schema: type[Any], width: int) -> str:
    """All settings of a schema: its own first, then those of each section under its meaning.

    Args:
        width: characters of a line; longer words are not broken.
    """
    settings: dict[str, list[str]] = {"": []}  # of each section
    for path, found, annotation in schema_fields(schema):
        meaning = meaning_of(found, annotation)
        if not is_section(annotation):
            settings[path.rpartition(".")[0]] += _setting(path, found, annotation, meaning, width)
        elif found.default is NO_DEFAULT:  # those of a shared section are shown where they are
            settings[path] = ["", *_wrapped(f"{path}: {meaning}".rstrip(": "), width, "")]
    return "\n".join(line for lines in settings.values() for line in lines) + "\n"


def _setting(
    path: str, found: Field[Any], annotation: Any, meaning: str, width: int
) -> Iterator[str]:
    default = _default(found)
    is_short = len(path) + len(default) + 3 <= width
    yield from [f"  {path}={default}"] if is_short else [f"  {path}=", " " * _INDENT + default]
    first, *choices = meaning.splitlines() or [""]
    unit = next((unit for end, unit in _UNITS.items() if path.endswith(end)), None)
    parts = [expected(annotation), unit and f"in {unit}", found.metadata.get(RANGE)]
    allowed = ", ".join(str(part) for part in parts if part)
    yield from _wrapped(f"{first.removesuffix('.')} ({allowed})".lstrip(), width, " " * _INDENT)
    for choice in filter(None, choices):
        yield from _wrapped(choice, width, " " * (_INDENT + 2))


def meaning_of(found: Field[Any], annotation: Any) -> str:
    """The meaning that the field gives, else that of its type; '' when neither does."""
    given = str(found.metadata.get(MEANING, ""))
    if given:
        return given
    document = cleandoc(annotation.__doc__ or "")
    if is_choice(annotation):
        return document
    if not is_section(annotation) or document.startswith(f"{annotation.__name__}("):
        return ""  # the second: `dataclass` made the docstring, for want of one
    return document.partition("\n")[0]


def _default(found: Field[Any]) -> str:
    value = found.default
    if found.default_factory is not NO_DEFAULT:
        value = found.default_factory()
    if value == MISSING:
        return "(required)"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
