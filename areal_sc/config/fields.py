"""A setting's default, meaning and range, all in its line of the schema, and how they are found.

    max_staleness: int = setting(4, "staleness bound eta; 0 is synchronous", ge=0)

`--help` shows the meaning, `check_ranges` holds the range. A section is a dataclass among the
settings; its meaning is the first line of its docstring, as a choice's is its enum's docstring.

Several sections share settings, which are set once in a run's settings. A section by itself,
`ActorConfig(path=...)`, has a value for each of its settings. As a part of a run's settings it
takes those that it shares, and was not given, from where they are set.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import Field, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache, reduce
from typing import Any, get_origin, get_type_hints

from areal_sc.errors import ConfigError

MEANING = "meaning"
RANGE = "range"
IDLE = "idle"
TEMPLATE = "template"
ALONE = "alone"
MAY_DIFFER = "may differ"
IN_CODE = "in code"

_annotations = cache(get_type_hints)
"""Of a schema, which evaluates each one's text: they are asked for often while settings load."""

MAX_BITS = 63
"""Most bits of an integer, its sign aside: workers get no larger ones, nor does torch take them."""


@dataclass(frozen=True)
class Range:
    """Finite numbers that are at least `ge`, above `gt`, at most `le` and below `lt`.

    Attributes:
        infinite: infinity is allowed too.
    """

    ge: float = -math.inf
    gt: float = -math.inf
    le: float = math.inf
    lt: float = math.inf
    infinite: bool = False

    def __contains__(self, value: float) -> bool:
        is_below = value < self.lt or (self.infinite and value == math.inf)
        return self.ge <= value <= self.le and value > self.gt and is_below

    def __str__(self) -> str:
        bounds = {"at least": self.ge, "above": self.gt, "at most": self.le, "below": self.lt}
        text = " and ".join(f"{word} {end}" for word, end in bounds.items() if math.isfinite(end))
        return f"{text}, or inf" if self.infinite else text


def setting(default: Any, meaning: str = "", *, idle: tuple[str, ...] = (), **bounds: Any) -> Any:
    """A field of the schema.

    Args:
        default: the value; or what makes it: `list`, `dict`, a section's class.
        meaning: unit and meaning, for `--help`; a section and a choice may leave it to their type.
        idle: conditions under each of which nothing reads it; `preflight.idle_settings` says how
            they are written.
        bounds: those of `Range`, for a number.
    """
    metadata = {MEANING: meaning, IDLE: idle} | ({RANGE: Range(**bounds)} if bounds else {})
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def shared(template: str, alone: Any, meaning: str = "", **bounds: Any) -> Any:
    """A field that has the value of a setting elsewhere, and no place of its own in a run's YAML.

    Args:
        template: `${key}` of a run's settings, after which further text may stand.
        alone: the value that the field has in a section by itself; or what makes it.
    """
    metadata = setting(template, meaning, **bounds).metadata | {TEMPLATE: template, ALONE: alone}
    return field(default=template, metadata=metadata)


def apart(template: str, alone: Any, meaning: str = "", **bounds: Any) -> Any:
    """A `setting` that has the value of another one, unless it is given; arguments as `shared`."""
    metadata = shared(template, alone, meaning, **bounds).metadata | {MAY_DIFFER: True}
    return field(default=template, metadata=metadata)


def in_code(default: Any) -> Any:
    """A field of a section that is no setting: whoever builds the section in Python gives it."""
    return field(default=default, metadata={IN_CODE: True})


def schema_fields(
    schema: type[Any], prefix: str = "", *, also_shared: bool = False, also_without: bool = False
) -> Iterator[tuple[str, Field[Any], Any]]:
    """Every setting and section of a dataclass: dotted path, field, annotated type; parents first.

    Args:
        also_shared: also the settings within a section that is `apart`.
        also_without: also fields without a place in a run's YAML.
    """
    annotations = _annotations(schema)  # type: ignore[arg-type]  # a class can be hashed
    for found in fields(schema):
        path = prefix + found.name
        annotation = annotations[found.name]
        if not (also_without or has_place(found)):
            continue
        yield path, found, annotation
        is_within = TEMPLATE not in found.metadata or (also_shared and has_place(found))
        if is_section(annotation) and is_within:
            yield from schema_fields(
                annotation, f"{path}.", also_shared=also_shared, also_without=also_without
            )


def has_place(found: Field[Any]) -> bool:
    """Whether a run's YAML can have a field of a section."""
    is_elsewhere = TEMPLATE in found.metadata and MAY_DIFFER not in found.metadata
    return not is_elsewhere and IN_CODE not in found.metadata


def known_keys(schema: type[Any], *, also_shared: bool = False) -> dict[str, Any]:
    """Dotted path of every setting and section, as `schema_fields` -> its annotated type."""
    found = schema_fields(schema, also_shared=also_shared)
    return {path: annotation for path, _, annotation in found}


def shared_settings(schema: type[Any], *, may_differ: bool = True) -> dict[str, str]:
    """Dotted path of each shared field -> where it is taken from, as `${key}`.

    Args:
        may_differ: also those that are `apart`.
    """
    return {
        path: found.metadata[TEMPLATE]
        for path, found, _ in schema_fields(schema, also_without=True)
        if TEMPLATE in found.metadata and (may_differ or not has_place(found))
    }


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


def check_ranges(config: Any) -> None:
    """Checks each number of a run's settings by itself.

    Raises: ConfigError: names the setting, its value, and what is allowed.
    """
    for key, found, _ in schema_fields(type(config)):
        value = value_at(config, key)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and number.bit_length() > MAX_BITS:
                raise ConfigError(
                    f"{key}: expected an integer below 2^{MAX_BITS}, got one of "
                    f"{number.bit_length()} bits"
                )
        allowed = found.metadata.get(RANGE)
        if allowed is None or (value is None and "None" in str(found.type)):
            continue
        if not isinstance(value, int | float):  # only settings built in Python have other types
            raise ConfigError(f"{key}: expected a number, got {value!r}")
        if value not in allowed:
            kind = "an integer" if isinstance(value, int) else "a number"
            kind = "a finite number" if math.isinf(value) else kind
            raise ConfigError(f"{key}: expected {kind} {allowed}, got {value}")


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
                "(after a change of it call areal_sc.config.fields.join_sections)"
            )


def _parts(template: str) -> tuple[str, str]:
    """The key of a template, and the text after it."""
    matched = _TEMPLATE.fullmatch(template)
    assert matched is not None, template
    return matched[1], matched[2]
