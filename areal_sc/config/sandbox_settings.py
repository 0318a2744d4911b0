"""The settings of code that is run apart: what a model wrote, and the user's own rewards."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from areal_sc.config.fields import setting


class Isolation(StrEnum):
    """What keeps code apart from the run and from this machine.

    auto: the first of the others that works.
    namespaces: processes, files, network and users of its own, made by the kernel.
    landlock: the kernel's Landlock and seccomp; as root another user, too.
    none: nothing; for rewards of your own. What a model wrote is not run.
    """

    auto = "auto"
    namespaces = "namespaces"
    landlock = "landlock"
    none = "none"


@dataclass
class SandboxConfig:
    """How code is kept apart; docs/rewards.md, "Code that a model wrote"."""

    isolation: Isolation = setting(Isolation.auto)
    read: list[str] = setting(
        list, "files and folders that a model's programs may read, beside Python and /usr"
    )
    runner: str = setting(
        "", 'module:name of another sandbox, called with this section; "": areal_sc\'s own'
    )
