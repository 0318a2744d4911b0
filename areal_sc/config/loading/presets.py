"""Algorithms by name: YAML files of settings, which `actor.algorithm` takes as its defaults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from areal_sc.config.fields import value_at
from areal_sc.config.schema import GRPOConfig
from areal_sc.errors import ConfigError

ALGORITHM: Final = "actor.algorithm"
"""The setting that names one."""

_FOLDER: Final = Path(__file__).parents[1] / "algorithms"


def preset_names() -> list[str]:
    """The names of all algorithms, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def preset_path(name: str) -> Path:
    """The file of an algorithm. Raises: ConfigError: there is none of this name."""
    if name not in preset_names():
        raise ConfigError(f"{ALGORITHM}: expected one of {', '.join(preset_names())}, got {name!r}")
    return _FOLDER / f"{name}.yaml"


def preset_settings(name: str) -> dict[str, Any]:
    """Setting -> value, of an algorithm. Raises: ConfigError: there is none of this name."""
    content = yaml.safe_load(preset_path(name).read_text(encoding="utf-8"))
    return {f"actor.ppo.{key}": value for key, value in content["actor"]["ppo"].items()}


def preset_warnings(config: GRPOConfig) -> Iterator[str]:
    """A sentence, where none of the settings of the algorithm that is named has an effect."""
    name, defaults = config.actor.algorithm, GRPOConfig()
    given = preset_settings(name)
    changed = {key for key, value in given.items() if value != value_at(defaults, key)}
    if changed and all(value_at(config, key) == value_at(defaults, key) for key in changed):
        yield (
            f"{ALGORITHM}={name} has no effect: {', '.join(sorted(changed))} "
            f"{'is' if len(changed) == 1 else 'are'} set otherwise, or the settings were built in "
            "Python, where a preset is taken from a mapping alone: "
            f"load_config({{'{ALGORITHM}': '{name}', ...}})"
        )
