"""What scripts and controllers know of `LocalEngine`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from areal_sc.engines.handle_base import GeneratorHandle
from areal_sc.sizing.machine import Machine
from areal_sc.sizing.model_folder import ModelShape
from areal_sc.sizing.worker_plan import DTYPE_BYTES, WorkerPlan


@dataclass(frozen=True)
class LocalGenerator(GeneratorHandle):
    """Generation by the embedded `LocalEngine`."""

    worker_class: ClassVar[str] = "areal_sc.engines.local.engine:LocalEngine"

    def plan_worker(
        self, index: int, shape: ModelShape, devices: Sequence[str], machine: Machine
    ) -> list[WorkerPlan]:
        value_bytes = DTYPE_BYTES[self.config.dtype]
        num_places = self.config.max_running_sequences * self.config.max_context_tokens
        return [
            self.plan_process(
                index,
                devices[0],
                parameter_bytes=value_bytes * (shape.num_parameters or 0),
                kv_bytes=value_bytes * num_places * (shape.kv_values_per_token or 0),
            )
        ]
