"""What scripts and controllers know of `MegatronEngine`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from areal_sc.config.optimizer_settings import ADAMW
from areal_sc.config.parallel_settings import TrainEngineKind
from areal_sc.config.schema import ActivationCheckpointing, Device, Dtype, ModelHead
from areal_sc.engines.handle_base import ADAM_STATES, FLOAT32_BYTES, TrainHandle
from areal_sc.engines.megatron.family import ModelSizes, check_ranks
from areal_sc.engines.megatron.machine import check_machine, is_on_cpu, load_cpu_shim
from areal_sc.errors import ConfigError, ModelError
from areal_sc.sizing.machine import Machine, count_cuda_devices
from areal_sc.sizing.model_folder import ModelShape, read_model_config, reads_pictures
from areal_sc.sizing.worker_plan import DTYPE_BYTES, WorkerPlan

_LACKING: Final = ("cpu_offload", "activation_offload", "is_frozen", "train_vision_tower")
_SUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "dtype": (Dtype.float32, Dtype.bfloat16),
    "flash_attention": (2,),
    "compile_layers": (False, None),
    "activation_checkpointing": (ActivationCheckpointing.none, ActivationCheckpointing.layers),
    **dict.fromkeys(_LACKING, (False,)),
}
"""What Megatron-core has of what the other engine has."""


@dataclass(frozen=True)
class MegatronPPOActor(TrainHandle):
    """A policy trained by `MegatronEngine`, with PPO or on given completions."""

    kind: ClassVar[TrainEngineKind] = TrainEngineKind.megatron
    worker_class: ClassVar[str] = "areal_sc.engines.megatron.engine:MegatronEngine"

    def build(self) -> Any:
        check_machine(self.config.device, count_cuda_devices)
        load_cpu_shim()
        return super().build()

    @property
    def devices(self) -> tuple[Device, int]:
        return Device.cpu if is_on_cpu() else self.config.device, 1

    def check(self, count_devices: Callable[[], int] | None) -> None:
        for name, values in _SUPPORTED.items():
            value = getattr(self.config, name)
            if value not in values:
                expected = " or ".join(str(it).lower() for it in values)
                raise ConfigError(
                    f"actor.{name}: expected {expected} with actor.engine=megatron, got "
                    f"{str(value).lower()}; actor.engine=fsdp has it"
                )
        if self.config.optimizer.type != ADAMW:
            raise ConfigError(
                f"actor.optimizer.type: expected {ADAMW} with actor.engine=megatron, got "
                f"{self.config.optimizer.type}; actor.engine=fsdp takes others"
            )
        if self.config.lora.rank:
            raise ConfigError(
                f"actor.lora.rank: expected 0 with actor.engine=megatron, got "
                f"{self.config.lora.rank}; actor.engine=fsdp trains adapters"
            )
        if self.config.head is not ModelHead.lm:
            raise ConfigError(
                f"critic.engine: expected fsdp, got megatron, which has no head={self.config.head}"
            )
        check_ranks(self.config.parallel)
        if count_devices is not None:
            check_machine(self.config.device, count_devices)

    def check_model(self, folder: Path) -> None:
        config = read_model_config(folder)
        if reads_pictures(folder):
            raise ModelError(
                f"the model in {folder} reads pictures, which actor.engine=megatron does not: "
                "actor.engine=fsdp does"
            )
        if config is not None:
            ModelSizes.of(config).check_mesh(self.config.parallel)

    def plan_worker(
        self, index: int, shape: ModelShape, devices: Sequence[str], machine: Machine
    ) -> list[WorkerPlan]:
        parallel, dtype_bytes = self.config.parallel, DTYPE_BYTES[self.config.dtype]
        num_experts = shape.num_expert_parameters or 0
        num_others = shape.num_other_parameters or 0
        num_in_layers = (shape.num_parameters or 0) - num_experts - num_others
        vocabulary = shape.num_vocabulary_parameters or 0
        if parallel.pipeline > 1:  # first and last stage have one matrix each, also tied ones
            stage = index // (parallel.data * parallel.tensor)
            vocabulary = vocabulary if stage in (0, parallel.pipeline - 1) else 0
            num_others = vocabulary
        dense = -(-(num_in_layers // parallel.pipeline + num_others) // parallel.tensor)
        experts = -(-num_experts // (parallel.expert * parallel.pipeline))
        # ranks that have the same parameters share their optimizer state
        same_experts = parallel.data * parallel.tensor // parallel.expert
        updated = -(-dense // parallel.data) + -(-experts // same_experts)
        num_states = ADAM_STATES + (dtype_bytes < FLOAT32_BYTES)  # and float32 copies
        # the largest parameter once, for snapshots
        largest_bytes = FLOAT32_BYTES * -(-vocabulary // parallel.tensor)
        # its gradient, and a copy; one matrix that is tied has two gradients until they are added
        is_tied_here = parallel.pipeline == 1 and num_others < 2 * vocabulary
        return [
            self.plan_rank(
                index,
                devices[0],
                -(-(shape.num_parameters or 0) // parallel.num_ranks),
                shape,
                machine,
                parameter_bytes=(dtype_bytes + FLOAT32_BYTES) * (dense + experts),
                optimizer_bytes=num_states * FLOAT32_BYTES * updated + largest_bytes,
                gathered_bytes=(4 if is_tied_here else 2) * largest_bytes,
            )
        ]
