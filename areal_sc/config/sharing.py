"""Settings that several sections share: set once in a run's settings, real in a section alone.

A section by itself, `ActorConfig(path=...)`, has a value for each of its settings. As a part of a
run's settings it takes those that it shares, and was not given, from where they are set.
"""

from __future__ import annotations

import re
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from areal_sc.config.fields import ALONE, TEMPLATE, is_section, shared_settings, value_at
from areal_sc.errors import ConfigError

_TEMPLATE = re.compile(r"\$\{([\w.]+)\}(.*)")


class Section:
    """Base of dataclasses with `shared` fields."""

    def __post_init__(self) -> None:
        self._taken: dict[str, str] = {}
        for setting in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            template = setting.metadata.get(TEMPLATE)
            if template is not None and getattr(self, setting.name) == template:
                self._taken[setting.name] = template
                alone = setting.metadata[ALONE]
                setattr(self, setting.name, alone() if callable(alone) else alone)

    def joined(self, run: Any) -> Any:
        """A copy whose shared settings that were not given have the values of the run's."""
        section = copy(self)
        for setting in fields(self):  # type: ignore[arg-type]
            value = getattr(self, setting.name)
            if setting.name in self._taken:
                value = taken_from(run, self._taken[setting.name])
            if isinstance(value, Section):
                value = value.joined(run)
            setattr(section, setting.name, value)
        return section


def taken_from(run: Any, template: str) -> Any:
    """The value of a shared setting that is not given.

    Args: template: as of `shared`.
    """
    key, text = _parts(template)
    value = value_at(run, key)
    return f"{value}{text}" if text else value


def join_sections(run: Any) -> None:
    """Gives the sections of a run's settings, a dataclass instance, what they share.

    Raises: ConfigError: something else stands in the place of a section.
    """
    for name, annotation in get_type_hints(type(run)).items():
        value = getattr(run, name)
        if is_section(annotation) and not isinstance(value, annotation):
            raise ConfigError(
                f"{name}: expected an {annotation.__name__}, got a {type(value).__name__}; "
                "load_config takes settings as a mapping"
            )
    for setting in fields(run):
        value = getattr(run, setting.name)
        if isinstance(value, Section):
            setattr(run, setting.name, value.joined(run))


def differing_sections(run: Any) -> list[tuple[str, str]]:
    """Sections that differ from those they share, as only settings built in Python can: (key, key).

    Scalars may differ: they can be set in both places.
    """
    settings = shared_settings(type(run), may_differ=False)
    pairs = [(path, _parts(text)[0]) for path, text in settings.items()]
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
