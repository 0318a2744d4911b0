"""Settings that several sections share: set once in a run's settings, real in a section alone.

A section by itself, `ActorConfig(path=...)`, has a value for each of its settings. As a part of a
run's settings it takes those that it shares, and was not given, from where they are set.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import copy
from dataclasses import field, fields, is_dataclass
from typing import Any, get_type_hints

from areal_sc.config.keys import is_section, value_at

_TEMPLATE_OF = "template"
_ALONE = "alone"
_TEMPLATE = re.compile(r"\$\{([\w.]+)\}(.*)")


def shared(template: str, alone: Callable[[], Any]) -> Any:
    """A field of a section that is taken from another setting, unless it is given.

    Args:
        template: `${key}` of a run's settings, after which further text may stand.
        alone: makes the value that the field has in a section by itself.
    """
    return field(default=template, metadata={_TEMPLATE_OF: template, _ALONE: alone})


class Section:
    """Base of dataclasses with `shared` fields."""

    def __post_init__(self) -> None:
        self._taken: dict[str, str] = {}
        for setting in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            template = setting.metadata.get(_TEMPLATE_OF)
            if template is not None and getattr(self, setting.name) == template:
                self._taken[setting.name] = template
                setattr(self, setting.name, setting.metadata[_ALONE]())

    def joined(self, run: Any) -> Any:
        """A copy whose shared settings that were not given have the values of the run's."""
        section = copy(self)
        for setting in fields(self):  # type: ignore[arg-type]
            value = getattr(self, setting.name)
            if setting.name in self._taken:
                key, text = _parts(self._taken[setting.name])
                value = value_at(run, key)
                value = f"{value}{text}" if text else value
            if isinstance(value, Section):
                value = value.joined(run)
            setattr(section, setting.name, value)
        return section


def join_sections(run: Any) -> None:
    """Gives the sections of a run's settings, a dataclass instance, what they share."""
    for setting in fields(run):
        value = getattr(run, setting.name)
        if isinstance(value, Section):
            setattr(run, setting.name, value.joined(run))


def shared_settings(schema: type[Any], prefix: str = "") -> dict[str, str]:
    """Dotted path of each shared setting of a schema -> where it is taken from, as `${key}`."""
    found: dict[str, str] = {}
    annotations = get_type_hints(schema)
    for setting in fields(schema):
        path = prefix + setting.name
        if _TEMPLATE_OF in setting.metadata:
            found[path] = setting.metadata[_TEMPLATE_OF]
        elif is_section(annotations[setting.name]):
            found |= shared_settings(annotations[setting.name], f"{path}.")
    return found


def differing_sections(run: Any) -> list[tuple[str, str]]:
    """Sections that differ from those they share, as only settings built in Python can: (key, key).

    Scalars may differ: they can be set in both places.
    """
    pairs = [(path, _parts(text)[0]) for path, text in shared_settings(type(run)).items()]
    return [
        (path, key)
        for path, key in pairs
        if is_dataclass(value_at(run, key)) and value_at(run, path) != value_at(run, key)
    ]


def _parts(template: str) -> tuple[str, str]:
    """The key of a template, and the text after it."""
    matched = _TEMPLATE.fullmatch(template)
    assert matched is not None, template
    return matched[1], matched[2]
