"""What a handle tells of its engine without loading it: devices, times, checks and memory.

Controllers and checks ask the handle, so that they know no engine by name. Building it, and nothing
else, imports the class that runs in the workers: a script which only steers never loads torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, Self, TypeVar

from areal_sc.config.parallel_settings import Placement, TrainEngineKind
from areal_sc.config.schema import (
    ActivationCheckpointing,
    ActorConfig,
    Device,
    GRPOConfig,
    ModelHead,
    RolloutConfig,
    WeightUpdateMethod,
)
from areal_sc.engines.training.snapshot_index import SnapshotIndex
from areal_sc.errors import CheckpointError, ConfigError
from areal_sc.hub import local_model
from areal_sc.sizing.machine import Machine
from areal_sc.sizing.model_context import model_context
from areal_sc.sizing.model_folder import ModelShape
from areal_sc.sizing.output_layer import chunk_tokens, kept_tokens, kind_and_memory
from areal_sc.sizing.pictures import KEPT_BYTES
from areal_sc.sizing.store_room import live_row_bytes
from areal_sc.sizing.worker_plan import DTYPE_BYTES, RunPlan, WorkerPlan

C = TypeVar("C", ActorConfig, RolloutConfig)

FLOAT32_BYTES = 4
ADAM_STATES = 2
_LOGIT_COPIES = 4
"""Copies of a chunk's logits: as they are, exponentials, their gradient, and the entropy's."""
_FUSED_LOGIT_COPIES = 2
"""Where torch compiles what is done with them: as they are, and their gradient."""
_LIVE_WEIGHT_VERSIONS = 2
"""Published weights: the newest, and the one before while it is still being pulled."""
_CHANGES_VERSIONS = 1
"""What has changed takes at most a quarter, once as it is made and once as it is sealed."""
_MEMORY_SNAPSHOTS = 2
"""One is being written while the one before is still needed."""


def with_local_model(config: C) -> C:
    """The same settings, whose model is a folder of this machine.

    Raises: ModelError: the model is one of the hub, and cannot be had.
    """
    if not config.path:
        return config
    return replace(config, path=str(local_model(config.path)))


@dataclass(frozen=True)
class TrainHandle:
    """A training engine, each rank of which is a worker.

    Attributes:
        kind: of the engine.
        worker_class: `module:name` of the engine.
    Raises: ConfigError: the settings name another engine.
    """

    config: ActorConfig
    config_class: ClassVar[type[ActorConfig]] = ActorConfig
    kind: ClassVar[TrainEngineKind]
    worker_class: ClassVar[str]

    def __post_init__(self) -> None:
        if self.config.engine != self.kind and ":" not in self.config.engine:
            raise ConfigError(
                f"actor.engine: expected {self.kind} with {type(self).__name__}, got "
                f"{self.config.engine}; make_actor(config.actor) gives the engine that is set"
            )

    def build(self) -> Any:
        """The engine of one rank, not yet initialised. Imports torch.

        Raises: ModelError: as `with_local_model`. ConfigError: as `check`.
        """
        self.check(None)
        return resolve_name(self.worker_class)(with_local_model(self.config))

    @property
    def num_workers(self) -> int:
        """Ranks, one process each."""
        return self.config.parallel.num_ranks

    @property
    def devices(self) -> tuple[Device, int]:
        """What one worker computes on: kind, and number of CUDA devices."""
        return self.config.device, 1

    @property
    def ways_out(self) -> tuple[str, ...]:
        """Settings with which a rank needs less memory on its GPU."""
        return ("more ranks of actor.parallel",)

    def check(self, count_devices: Callable[[], int] | None) -> None:
        """What this engine asks of its settings, and of the machine.

        Args:
            count_devices: CUDA devices of this machine, if it is the one that it will run on.
        Raises: ConfigError: names the setting, its value, and what is allowed.
        """

    @property
    def can_sleep(self) -> bool:
        """Whether a rank can give its device's memory up, and go on."""
        return False

    def check_model(self, folder: Path) -> None:
        """Whether it can train a model on its ranks, as far as `config.json` tells.

        Raises: ConfigError: not on so many ranks. ModelError: not at all, or the file is broken.
        """

    def plan_worker(
        self, index: int, shape: ModelShape, devices: Sequence[str], machine: Machine
    ) -> list[WorkerPlan]:
        """The processes of one worker, and their memory.

        Args:
            shape: of the model; what is not known of it counts as 0.
            devices: that the worker gets: `cuda:<n>`, or `cpu` alone.
            machine: what is left for this role.
        """
        raise NotImplementedError

    def plan_rank(
        self,
        index: int,
        device: str,
        share: int,
        shape: ModelShape,
        machine: Machine,
        *,
        parameter_bytes: int,
        optimizer_bytes: int,
        held_share: int | None = None,
        rounded_bytes: int = 0,
        gathered_bytes: int = 0,
        is_offloaded: bool = False,
    ) -> WorkerPlan:
        """The process of one rank. One that is frozen publishes nothing and has no snapshots.

        Args:
            share: numbers of the model that it publishes.
            held_share: those that it has in snapshots; None: the same.
            shape: of the model.
            machine: that the device is one of.
            parameter_bytes: with the gradients of what is trained.
            rounded_bytes: copies of the parameters beside them.
        """
        activation_bytes, layer_input_bytes = self._activation_bytes(
            shape, *kind_and_memory(device, machine)
        )
        plan = WorkerPlan(
            role="train",
            index=index,
            device=device,
            parameter_bytes=parameter_bytes + rounded_bytes,
            gathered_bytes=gathered_bytes,
            activation_bytes=activation_bytes,
            layer_input_bytes=layer_input_bytes,
            picture_bytes=KEPT_BYTES if shape.num_tower_parameters else 0,
            is_offloaded=is_offloaded,
        )
        if self.config.is_frozen:
            return plan
        is_sealed = self.config.weight_update.method is not WeightUpdateMethod.disk
        num_versions = _LIVE_WEIGHT_VERSIONS if is_sealed else 0
        num_versions += _CHANGES_VERSIONS if self.config.weight_update.has_changes else 0
        held_share = share if held_share is None else held_share
        state_bytes = (1 + ADAM_STATES) * FLOAT32_BYTES * held_share
        num_snapshots = _MEMORY_SNAPSHOTS if self.config.memory_snapshots else 0
        return replace(
            plan,
            optimizer_bytes=optimizer_bytes,
            store_bytes=num_versions * DTYPE_BYTES[self.config.dtype] * share,
            copy_bytes=state_bytes,
            snapshot_bytes=num_snapshots * state_bytes,
        )

    def _activation_bytes(
        self, shape: ModelShape, device: str, memory_bytes: int | None
    ) -> tuple[int, int]:
        """What the largest micro-batch leaves for its backward pass, and the output layer's logits;
        and what of it lies in the memory of the host, beside a GPU. Of a tower that is trained it
        counts as if all tokens were those of pictures.

        One layer more than are kept goes through its backward pass; a frozen model keeps none.

        Args:
            device: kind of what the rank computes on.
            memory_bytes: all of it; None: unknown.
        """
        config, layer = self.config, shape.layer
        parallel, width = config.parallel, DTYPE_BYTES[config.dtype]
        num_tokens = -(-config.max_tokens_per_micro_batch // parallel.sequence)
        num_outputs = (shape.vocabulary or 0) if config.head is ModelHead.lm else 1
        num_outputs = -(-num_outputs // parallel.tensor)
        chunk = chunk_tokens(config.logprob_chunk_tokens, num_outputs, device, memory_bytes)
        copies = _LOGIT_COPIES if device == Device.cpu else _FUSED_LOGIT_COPIES
        logit_bytes = copies * FLOAT32_BYTES * min(chunk, num_tokens) * num_outputs
        keeps = self.kind is TrainEngineKind.fsdp and not config.is_frozen
        is_few = chunk < num_tokens <= kept_tokens(chunk, device)
        if keeps and is_few and width < FLOAT32_BYTES:
            logit_bytes += width * num_tokens * num_outputs
        if layer is None:
            return logit_bytes, 0
        if config.train_vision_tower and shape.tower is not None:  # no activation of it is dropped
            num_patches = num_tokens * shape.patches_per_token
            of_patch = shape.tower.num_layers * shape.tower.activation_values
            logit_bytes += width * num_patches * of_patch
        kept = width * num_tokens * layer.activation_values
        kept += layer.score_bytes(config.max_tokens_per_micro_batch)  # of one row, the longest
        kept = -(-kept // parallel.tensor)
        num_layers = 0 if config.is_frozen else -(-layer.num_layers // parallel.pipeline)
        inputs = width * num_tokens * layer.hidden
        kept_of = {
            ActivationCheckpointing.none: kept,
            ActivationCheckpointing.selective: width * num_tokens * layer.product_values,
            ActivationCheckpointing.layers: inputs,
        }
        of_layers = num_layers * kept_of[config.activation_checkpointing]
        is_offloaded = config.activation_offload and device != Device.cpu
        there, on_host = (min(of_layers, inputs), of_layers) if is_offloaded else (of_layers, 0)
        return there + kept + FLOAT32_BYTES * num_tokens * layer.hidden + logit_bytes, on_host

    def check_snapshot(self, folder: Path) -> None:
        """Reads all of a snapshot.

        Raises: CheckpointError: it is damaged, incomplete, or of another format.
        """
        try:
            index = SnapshotIndex.read(folder)
            index.check_content(folder, range(len(index.files)))
        except (OSError, ValueError) as error:
            raise CheckpointError(str(error)) from error


@dataclass(frozen=True)
class GeneratorHandle:
    """An engine that generates; without servers, unless a subclass says otherwise.

    Attributes:
        worker_class: `module:name` of the engine.
        left_files: pattern of the names of files in shared memory that it leaves when it is killed.
        is_first_life: of its worker.
    """

    left_files: ClassVar[str] = ""

    config: RolloutConfig
    is_first_life: bool = True
    config_class: ClassVar[type[RolloutConfig]] = RolloutConfig
    worker_class: ClassVar[str]

    def build(self, log_folder: Path = Path("logs"), name: str = "rollout") -> Any:
        """The engine, not yet started. Imports torch.

        Args:
            log_folder: where the logs of processes go that the engine starts.
            name: begins the names of the logs.
        Raises: ModelError: as `with_local_model`.
        """
        return resolve_name(self.worker_class)(with_local_model(self.with_context().config))

    def with_context(self) -> Self:
        """The same engine, whose longest sequence is a number.

        Raises: ConfigError: that is left to the model, which is not there, or does not say.
        """
        if self.config.max_context_tokens:
            return self
        tokens = model_context(self.config.path)
        return replace(self, config=replace(self.config, max_context_tokens=tokens))

    @property
    def num_workers(self) -> int:
        """Processes, one engine each; most that there may be."""
        return self.config.most_workers

    @property
    def devices(self) -> tuple[Device, int]:
        """What one worker computes on, with what it starts: kind, and number of CUDA devices."""
        return self.config.device, 1

    @property
    def takes_free_memory(self) -> bool:
        """Whether it takes a share of the GPU memory that is free when it starts on a GPU."""
        return False

    @property
    def start_timeout_s(self) -> float:
        """What a start may take beyond an RPC."""
        return 0.0

    def of_worker(self, index: int) -> RolloutConfig:
        """The settings of one worker of `rollout.num_workers`."""
        return replace(self.config, seed=self.config.seed + index)

    def in_life(self, term: int, life: int) -> Self:
        """The same with random streams that no other life of the worker has.

        Args:
            term: of the run.
            life: number of the worker's life in this term, from 0.
        """
        words = f"{self.config.seed} {term} {life}".encode()
        seed = int.from_bytes(hashlib.blake2b(words, digest_size=4).digest()) >> 1  # numpy's range
        return replace(self, config=replace(self.config, seed=seed), is_first_life=not life)

    def check_scaling(self) -> None:
        """Whether there can be more workers, or fewer, while a run goes on.

        Raises: ConfigError: names the setting that fixes their number.
        """
        if self.config.placement is Placement.turns:
            raise ConfigError(
                "placement: expected another one than turns, with which the number of rollout "
                "workers cannot change"
            )

    def check_turns(self, *, has_cuda: bool, is_here: bool) -> None:
        """Whether it can give its device's memory up, and go on with new weights.

        Args:
            has_cuda: it computes on a GPU.
            is_here: on this machine.

        Raises: ConfigError: names the setting that has to be another one.
        """

    def check(self, run: GRPOConfig) -> None:
        """What this engine asks of the settings of a run.

        Raises: ConfigError: names the setting, its value, and what is allowed.
        """

    def plan_worker(
        self, index: int, shape: ModelShape, devices: Sequence[str], machine: Machine
    ) -> list[WorkerPlan]:
        """The processes of one worker, and their memory; arguments as in `TrainHandle`."""
        raise NotImplementedError

    def plan_process(
        self,
        index: int,
        device: str,
        *,
        parameter_bytes: int = 0,
        kv_bytes: int = 0,
        picture_bytes: int = 0,
    ) -> WorkerPlan:
        """The worker's own process, with its tensor store."""
        return WorkerPlan(
            role="rollout",
            index=index,
            device=device,
            parameter_bytes=parameter_bytes,
            kv_bytes=kv_bytes,
            picture_bytes=picture_bytes,
            store_bytes=live_row_bytes(self.config),
        )

    def way_out(self, plan: RunPlan) -> str | None:
        """What to change so that a plan that needs too much memory needs less; None: in general."""
        return None
