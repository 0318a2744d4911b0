"""Settings of what a run is saved by."""

from __future__ import annotations

from dataclasses import dataclass

from areal_sc.config.fields import setting

_NO_SNAPSHOTS = ("every_steps=0: only the final model is kept",)


@dataclass
class CheckpointConfig:
    """When the run is saved."""

    every_steps: int = setting(10, "training steps between snapshots; 0: none", ge=0)
    every_minutes: float = setting(
        10.0, "at most between two snapshots; 0: no limit", ge=0, idle=_NO_SNAPSHOTS
    )
    keep: int = setting(2, "newest snapshots that stay", ge=1, idle=_NO_SNAPSHOTS)
    memory_snapshots: bool = setting(
        True, "each step has a snapshot in memory, for train workers that die"
    )
    stop_within_s: float = setting(
        120.0,
        "limit of the step and the snapshot that Ctrl-C or SIGTERM still ends; 0: none",
        ge=0,
        idle=_NO_SNAPSHOTS,
    )
    export_every_steps: int = setting(
        0, "training steps between exported models, all kept; 0: only the final one", ge=0
    )
    keep_best: str = setting(
        "",
        "the number of evaluations that tells the best model, such as accuracy or aime/pass@4",
        idle=("evaluation.every_steps=0",),
    )
