"""One readable sentence for each way in which hydra and OmegaConf refuse a configuration."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_origin

import yaml
from omegaconf.errors import (
    GrammarParseError,
    InterpolationKeyError,
    InterpolationResolutionError,
    InterpolationToMissingValueError,
    InterpolationValidationError,
    OmegaConfBaseException,
    UnsupportedValueType,
    ValidationError,
)

from areal_sc.config.fields import is_choice, is_free_form, is_section
from areal_sc.config.loading.other_words import meant_by
from areal_sc.config.loading.removed_settings import LIKE_ACTOR, REMOVED, actors, moved_to
from areal_sc.errors import ConfigError

MIN_SIMILARITY = 0.75
"""Least `difflib` ratio of a key that is suggested; below it suggestions read as random."""
PART_SIMILARITY = 0.9
"""Least similarity of a setting in the section of the wrong key, if one of the two names has all
words of the other."""

MAX_SUGGESTIONS = 3

_LIKE_ACTOR = tuple(f"{role}." for role in LIKE_ACTOR)
"""Sections whose settings have the names of the actor's, which are suggested in their place."""

_NONE: Mapping[str, str] = MappingProxyType({})

_TYPE_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    float | None: "a number, or null",
}


def unknown_key(
    where: str, key: str, keys: Mapping[str, Any], elsewhere: Mapping[str, str] = _NONE
) -> ConfigError:
    """An error that names the key and the one that may have been meant.

    A name of ours in another section comes first, then what the word means elsewhere, then what is
    spelled like it.

    Args: elsewhere: where shared fields without a place of their own are taken from.
    """
    if is_free_form(key, keys):
        return ConfigError(
            f"{where}: {key} is not in the YAML's own {key.partition('.')[0]!r} section; "
            f"check its spelling, or add it by +{key}=..."
        )
    place, of_actor = moved_to(key, elsewhere), actors(key)
    nearest, name = nearest_keys(key, keys), key.rpartition(".")[2]
    is_ours = any(known.rpartition(".")[2] == name for known in nearest)  # in another section
    if removed := next((it for it in REMOVED if f"{key}.".startswith(f"{it}.")), ""):
        advice = REMOVED[removed]
    elif place in keys or is_free_form(place, keys):
        advice = f"its only place is {place}"
    elif (place := moved_to(of_actor, elsewhere) or of_actor) in keys:
        advice = f"such a model has none of its own, only {place}"
    elif meaning := meant_by(key, is_ours=is_ours):
        advice = meaning
    elif nearest:
        advice = f"did you mean {' or '.join(nearest)}?"
    else:
        section = key.rpartition(".")[0]
        while section not in keys and section:
            section = section.rpartition(".")[0]
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


def refused_value(
    error: OmegaConfBaseException, where: str, key: str, annotation: Any = None, value: Any = None
) -> ConfigError:
    """Why OmegaConf does not take a value."""
    if isinstance(error, UnsupportedValueType):  # it knows the place within `value` alone
        plain = "numbers, strings, lists and mappings"
        return ConfigError(f"{where}: {key}: expected {plain}, got {value!r}")
    reason = _first_line(error)
    if isinstance(error, GrammarParseError):
        reason = f"not a valid ${{...}}: {reason}"
    elif annotation is not None:
        reason = f"expected {expected(annotation)}, got {value!r}"
    return ConfigError(f"{where}: {error.full_key or key}: {reason}")


def refused_interpolation(
    error: OmegaConfBaseException, where: str, keys: Mapping[str, Any]
) -> ConfigError:
    """What went wrong while `${...}` were replaced by the values they name."""
    key = str(error.full_key or "")
    reason = _first_line(error)
    if isinstance(error, InterpolationKeyError):
        named = re.search(r"Interpolation key '([^']+)'", str(error))
        target = named[1] if named else "..."
        nearest = nearest_keys(target, keys)
        advice = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
        reason = f"${{{target}}} names no setting{advice}"
    elif isinstance(error, InterpolationValidationError | ValidationError) and key in keys:
        reason = f"expected {expected(keys[key])}; {reason}"
    elif isinstance(error, InterpolationToMissingValueError | InterpolationResolutionError):
        reason = f"its ${{...}} has no value: {reason}"
    return ConfigError(f"{where}: {key}: {reason}")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(
        r"^\w+ (raised )?while (resolving|dereferencing) interpolation[^:]*: ",
        "",
        lines[0] if lines else type(error).__name__,
    )


def nearest_keys(key: str, keys: Collection[str]) -> list[str]:
    """The known keys that `key` may have meant, best first; [] when nothing is close.

    Names are compared without their section, so a setting in the wrong section is found; the
    section decides the order of settings that share a name. Within the section of `key` a setting
    is found, too, if one has the words of the other: `rollout.autoscale.max_workers` is `...max`.
    """

    def similarity(a: str, b: str) -> float:
        return difflib.SequenceMatcher(None, a, b).ratio()

    section, _, name = key.rpartition(".")

    def score(path: str) -> float:
        its_section, _, its_name = path.rpartition(".")
        words, its_words = set(name.split("_")), set(its_name.split("_"))
        is_part = (
            its_section == section
            and path not in sections
            and (words <= its_words or its_words <= words)
        )
        return max(PART_SIMILARITY if is_part else 0.0, similarity(name, its_name))

    sections = {path.rpartition(".")[0] for path in keys}
    like_others = () if key.startswith(_LIKE_ACTOR) else _LIKE_ACTOR
    scores = {
        path: score(path) for path in keys if path != key and not path.startswith(like_others)
    }
    best = max(scores.values(), default=0.0)
    if best < MIN_SIMILARITY:
        return []
    closest = [path for path, its_score in scores.items() if its_score == best]
    return sorted(closest, key=lambda path: -similarity(key, path))[:MAX_SUGGESTIONS]


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
    if type(None) in arguments:
        return " or ".join([*(expected(it) for it in arguments if it is not type(None)), "null"])
    return str(annotation)
