"""Settings that several sections share: set once in a run's settings, real in a section alone.

A section by itself, `ActorConfig(path=...)`, has a value for each of its settings. As a part of a
run's settings it takes those that it shares, and was not given, from where they are set.
"""

from __future__ import annotations

import re
from copy import copy
from dataclasses import fields
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

    Args: template: what `shared` was given.
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


def take_shared(run: Any) -> None:
    """Marks shared fields of settings that were read as taken: `join_sections` sets them anew."""
    for path, template in shared_settings(type(run), may_differ=False).items():
        section, _, name = path.rpartition(".")
        value_at(run, section)._taken[name] = template


def check_shared(run: Any) -> None:
    """Checks that shared fields have the values of the settings that they are taken from.

    Raises: ConfigError: one differs, as only in settings that were built or changed in Python.
    """
    for path, template in shared_settings(type(run), may_differ=False).items():
        if value_at(run, path) != taken_from(run, template):
            key, _ = _parts(template)
            raise ConfigError(
                f"{path}: differs from {key}, which it has to be; set {key}, and leave {path} out "
                "(after a change of it call areal_sc.config.sharing.join_sections)"
            )


def _parts(template: str) -> tuple[str, str]:
    """The key of a template, and the text after it."""
    matched = _TEMPLATE.fullmatch(template)
    assert matched is not None, template
    return matched[1], matched[2]
