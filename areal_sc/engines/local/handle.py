"""What scripts and controllers know of `LocalEngine`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from areal_sc.engines.handle_base import GeneratorHandle
from areal_sc.sizing.machine import Machine
from areal_sc.sizing.model_folder import ModelShape
from areal_sc.sizing.pictures import KEPT_BYTES
from areal_sc.sizing.worker_plan import DTYPE_BYTES, WorkerPlan

LEAST_ADAPTER_BYTES: Final = 256 << 20
ADAPTER_SHARE: Final = 0.5


def adapter_room(parameter_bytes: int) -> int:
    """Bytes that adapters may have beside a model: a share of what it has itself, if that is more
    than they may always have."""
    return max(LEAST_ADAPTER_BYTES, int(ADAPTER_SHARE * parameter_bytes))


@dataclass(frozen=True)
class LocalGenerator(GeneratorHandle):
    """Generation by the embedded `LocalEngine`."""

    worker_class: ClassVar[str] = "areal_sc.engines.local.engine:LocalEngine"

    def plan_worker(
        self, index: int, shape: ModelShape, devices: Sequence[str], machine: Machine
    ) -> list[WorkerPlan]:
        value_bytes = DTYPE_BYTES[self.config.dtype]
        parameter_bytes = value_bytes * (shape.num_parameters or 0)
        if self.config.lora.is_named:
            parameter_bytes += adapter_room(parameter_bytes)
        num_places = self.config.max_running_sequences * self.config.max_context_tokens
        return [
            self.plan_process(
                index,
                devices[0],
                parameter_bytes=parameter_bytes,
                kv_bytes=value_bytes * num_places * (shape.kv_values_per_token or 0),
                picture_bytes=KEPT_BYTES if shape.num_tower_parameters else 0,
            )
        ]
