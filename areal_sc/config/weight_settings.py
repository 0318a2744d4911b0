"""The settings of the way of new weights from the trainers to generation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from areal_sc.config.fields import Section, apart, in_code, setting


class OnWeightUpdate(StrEnum):
    """What a weight update does to running answers.

    interrupt: they stop where they are and go on under the new weights, their KV recomputed.
    finish_running: no new ones start, and the update waits for the running ones.
    """

    interrupt = "interrupt"
    finish_running = "finish_running"


class WeightUpdateMethod(StrEnum):
    """How new weights reach generation.

    pull: sealed in the trainers' stores; pulled once a node, without a copy on the same one.
    collective: rank 0 broadcasts to all generating ranks; NCCL between GPUs, else gloo.
    disk: a Hugging Face folder on a path that both sides see.
    """

    pull = "pull"
    collective = "collective"
    disk = "disk"


@dataclass
class WeightUpdateConfig(Section):
    """The way of new weights from the trainers to generation.

    Attributes:
        bucket_bytes: weights sent at one time; at most two such buckets exist.
        step_timeout_s: limit of one bucket, load or meeting of ranks.
    """

    method: WeightUpdateMethod = setting(WeightUpdateMethod.pull)
    folder: str = apart(
        "${run_dir}/weights",
        "weights",
        "for method disk; all processes see it",
        idle=("method!=disk",),
    )
    bucket_bytes: int = in_code(256 << 20)
    step_timeout_s: float = in_code(600.0)
    whole_every_steps: int = setting(
        1,
        "steps between versions that other nodes pull whole, not as what has changed",
        ge=1,
        idle=(
            "method!=pull: only pull has them",
            "scheduler.type=local: no worker is on another node than the trainers",
        ),
    )

    @property
    def has_changes(self) -> bool:
        """Whether versions are published as what has changed, too."""
        return self.whole_every_steps > 1 and self.method is WeightUpdateMethod.pull
