"""Settings as plain values, for the way to a worker process and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import msgspec
from omegaconf import MISSING

from areal_sc.errors import ConfigError

T = TypeVar("T")


def to_plain(config: Any) -> dict[str, Any]:
    """A section of the settings as nested dicts of numbers, strings and lists.

    Raises: ConfigError: a setting without a default has no value.
    """
    plain: dict[str, Any] = asdict(config)
    missing = [name for name, value in plain.items() if value == MISSING]
    if missing:
        raise ConfigError(f"{type(config).__name__}: no value for {', '.join(missing)}")
    return plain


def from_plain(section: type[T], plain: Mapping[str, Any]) -> T:
    """Inverse of `to_plain`: an instance of the dataclass `section`, enums restored."""
    return msgspec.convert(plain, section)
