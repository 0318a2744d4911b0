"""The command line of a server's program: our arguments, and those that the settings add."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from areal_sc.errors import ConfigError

NUM_SEEDS: Final = 1 << 32
"""Servers seed NumPy, too, which takes 32 bits."""


def given_arguments(
    args: Mapping[str, Any], settings_of: Mapping[str, str], section: str
) -> dict[str, Any]:
    """What `args` of a section gives, by names with underscores.

    Args:
        settings_of: arguments that have a setting here, and may not be given a second time.
    Raises: ConfigError: one of these is among them.
    """
    given = {name.removeprefix("--").replace("-", "_"): value for name, value in args.items()}
    for name in given:
        if name in settings_of:
            raise ConfigError(f"{section}.args.{name}: set {settings_of[name]} instead")
    return given


def as_command_line(arguments: Mapping[str, Any]) -> list[str]:
    """`{tp_size: 2, enable_x: true}` as `--tp-size=2 --enable-x`; None and False leave it out."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif isinstance(value, list | tuple):
            words += [option, *map(str, value)]
        else:
            words.append(f"{option}={value}")  # together, as a value may begin with a dash
    return words


def check_version(
    version: str, oldest: tuple[int, ...], whose: str, program: str
) -> tuple[int, ...]:
    """The numbers of a program's version. Raises ConfigError: it is too old to be driven."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers < oldest:
        needed = ".".join(map(str, oldest))
        raise ConfigError(
            f"{whose} is {program} {version or 'of an unknown version'}: {needed} or newer is "
            "needed"
        )
    return numbers
