"""From a YAML file and overrides to a configuration, by hydra's compose on structured dataclasses.

    schema (dataclass defaults)  <-  `defaults:` of the YAML  <-  the YAML  <-  key=value

Each takes precedence over those to its left. Hydra is used for composition alone: it starts no
job, changes no directory, sets up no logging, and its global state is as before afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.singleton import Singleton
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal_sc.config import explain
from areal_sc.config.explain import expected, is_choice, is_free_form
from areal_sc.config.fields import known_keys, shared_settings
from areal_sc.errors import ConfigError

T = TypeVar("T")

HYDRA_VERSION_BASE = "1.3"
"""The hydra release whose defaults composition follows; newer ones keep to it."""

_SCHEMA_NAME = "areal_sc_schema"
_PRIMARY_NAME = "areal_sc_primary"


def compose_config(config_path: Path, overrides: Sequence[str], schema: type[T]) -> T:
    """The configuration of a YAML file and `key=value` overrides, of the right types, unchecked.

    Raises: ConfigError: anything that is wrong with the files or the settings.
    """
    _require_mapping(config_path)
    keys = known_keys(schema)
    parsed = _parse_overrides(overrides)
    folder = config_path.absolute().parent
    with _isolated_hydra():
        store = ConfigStore.instance()
        store.store(name=_SCHEMA_NAME, node=_defaults(schema))
        store.store(
            name=_PRIMARY_NAME,
            node={"defaults": [_SCHEMA_NAME, config_path.absolute().stem, "_self_"]},
        )
        try:
            with initialize_config_dir(str(folder), version_base=HYDRA_VERSION_BASE):
                composed = compose(_PRIMARY_NAME, _opened(parsed, keys))
        except (
            HydraException,
            OmegaConfBaseException,
            yaml.YAMLError,
            OSError,
            ValueError,
        ) as error:
            raise explain.refused_composition(error, config_path, parsed, keys) from None
    _require_known_keys(composed, config_path, parsed, keys)
    _require_all_set(composed, config_path, keys)
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise explain.refused_value(error, config_path, keys) from None
    assert isinstance(config, schema)
    return config


def config_text(config: Any) -> str:
    """The configuration as YAML; `load_config` of it gives the same configuration again."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)


def _defaults(schema: type[Any]) -> DictConfig:
    """A schema's defaults; shared settings lead to where they are taken from by `${...}`."""
    defaults: DictConfig = OmegaConf.structured(schema)
    for key, template in shared_settings(schema).items():
        OmegaConf.update(defaults, key, template, merge=False)
    return defaults


@contextmanager
def _isolated_hydra() -> Iterator[None]:
    """Hides hydra's process-wide state from the caller, and the caller's from us."""
    state = Singleton.get_state()
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().clear()
        Singleton.set_state(state)


def _require_mapping(config_path: Path) -> None:
    if not config_path.is_file():
        kind = "is a folder" if config_path.is_dir() else "there is no such file"
        raise ConfigError(f"--config {config_path}: {kind} (current directory: {Path.cwd()})")
    if config_path.suffix != ".yaml":
        raise ConfigError(f"--config {config_path}: expected a name that ends in .yaml")
    try:
        content = yaml.safe_load(config_path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise explain.broken_yaml(error, config_path) from None
    except OSError as error:
        raise ConfigError(f"--config {config_path}: {error.strerror}") from None
    if content is not None and not isinstance(content, dict):
        raise ConfigError(
            f"{config_path}: expected `key: value` lines, got a {type(content).__name__}"
        )


def _parse_overrides(overrides: Sequence[str]) -> list[Override]:
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
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
        parsed.append(override)
    return parsed


def _opened(overrides: Sequence[Override], keys: Mapping[str, Any]) -> list[str]:
    """The overrides as text; mappings take any key without a `+`.

    Not so `task`: its keys are those of the YAML, so that a slip on the command line is noticed.
    """
    texts = []
    for override in overrides:
        key = f"{override.key_or_group}."  # a mapping may be given as a whole
        is_open = is_free_form(key, keys) and not key.startswith("task.")
        is_change = not (override.is_add() or override.is_force_add())
        texts.append(("++" if is_open and is_change else "") + str(override.input_line))
    return texts


def _require_known_keys(
    composed: DictConfig, config_path: Path, overrides: Sequence[Override], keys: Mapping[str, Any]
) -> None:
    """Refuses what `+key=value` slipped past the schema."""
    for override in overrides:
        key = override.key_or_group
        if override.is_add() and key not in keys and not is_free_form(key, keys):
            raise explain.unknown_key(f"override {override.input_line}", key, keys)
    for name in composed:
        if str(name) not in keys:
            raise explain.unknown_key(str(config_path), str(name), keys)


def _require_all_set(composed: DictConfig, source: Path, keys: Mapping[str, Any]) -> None:
    missing = list(_missing_keys(composed))
    if missing:
        first = keys.get(missing[0])
        choices = f" ({expected(first)})" if is_choice(first) else ""
        raise ConfigError(
            f"{source}: no value for {', '.join(missing)}{choices}; "
            f"set it in the YAML or on the command line ({missing[0]}=...)"
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
