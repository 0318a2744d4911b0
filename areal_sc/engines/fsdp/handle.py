"""What scripts and controllers know of `FSDPEngine`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from areal_sc.config.machine import Machine
from areal_sc.config.model_folder import ModelShape
from areal_sc.config.worker_plan import DTYPE_BYTES, WorkerPlan
from areal_sc.engines.handle_base import TrainHandle

_FLOAT32_BYTES = 4
_ADAM_STATES = 2
_LIVE_WEIGHT_VERSIONS = 2
"""Published weights: the newest, and the one before while it is still being pulled."""


@dataclass(frozen=True)
class FSDPPPOActor(TrainHandle):
    """A policy trained with PPO by `FSDPEngine`."""

    worker_class: ClassVar[str] = "areal_sc.engines.fsdp.engine:FSDPEngine"

    def plan_worker(
        self, index: int, shape: ModelShape, devices: Sequence[str], machine: Machine
    ) -> list[WorkerPlan]:
        # each rank holds its part of float32 parameters, gradients and optimizer state
        share = -(-(shape.num_parameters or 0) // self.config.parallel.num_ranks)
        return [
            WorkerPlan(
                role="train",
                index=index,
                device=devices[0],
                parameter_bytes=2 * _FLOAT32_BYTES * share,
                optimizer_bytes=_ADAM_STATES * _FLOAT32_BYTES * share,
                store_bytes=_LIVE_WEIGHT_VERSIONS * DTYPE_BYTES[self.config.dtype] * share,
            )
        ]


@dataclass(frozen=True)
class FSDPSFTActor(FSDPPPOActor):
    """A policy trained on given completions by `FSDPEngine`."""
