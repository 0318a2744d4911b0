"""What a scheduler hands to a worker process, and what the process reports back. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from areal_sc.run_folder import RunFolder

ROLLOUT_ROLE = "rollout"
TRAIN_ROLE = "train"
"""What a TrainController is called unless it is given a role."""


@dataclass(frozen=True)
class WorkerSpec:
    """Everything a worker process needs to know before its first call.

    Attributes:
        role: `rollout`, or what its TrainController is called.
        index: number of the worker within its role.
        run_id: names this start of the script; the run's folder in shared memory has this name.
        incarnation: names this life of the worker; calls meant for an earlier one are refused.
        engine: name of the engine's handle.
        engine_config: the handle's config as a plain dict.
        run_dir: absolute path of the run folder.
        memory_root: folder on the worker's node below which the run keeps its shared memory.
        transport: the `transport` section as a plain dict.
        store_bytes: limit of the tensor store.
        heartbeat_interval_s: between two beats of the worker.
        orphan_timeout_s: when its node has heard no controller for so long the worker exits.
        environment: variables set before the engine is built, e.g. CUDA_VISIBLE_DEVICES.
    """

    role: str
    index: int
    run_id: str
    incarnation: str
    engine: str
    engine_config: dict[str, Any]
    run_dir: str
    memory_root: str
    transport: dict[str, Any]
    store_bytes: int
    heartbeat_interval_s: float
    orphan_timeout_s: float
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.role}/{self.index}"

    @property
    def keys_path(self) -> Path:
        """Where the run's keys are, if not in the environment."""
        return RunFolder(self.run_dir).keys_path

    @property
    def log_path(self) -> Path:
        return RunFolder(self.run_dir).log_path(self.role, self.index)

    @property
    def report_path(self) -> Path:
        """Where the process reports that it serves."""
        return RunFolder(self.run_dir).workers / f"{self.role}-{self.index}.json"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class WorkerReport:
    """Written by a worker once its sockets are bound.

    Attributes:
        address: of its control socket.
        beat_address: of its heartbeat socket.
        node: names its node, as `this_node` does.
        store_room_bytes: what the stores of its node may hold together; 0: not known.
    """

    name: str
    incarnation: str
    address: str
    beat_address: str
    pid: int
    node: str
    store_room_bytes: int = 0

    @classmethod
    def read(cls, path: Path, incarnation: str) -> WorkerReport | None:
        """The report of that incarnation, or None while there is none."""
        try:
            report = cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        return report if report.incarnation == incarnation else None
