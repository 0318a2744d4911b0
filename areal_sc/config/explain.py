"""One readable sentence for each way in which hydra and OmegaConf refuse a configuration."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    GrammarParseError,
    InterpolationKeyError,
    InterpolationResolutionError,
    InterpolationToMissingValueError,
    InterpolationValidationError,
    OmegaConfBaseException,
    ValidationError,
)

from areal_sc.config.fields import is_section
from areal_sc.errors import ConfigError

MIN_SIMILARITY = 0.6
"""Least `difflib` ratio of a key that is suggested; below it suggestions read as random."""

MAX_SUGGESTIONS = 3

_TYPE_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
}

_NOT_FOUND = object()
_RENAMED = {"actor.num_workers": "actor.parallel.data"}


def unknown_key(where: str, key: str, keys: Mapping[str, Any]) -> ConfigError:
    """An error that names the key and the one that may have been meant."""
    if is_free_form(key, keys):
        return ConfigError(
            f"{where}: {key} is not in the YAML's own {key.partition('.')[0]!r} section; "
            f"check its spelling, or add it by +{key}=..."
        )
    nearest = nearest_keys(key, keys)
    if key in _RENAMED:
        advice = f"it is called {_RENAMED[key]} now"
    elif nearest:
        advice = f"did you mean {' or '.join(nearest)}?"
    else:
        section = key.rpartition(".")[0]
        siblings = [known for known in keys if known.rpartition(".")[0] == section]
        advice = f"{section or 'the top level'} has {', '.join(siblings)}"
    return ConfigError(f"{where}: unknown setting {key}; {advice}")


def broken_yaml(error: yaml.YAMLError | UnicodeDecodeError, path: Path) -> ConfigError:
    """An error that says where the file stops being YAML."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        file = mark.name if Path(mark.name).is_absolute() else path
        return ConfigError(
            f"{file}, line {mark.line + 1}, column {mark.column + 1}: not valid YAML: "
            f"{error.problem}"
        )
    return ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}")


def refused_composition(
    error: Exception, config_path: Path, overrides: Sequence[Override], keys: Mapping[str, Any]
) -> ConfigError:
    """What went wrong while files and overrides were put together."""
    if isinstance(error, yaml.YAMLError | UnicodeDecodeError):
        return broken_yaml(error, config_path)
    message = str(error)
    named = re.match(r"In '([^']+)': ", message)
    file = config_path.parent / f"{named[1]}.yaml" if named else None
    if isinstance(error, MissingConfigException):
        missing = re.search(r"Could not (?:load|find) '([^']+)'", message)
        name = missing[1] if missing else error.missing_cfg_file
        return ConfigError(
            f"{file or config_path}: its defaults list names {name!r}, but there is no "
            f"{config_path.parent / f'{name}.yaml'}"
        )
    cause = next((e for e in _chain(error) if isinstance(e, OmegaConfBaseException)), None)
    if cause is None:
        return ConfigError(f"{file or config_path}: {_first_line(error)}")
    key = str(cause.full_key or "")
    override = None if file else _override_of(key, overrides)
    source = f"override {override.input_line}" if override else str(file or config_path)
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        # an override's unknown section is reported as such; its whole key says what was meant
        return unknown_key(source, override.key_or_group if override else key, keys)
    if isinstance(cause, GrammarParseError):
        return ConfigError(f"{source}: {key}: not a valid ${{...}}: {_first_line(cause)}")
    if not key and file is not None:
        key = _section_without_keys(file, keys)
    annotation = keys.get(key.partition("[")[0])
    value = _given_value(key, file, override)
    if annotation is None or value is _NOT_FOUND:
        return ConfigError(f"{source}: {key + ': ' if key else ''}{_first_line(cause)}")
    return ConfigError(f"{source}: {key}: expected {expected(annotation)}, got {value!r}")


def refused_value(
    error: OmegaConfBaseException, config_path: Path, keys: Mapping[str, Any]
) -> ConfigError:
    """What went wrong while `${...}` were replaced by the values they name."""
    key = str(error.full_key or "")
    if isinstance(error, InterpolationKeyError):
        named = re.search(r"Interpolation key '([^']+)'", str(error))
        nearest = nearest_keys(named[1], keys) if named else []
        advice = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
        target = named[1] if named else "..."
        return ConfigError(f"{config_path}: {key}: ${{{target}}} names no setting{advice}")
    if isinstance(error, InterpolationValidationError | ValidationError) and key in keys:
        return ConfigError(
            f"{config_path}: {key}: expected {expected(keys[key])}; {_first_line(error)}"
        )
    if isinstance(error, InterpolationToMissingValueError | InterpolationResolutionError):
        return ConfigError(f"{config_path}: {key}: its ${{...}} has no value: {_first_line(error)}")
    return ConfigError(f"{config_path}: {key}: {_first_line(error)}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return re.sub(
        r"^\w+ (raised )?while (resolving|dereferencing) interpolation[^:]*: ", "", lines[0]
    )


def _override_of(key: str, overrides: Sequence[Override]) -> Override | None:
    """The last override that sets `key`, something in it, or a section around it."""
    key = key.partition("[")[0]
    for override in reversed(overrides):
        name = override.key_or_group
        if key == name or key.startswith(f"{name}.") or name.startswith(f"{key}."):
            return override
    return None


def _given_value(key: str, file: Path | None, override: Override | None) -> Any:
    """The value that the user wrote for `key`, of a list all of it."""
    path = key.partition("[")[0]
    if file is None:
        return override.value() if override and override.key_or_group == path else _NOT_FOUND
    value: Any = _read_mapping(file)
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return _NOT_FOUND
        value = value[part]
    return value


def _section_without_keys(file: Path, keys: Mapping[str, Any]) -> str:
    """The section that a file gives as a list or a single value; '' when there is none."""
    content = _read_mapping(file)
    for key, value in content.items():
        if is_section(keys.get(key)) and not isinstance(value, dict):
            return str(key)
    return ""


def _read_mapping(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError):
        return {}  # the caller's own error says more
    return content if isinstance(content, dict) else {}


def is_choice(annotation: Any) -> bool:
    """Whether the setting is one of a few words."""
    return isinstance(annotation, type) and issubclass(annotation, Enum)


def is_free_form(key: str, keys: Mapping[str, Any]) -> bool:
    """Whether `key` lies in a mapping whose keys the schema does not name, such as `task`."""
    parts = key.split(".")
    parents = (".".join(parts[:length]) for length in range(1, len(parts)))
    return any(get_origin(keys.get(parent)) is dict for parent in parents)


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
    return str(annotation)


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def _similarity(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()
