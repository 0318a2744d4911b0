"""From a YAML file, a mapping and overrides to a configuration, by OmegaConf on dataclasses.

    dataclass defaults  <-  preset of `actor.algorithm`
        <-  `defaults:` of the YAML  <-  the YAML  <-  mapping  <-  key=value

Each takes precedence over those to its left. Each value is set by itself, so that an error names
the file or override that it stands in. Overrides are written in hydra's grammar.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, fields, is_dataclass
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from areal_sc.config.fields import (
    IN_CODE,
    check_shared,
    has_place,
    is_choice,
    is_free_form,
    is_section,
    join_sections,
    known_keys,
    schema_fields,
    shared_settings,
    take_shared,
    value_at,
)
from areal_sc.config.loading import explain
from areal_sc.config.loading.presets import ALGORITHM, preset_path
from areal_sc.errors import ConfigError

T = TypeVar("T")

_GIVEN = "settings"
"""Where a value stands that was given in Python, for messages."""


def compose_config(
    config_path: Path | None,
    overrides: Sequence[str],
    schema: type[T],
    values: Mapping[str, Any] | None = None,
) -> T:
    """The configuration that all of these give together, of the right types, unchecked.

    Args:
        config_path: a YAML file.
        overrides: `key=value`, in hydra's grammar.
        values: settings as in a YAML: nested mappings, keys with dots, or both.
    Raises: ConfigError: anything that is wrong with the files or the settings.
    """
    where, advice = "command line", "name a YAML file by --config FILE.yaml, or set it here"
    if values is not None:
        where, advice = _GIVEN, "give it a value"
    parsed = [_parse_override(text) for text in overrides]
    composition = _Composition(schema)
    if config_path is not None:
        where, advice = str(config_path), "set it in the YAML or on the command line"
        _check_is_yaml(config_path)
        composition.read_file(config_path)
    composition.set(_GIVEN, "", values or {})
    for override in parsed:
        composition.apply_override(override)
    name = OmegaConf.select(composition.config, ALGORITHM)
    if name is not None:
        composition.set_others(preset_path(str(name)))
    _require_all_set(composition.config, where, advice, composition.keys)
    try:
        config = OmegaConf.to_object(composition.config)
    except OmegaConfBaseException as error:
        raise explain.refused_interpolation(error, where, composition.keys) from None
    assert isinstance(config, schema)
    take_shared(config)
    return config


def typed(config: T) -> T:
    """Settings that were built in Python, with the types that a YAML gives them.

    A path becomes a string, and the name of a choice becomes the choice.

    Raises: ConfigError: a value is missing, of a wrong type, or not that of the setting that it is
        taken from.
    """
    check_shared(config)
    schema: type[T] = type(config)
    plain = asdict(config)  # type: ignore[call-overload]
    found = schema_fields(schema, also_shared=True)
    keys = [path for path, _, annotation in found if not is_section(annotation)]
    whole = compose_config(
        None, (), schema, {key: reduce(getitem, key.split("."), plain) for key in keys}
    )
    for path, each, _ in schema_fields(schema, also_without=True):
        if IN_CODE in each.metadata:
            section, _, name = path.rpartition(".")
            setattr(value_at(whole, section), name, value_at(config, path))
    join_sections(whole)
    return whole


def config_text(config: Any) -> str:
    """The configuration as YAML; `load_config` of it gives the same configuration again.

    Args: config: its values have their types, as `load_config` and `typed` give them.
    """
    return OmegaConf.to_yaml(OmegaConf.create(_settable(config)))


def _settable(value: Any) -> Any:
    """What a YAML can have of a value: a section is a mapping of what has its place there."""
    if is_dataclass(value):
        names = (found.name for found in fields(value) if has_place(found))
        return {name: _settable(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {key: _settable(inner) for key, inner in value.items()}
    return [*map(_settable, value)] if isinstance(value, list | tuple) else value


class _Composition:
    """A schema's values while files and overrides replace them.

    Attributes:
        keys: dotted path -> type of the settings that have their place here.
        config: the values; shared settings lead to where they are taken from by `${...}`.
    """

    def __init__(self, schema: type[Any]) -> None:
        start = _start_of(schema)  # type: ignore[arg-type]  # a class can be hashed
        self.keys, self._all_keys, self._elsewhere, defaults = start
        self._given: set[str] = set()
        self.config: DictConfig = deepcopy(defaults)

    def read_file(self, path: Path, named_by: tuple[Path, ...] = ()) -> None:
        """Sets what the files of its defaults list say, then what the file itself says."""
        if path in named_by:
            raise ConfigError(f"{path}: its defaults list leads back to itself")
        content = _read_mapping(path)
        names = content.pop("defaults", [])
        if not isinstance(names, list):
            raise ConfigError(f"{path}: defaults must be a list (got {type(names).__name__})")
        for name in names if "_self_" in names else [*names, "_self_"]:
            file = path.parent / f"{name}.yaml"
            if name == "_self_":
                self.set(str(path), "", content)
            elif file.is_file():
                self.read_file(file, (*named_by, path))
            else:
                raise ConfigError(
                    f"{path}: its defaults list names {name!r}, but there is no {file}"
                )

    def apply_override(self, override: Override) -> None:
        key, where = override.get_key_element().lstrip("+"), f"override {override.input_line}"
        if key.startswith("task.") and is_free_form(key, self.keys):
            section, _, name = key.rpartition(".")
            known = OmegaConf.select(self.config, section) or {}
            if not (name in list(known) or override.is_add() or override.is_force_add()):
                raise explain.unknown_key(where, key, self.keys)  # most likely a slip
        self.set(where, key, override.value())

    def set_others(self, path: Path) -> None:
        """Sets what a file says of settings that nothing else has set."""

        def visit(key: str, value: Any) -> None:
            if key in given:
                return
            if isinstance(value, Mapping):
                for name, inner in value.items():
                    visit(f"{key}.{name}".lstrip("."), inner)
            else:
                self.set(str(path), key, value)

        given = frozenset(self._given)
        visit("", _read_mapping(path))

    def set(self, where: str, key: str, value: Any) -> None:
        """Sets one setting, or all those of a section; '' is the top level.

        Raises: ConfigError: the schema does not have it, or it is of another type.
        """
        annotation = self._all_keys.get(key)
        if isinstance(value, Mapping) and (not key or is_section(annotation)):
            for name, inner in value.items():
                self.set(where, f"{key}.{name}".lstrip("."), inner)
            return
        if annotation is None and not is_free_form(key, self.keys):
            key = _first_setting(key, value)
            raise explain.unknown_key(where, key, self.keys, self._elsewhere)
        self._given.add(key)
        try:
            if is_section(annotation) and "${" not in str(value):
                raise ValidationError
            if annotation is str and str(value).startswith("~"):  # of paths alone
                value = os.path.expanduser(str(value))
            OmegaConf.update(self.config, key, value, force_add=True)
        except OmegaConfBaseException as error:
            raise explain.refused_value(error, where, key, annotation, value) from None


@cache
def _start_of(
    schema: type[Any],
) -> tuple[dict[str, Any], dict[str, Any], dict[str, str], DictConfig]:
    """What every composition of a schema begins with, which takes ten times as long as its copy.

    Returns: the settings without those within sections that are `apart`, and with them; where
        fields without a place are taken from; the defaults.
    """
    all_keys = known_keys(schema, also_shared=True)
    config: DictConfig = OmegaConf.structured(schema)
    for key, template in shared_settings(schema).items():
        section: Any = all_keys.get(key)
        if is_section(section):  # it is apart: each setting is given by itself
            origin = template.removesuffix("}")
            OmegaConf.update(config, key, OmegaConf.structured(section), merge=False)
            for each in fields(section):
                template = f"{origin}.{each.name}}}"
                OmegaConf.update(config, f"{key}.{each.name}", template, merge=False)
        else:
            OmegaConf.update(config, key, template, merge=False)
    return known_keys(schema), all_keys, shared_settings(schema, may_differ=False), config


def _first_setting(key: str, value: Any) -> str:
    """The first one in an unknown section: its name says more."""
    while isinstance(value, Mapping) and value:
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    return key


def _check_is_yaml(path: Path) -> None:
    if not path.exists() or path.is_dir():
        kind = "is a folder" if path.is_dir() else "there is no such file"
        raise ConfigError(f"{path}: {kind} (current directory: {Path.cwd()})")
    if path.is_file() and path.suffix != ".yaml":
        raise ConfigError(f"{path}: expected a name that ends in .yaml")


def _read_mapping(path: Path) -> dict[str, Any]:
    """The content of a YAML file.

    Raises: ConfigError: it cannot be read, or is no mapping; says where it stops being YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")  # once: it may be a pipe
        content = yaml.safe_load(text)
        if not isinstance(content, dict | None):
            kind = type(content).__name__
            raise ConfigError(f"{path}: expected `key: value` lines, got a {kind}")
        # unlike yaml, OmegaConf refuses a key that is there twice, and takes 1e-5 for a number
        return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)  # type: ignore[return-value]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except OmegaConfBaseException as error:
        raise explain.refused_value(error, str(path), str(error.full_key)) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise explain.broken_yaml(error, path) from None


