"""Settings that only a `Run` reads: a loop without one is told that they have no effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from areal_sc.config.fields import Section

_ALSO_WITHOUT = ("memory_snapshots",)
"""Settings of `checkpoint` that need no `Run`: the controllers read them by themselves."""


class KnowsRunOnly(Section):
    """Base of the section that loops of both kinds begin with.

    Attributes:
        run_only: those that were set to something else than their default, as `key=value`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.run_only: tuple[str, ...] = ()

    def joined(self, run: Any) -> Any:
        section = super().joined(run)
        section.run_only = tuple(_run_only_settings(run))
        return section


def _run_only_settings(run: Any) -> Iterator[str]:
    if run.trackers:
        yield f"trackers=[{', '.join(run.trackers)}]"
    for name in ("evaluation", "checkpoint"):
        section = getattr(run, name)
        default = type(section)()
        for setting in fields(section):
            value = getattr(section, setting.name)
            if setting.name not in _ALSO_WITHOUT and value != getattr(default, setting.name):
                yield f"{name}.{setting.name}={str(value).lower()}"
