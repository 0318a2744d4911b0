"""What a handle tells of its engine without loading it: devices, times, checks and memory.

Controllers and checks ask the handle, so that they know no engine by name. Building it, and nothing
else, imports the class that runs in the workers: a script which only steers never loads torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, Self, TypeVar

from areal_sc.config.machine import Machine
from areal_sc.config.model_context import model_context
from areal_sc.config.model_folder import ModelShape
from areal_sc.config.schema import ActorConfig, Device, GRPOConfig, RolloutConfig
from areal_sc.config.store_room import live_row_bytes
from areal_sc.config.worker_plan import Plan, WorkerPlan
from areal_sc.hub import is_hub_name, local_model

C = TypeVar("C", ActorConfig, RolloutConfig)


def with_local_model(config: C) -> C:
    """The same settings, whose model is a folder of this machine.

    Raises: ModelError: the model is one of the hub, and cannot be had.
    """
    if not is_hub_name(config.path):
        return config
    return replace(config, path=str(local_model(config.path, config.revision)))


@dataclass(frozen=True)
class TrainHandle:
    """A training engine, each rank of which is a worker.

    Attributes:
        worker_class: `module:name` of the engine.
    """

    config: ActorConfig
    config_class: ClassVar[type[ActorConfig]] = ActorConfig
    worker_class: ClassVar[str]

    def build(self) -> Any:
        """The engine of one rank, not yet initialised. Imports torch.

        Raises: ModelError: as `with_local_model`.
        """
        return resolve_name(self.worker_class)(with_local_model(self.config))

    @property
    def num_workers(self) -> int:
        """Ranks, one process each."""
        return self.config.parallel.num_ranks

    @property
    def devices(self) -> tuple[Device, int]:
        """What one worker computes on: kind, and number of CUDA devices."""
        return self.config.device, 1

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


@dataclass(frozen=True)
class GeneratorHandle:
    """An engine that generates; without servers, unless a subclass says otherwise.

    Attributes:
        worker_class: `module:name` of the engine.
        left_files: pattern of the names of files in shared memory that it leaves when it is killed.
    """

    left_files: ClassVar[str] = ""

    config: RolloutConfig
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
        tokens = model_context(self.config.path, self.config.revision)
        return replace(self, config=replace(self.config, max_context_tokens=tokens))

    @property
    def num_workers(self) -> int:
        """Processes, one engine each."""
        return self.config.num_workers

    @property
    def devices(self) -> tuple[Device, int]:
        """What one worker computes on, with what it starts: kind, and number of CUDA devices."""
        return self.config.device, 1

    @property
    def takes_free_memory(self) -> bool:
        """Whether it takes a share of the GPU memory that is free when it starts."""
        return False

    @property
    def num_servers(self) -> int:
        """Parts of one worker that can stand still by themselves, e.g. in a weight update."""
        return 1

    @property
    def start_timeout_s(self) -> float:
        """What a start may take beyond an RPC."""
        return 0.0

    @property
    def restart_timeout_s(self) -> float:
        """What repairing the engine may add to a weight update."""
        return 0.0

    def of_worker(self, index: int) -> RolloutConfig:
        """The settings of one worker of `rollout.num_workers`."""
        return replace(self.config, seed=self.config.seed + index)

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
        self, index: int, device: str, *, parameter_bytes: int = 0, kv_bytes: int = 0
    ) -> WorkerPlan:
        """The worker's own process, with its tensor store."""
        return WorkerPlan(
            role="rollout",
            index=index,
            device=device,
            parameter_bytes=parameter_bytes,
            kv_bytes=kv_bytes,
            store_bytes=live_row_bytes(self.config),
        )

    def way_out(self, plan: Plan) -> str | None:
        """What to change so that a plan that needs too much memory needs less; None: in general."""
        return None
