"""What a scheduler hands to a worker process, and what the process reports back. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class WorkerSpec:
    """Everything a worker process needs to know before its first call.

    Attributes:
        role: `train` or `rollout`.
        index: number of the worker within its role.
        incarnation: names this life of the worker; calls meant for an earlier one are refused.
        engine: name of the engine's handle.
        engine_config: the handle's config as a plain dict.
        run_dir: absolute path of the run folder.
        transport: the `transport` section as a plain dict.
        store_bytes: limit of the tensor store.
        orphan_timeout_s: without a heartbeat for so long the worker exits.
        environment: variables set before the engine is built, e.g. CUDA_VISIBLE_DEVICES.
    """

    role: str
    index: int
    incarnation: str
    engine: str
    engine_config: dict[str, Any]
    run_dir: str
    transport: dict[str, Any]
    store_bytes: int
    orphan_timeout_s: float
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.role}/{self.index}"

    @property
    def log_path(self) -> Path:
        return Path(self.run_dir) / "logs" / f"{self.role}-{self.index}.log"

    @property
    def report_path(self) -> Path:
        """Where the process reports that it serves."""
        return Path(self.run_dir) / "workers" / f"{self.role}-{self.index}.json"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class WorkerReport:
    """Written by a worker once its socket is bound."""

    name: str
    incarnation: str
    address: str
    pid: int

    @classmethod
    def read(cls, path: Path, incarnation: str) -> WorkerReport | None:
        """The report of that incarnation, or None while there is none."""
        try:
            report = cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        return report if report.incarnation == incarnation else None
