"""How many rollout workers a run may have, where it finds the number itself."""

from __future__ import annotations

from dataclasses import dataclass

from areal_sc.config.fields import setting


@dataclass
class AutoscaleConfig:
    """The run finds the number of rollout workers itself, from `rollout.num_workers` on."""

    min: int = setting(1, "fewest rollout workers", ge=1, idle=("max=0",))
    max: int = setting(0, "most rollout workers; 0: the number stays as it is", ge=0)
