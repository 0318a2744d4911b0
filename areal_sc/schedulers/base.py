"""The one interface between controllers and whatever runs worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from areal_sc.config.schema import Device, SchedulerConfig
from areal_sc.transport.keys import RunKeys
from areal_sc.workers.spec import WorkerReport, WorkerSpec

LOG_TAIL_LINES = 15


@dataclass(frozen=True)
class LaunchRequest:
    """A worker that a controller wants.

    Attributes:
        role: `rollout`, or what its TrainController is called.
        index: number of the worker within its role.
        engine: name of the engine's handle.
        engine_config: the handle's config as a plain dict.
        device: `cuda` takes devices of the node for the worker.
        store_bytes: limit of the worker's tensor store.
        num_devices: how many it takes; on a CPU none, whatever is said here.
    """

    role: str
    index: int
    engine: str
    engine_config: dict[str, Any]
    device: Device
    store_bytes: int
    num_devices: int = 1


@dataclass(frozen=True)
class RunningWorker:
    """A worker process that serves RPC."""

    spec: WorkerSpec
    report: WorkerReport

    @property
    def name(self) -> str:
        return self.spec.name


class Scheduler(Protocol):
    """Starts, watches and stops worker processes. Used from one controller's event loop.

    Attributes:
        keys: of the run; its workers serve nobody without them.
    """

    config: SchedulerConfig
    keys: RunKeys

    async def launch(self, request: LaunchRequest) -> RunningWorker:
        """Starts one worker and waits, bounded, until it serves.

        Raises: WorkerStartError: it ended or did not report in time; carries its last log lines.
        """
        ...

    async def exit_statuses(self, workers: Sequence[RunningWorker]) -> dict[str, str]:
        """How those of the processes ended that did: name -> `exit code 1`, `signal 9 (SIGKILL)`.

        Raises: WorkerStartError, WorkerLost: whoever knows does not answer.
        """
        ...

    async def stop(self, workers: list[RunningWorker]) -> None:
        """Ends the processes, first gently, then by force, within `shutdown_timeout_s`."""
        ...

    def close(self) -> None:
        """Leaves nothing behind; the scheduler cannot be used afterwards."""
        ...


def log_tail(path: Path) -> list[str]:
    """Last lines of a worker's log, [] when there is none."""
    try:
        with path.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - 64 * 1024))
            return log.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    except FileNotFoundError:
        return []
