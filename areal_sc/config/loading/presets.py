"""Algorithms by name: YAML files of settings, which `actor.algorithm` takes as its defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Final

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