def _parse_override(text: str) -> Override:
    key, equals, value = text.partition("=")
    if value.startswith("~"):  # which the grammar does not have
        text = f"{key}{equals}{os.path.expanduser(value)}"
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"override {text}: not of the form key=value ({reason}); "
            "quote special characters twice: 'key=\"value\"'"
        ) from None
    if override.is_sweep_override():
        raise ConfigError(
            f"override {text}: one value is needed, not several; "
            "a list is written key=[a,b], a string with a comma 'key=\"a,b\"'"
        )
    if override.is_delete():
        raise ConfigError(f"override {text}: a setting cannot be removed; give it a value")
    return override


def _require_all_set(
    composed: DictConfig, where: str, advice: str, keys: Mapping[str, Any]
) -> None:
    missing = list(_missing_keys(composed))
    if missing:
        first = keys.get(missing[0])
        choices = f" ({explain.expected(first)})" if is_choice(first) else ""
        raise ConfigError(
            f"{where}: no value for {', '.join(missing)}{choices}; {advice} ({missing[0]}=...)"
        )


def _missing_keys(section: DictConfig, prefix: str = "") -> Iterator[str]:
    for name in map(str, section):
        # a `${...}` that leads to a missing value is not itself what the user has to set
        if OmegaConf.is_interpolation(section, name):
            continue
        if OmegaConf.is_missing(section, name):
            yield f"{prefix}{name}"
        elif isinstance(section[name], DictConfig):
            yield from _missing_keys(section[name], f"{prefix}{name}.")
