"""What scripts and controllers know of `FSDPEngine`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from areal_sc.config.optimizer_settings import ADAMW
from areal_sc.config.parallel_settings import ParallelConfig, TrainEngineKind
from areal_sc.config.schema import (
    ActivationCheckpointing,
    ActorConfig,
    Device,
    Dtype,
    ModelHead,
)
from areal_sc.engines.handle_base import ADAM_STATES, FLOAT32_BYTES, TrainHandle
from areal_sc.errors import ConfigError
from areal_sc.sizing.machine import Machine, resolved_device
from areal_sc.sizing.model_folder import ModelShape, read_model_shape, reads_pictures
from areal_sc.sizing.output_layer import kind_and_memory, piece_bytes
from areal_sc.sizing.worker_plan import DTYPE_BYTES, WorkerPlan


def needs_fsdp(num_ranks: int, config: ActorConfig) -> bool:
    """Whether FSDP is used.

    It spreads parameters, keeps them in host memory, and keeps float32 copies for bfloat16.
    """
    return num_ranks > 1 or config.dtype is not Dtype.float32 or config.cpu_offload


def rounds_copies(rows_ranks: int, config: ActorConfig) -> bool:
    """Whether copies of all parameters, in the type of computation, lie beside them; without FSDP.

    Args:
        rows_ranks: ranks that compute different tokens.
    """
    return rows_ranks == 1 and config.dtype is not Dtype.float32 and not config.cpu_offload


@dataclass(frozen=True)
class FSDPPPOActor(TrainHandle):
    """A policy trained with PPO by `FSDPEngine`."""

    kind: ClassVar[TrainEngineKind] = TrainEngineKind.fsdp
    worker_class: ClassVar[str] = "areal_sc.engines.fsdp.engine:FSDPEngine"

    @property
    def ways_out(self) -> tuple[str, ...]:
        return (*super().ways_out, *([] if self.config.cpu_offload else ["actor.cpu_offload=true"]))

    def check(self, count_devices: Callable[[], int] | None) -> None:
        for name in ("pipeline", "virtual_pipeline", "expert"):
            size = getattr(self.config.parallel, name)
            if size != 1:
                raise ConfigError(
                    f"actor.parallel.{name}: expected 1 with actor.engine=fsdp, got {size}; "
                    "actor.engine=megatron has it, and more data or tensor saves as much memory"
                )
        self.config.optimizer.folder_of_own()  # raises where there is none
        if self.config.lora.places > 1 and not self.config.is_frozen:
            self._check_places()
        if self.config.train_vision_tower and self.config.has_adapter:
            raise ConfigError(
                "actor.train_vision_tower: expected false with an adapter (actor.lora.rank above "
                "0), which is beside the text part, got true"
            )
        is_of_layers = self.config.activation_checkpointing is ActivationCheckpointing.layers
        if self.config.activation_offload and not is_of_layers:
            raise ConfigError(
                "actor.activation_offload: expected false without "
                "actor.activation_checkpointing=layers, got true"
            )
        if count_devices is None:
            return
        if self.config.flash_attention == 3 and find_spec("flash_attn_interface") is None:
            raise ConfigError(
                "actor.flash_attention: expected 2, got 3: the module flash_attn_interface, of the "
                "package flash_attn_3, is not installed"
            )
        if self.config.compile_layers:
            device = resolved_device(self.config.device, count_devices(), "actor.device")
            compiler = os.environ.get("CXX", "g++")
            if device == Device.cpu and shutil.which(compiler) is None:
                raise ConfigError(
                    f"actor.compile_layers: expected a C++ compiler on a CPU, and {compiler} is "
                    "not installed here; install it, or set actor.compile_layers=false"
                )

    def _check_places(self) -> None:
        """Raises: ConfigError: several adapters would not be exact, or not be told apart."""
        config, lora = self.config, self.config.lora
        for name, expected, found, is_wrong in (
            ("lora.rank", "one above 0", lora.rank, not lora.rank),
            ("lora.dropout", "0", lora.dropout, lora.dropout > 0),
            ("head", "lm", config.head, config.head is not ModelHead.lm),
            ("dtype", "float32 or bfloat16", config.dtype, config.dtype is Dtype.float16),
            ("optimizer.type", ADAMW, config.optimizer.type, config.optimizer.type != ADAMW),
            ("compile_layers", "false", config.compile_layers, config.compile_layers),
        ):
            if is_wrong:
                raise ConfigError(
                    f"actor.{name}: expected {expected} with actor.lora.places={lora.places}, got "
                    f"{found}"
                )

    @property
    def can_sleep(self) -> bool:
        return True

    def check_model(self, folder: Path) -> None:
        if self.config.train_vision_tower and folder.is_dir() and not reads_pictures(folder):
            raise ConfigError(
                f"actor.train_vision_tower: expected false, as the model in {folder} reads no "
                "pictures, got true"
            )
        check_pictures(folder, self.config.parallel)
        shape = read_model_shape(folder)
        if shape is not None and shape.heads is not None and shape.kv_heads is not None:
            self.config.parallel.check_heads(shape.heads, shape.kv_heads)

    def plan_worker(
        self, index: int, shape: ModelShape, devices: Sequence[str], machine: Machine
    ) -> list[WorkerPlan]:
        # each rank holds its part of float32 parameters, and of what training adds to them
        parallel = self.config.parallel
        share = -(-(shape.num_parameters or 0) // parallel.num_ranks)
        # of a tower that is not trained it holds the parameters alone
        of_tower = 0 if self.config.train_vision_tower else shape.num_tower_parameters or 0
        of_tower = -(-of_tower // parallel.num_ranks)
        width, trained, fixed = DTYPE_BYTES[self.config.dtype], share - of_tower, 0
        if self._is_model_fixed:
            lora, layer, fixed, of_tower = self.config.lora, shape.layer, share, 0
            of_adapter = layer.adapter_values(lora.rank, lora.targets) if layer else 0
            of_adapter *= lora.places
            trained = 0 if self.config.is_frozen else -(-of_adapter // parallel.num_ranks)
        is_rounded = rounds_copies(parallel.num_ranks // parallel.tensor, self.config)
        return [
            self.plan_rank(
                index,
                devices[0],
                trained if self.config.lora.is_published_alone else share,
                shape,
                machine,
                parameter_bytes=width * fixed + FLOAT32_BYTES * (of_tower + 2 * trained),
                rounded_bytes=width * (of_tower + trained) if is_rounded else 0,
                optimizer_bytes=ADAM_STATES * FLOAT32_BYTES * trained,
                # snapshots have no moments of the tower, two thirds of what they have of others
                held_share=trained + of_tower // (1 + ADAM_STATES),
                gathered_bytes=self._gathered_bytes(
                    shape, piece_bytes(*kind_and_memory(devices[0], machine))
                ),
                is_offloaded=self.config.cpu_offload,
            )
        ]

    @property
    def _is_model_fixed(self) -> bool:
        """Whether the model's own parameters have no gradients."""
        return self.config.has_adapter or self.config.is_frozen

    def _gathered_bytes(self, shape: ModelShape, most_of_vocabulary: int) -> int:
        """The most that a rank has beyond its own share, in a backward pass.

        One layer is whole, with its gradients, while the next one's parameters come, and the
        gradients that were before are averaged, in float32. At another time there are pieces of the
        vocabulary's parameters, their gradients, and a copy to be averaged; where all of the output
        layer is one piece, it or its gradients are also there beside layers. Where FSDP brings it
        from host memory, there are two gradients of it. A rank that computes all rows on its device
        has the gradients of one layer, or of its embeddings, and converts them to float32.
        With `cpu_offload` a layer's share comes from host memory, and its gradients go there.
        Parameters that stay as they are have no gradients; those of adapters are not counted.

        Args: most_of_vocabulary: bytes of a piece of it.
        """
        parallel = self.config.parallel
        rows_ranks = parallel.num_ranks // parallel.tensor
        if not needs_fsdp(rows_ranks, self.config):
            return 0
        width = DTYPE_BYTES[self.config.dtype]
        layer, others = shape.num_layer_parameters or 0, shape.num_other_parameters or 0
        largest, tower = shape.num_vocabulary_parameters or 0, shape.num_tower_parameters or 0
        of_gradient = 0 if self._is_model_fixed else width + FLOAT32_BYTES
        of_layers = (2 * width + of_gradient) * layer // parallel.tensor
        if rounds_copies(rows_ranks, self.config):
            of_vocabulary = 0 if self._is_model_fixed else width * largest
            return max(of_gradient * layer, of_vocabulary) // parallel.tensor
        if self.config.cpu_offload:
            of_layers += max(width, of_gradient) * layer // parallel.num_ranks
        if rows_ranks == 1:
            return max(of_layers, max(width, 2 * of_gradient) * others // parallel.tensor)
        # the tower is whole on each rank, with its gradients, as long as the rank computes
        of_layers += (width + of_gradient * self.config.train_vision_tower) * tower
        pieces, of_vocabulary = 1 if self._is_model_fixed else 3, FLOAT32_BYTES * largest
        if of_vocabulary <= most_of_vocabulary:
            of_layers += of_vocabulary
        return max(of_layers, pieces * min(most_of_vocabulary, of_vocabulary) + width * tower)


@dataclass(frozen=True)
class FSDPSFTActor(FSDPPPOActor):
    """A policy trained on given completions by `FSDPEngine`."""


def check_pictures(folder: Path, parallel: ParallelConfig) -> None:
    """Raises: ConfigError: a model that reads pictures is to be split."""
    if parallel.tensor * parallel.sequence > 1 and reads_pictures(folder):
        raise ConfigError(
            f"the model in {folder} reads pictures; expected actor.parallel.tensor=1 and "
            f"actor.parallel.sequence=1, got {parallel.tensor} and {parallel.sequence}: set more "
            "actor.parallel.data"
        )
