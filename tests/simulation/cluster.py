"""A `Scheduler` and a `Transport` for controllers that run in virtual time.

The cluster keeps its own books of what its workers were asked to do, for tests to compare with.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from simulation.behavior import Behavior, Number
from simulation.connection import SimulatedConnection
from simulation.workers import (
    SimulatedRolloutWorker,
    SimulatedStore,
    SimulatedTrainWorker,
    SimulatedWorker,
)

from areal_sc.config.schema import SchedulerConfig, TransportConfig
from areal_sc.errors import ArealError, PeerLost
from areal_sc.metadata import BatchMetadata, RowMetadata
from areal_sc.schedulers.base import LaunchRequest, RunningWorker
from areal_sc.workers.spec import WorkerReport, WorkerSpec


@dataclass(frozen=True)
class GroupStart:
    """A worker was asked to run a group."""

    time_s: float
    worker: str
    worker_version: int
    group_id: int
    attempt: int
    admitted_version: int
    dataset_index: int
    num_running: int  # groups that ran then, on all workers


@dataclass
class TrainedStep:
    """What the ranks were given to train at one policy version, over all minibatches."""

    version: int
    time_s: float
    num_running_groups: int
    rows: list[RowMetadata] = field(default_factory=list)
    min_token_versions: set[int | None] = field(default_factory=set)


class SimulatedCluster:
    """Starts simulated workers and connects to them.

    Attributes:
        rollout_class, train_class: what it starts.
        workers: by name, e.g. `rollout/0`.
        starts: groups that workers were asked to run, in order.
        trained: what the ranks trained, in order.
        sealed_versions: (time, version) of each rank's publications.
        on_forgotten: is told the id and the group of every shard of rows that a sweep drops.
    """

    def __init__(self, run_dir: Path, behavior: Behavior, seed: int = 0) -> None:
        self.run_dir = run_dir
        self.rollout_class: type[SimulatedWorker] = SimulatedRolloutWorker
        self.train_class: type[SimulatedWorker] = SimulatedTrainWorker
        self.config = SchedulerConfig(run_dir=str(run_dir), transport=TransportConfig())
        self.behavior = behavior
        self.rng = random.Random(seed)
        self.workers: dict[str, SimulatedWorker] = {}
        self.starts: list[GroupStart] = []
        self.trained: list[TrainedStep] = []
        self.sealed_versions: list[tuple[float, int]] = []
        self.on_forgotten: Callable[[str, int], None] = lambda shard_id, group_id: None
        self._ids = itertools.count()

    # ------------------------------------------------------------------ Scheduler

    async def launch(self, request: LaunchRequest) -> RunningWorker:
        await self.spend(self.rng.random())
        incarnation = f"{next(self._ids):012x}"
        kind = self.rollout_class if request.role == "rollout" else self.train_class
        worker = kind(self, request, incarnation)
        self.workers[worker.name] = worker
        spec = WorkerSpec(
            role=request.role,
            index=request.index,
            run_id="simulated",
            incarnation=incarnation,
            engine=request.engine,
            engine_config=request.engine_config,
            run_dir=self.config.run_dir,
            memory_root=self.config.run_dir,
            transport=asdict(self.config.transport),
            store_bytes=request.store_bytes,
            heartbeat_interval_s=self.config.heartbeat_interval_s,
            orphan_timeout_s=self.config.orphan_timeout_s,
        )
        report = WorkerReport(
            name=worker.name,
            incarnation=incarnation,
            address=worker.address,
            beat_address=worker.beat_address,
            pid=10_000 + len(self.workers),
            node=worker.node,
        )
        return RunningWorker(spec, report)

    async def exit_statuses(self, workers: Sequence[RunningWorker]) -> dict[str, str]:
        statuses = {worker.name: self.workers[worker.name].exit_status for worker in workers}
        return {name: status for name, status in statuses.items() if status is not None}

    async def stop(self, workers: list[RunningWorker]) -> None:
        for worker in workers:
            self.workers[worker.name].end("signal 9 (SIGKILL)")

    def close(self) -> None:
        """Nothing is left to close."""

    # ------------------------------------------------------------------ for workers and tests

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def rollout_workers(self) -> list[SimulatedRolloutWorker]:
        return [w for w in self.workers.values() if isinstance(w, SimulatedRolloutWorker)]

    @property
    def train_workers(self) -> list[SimulatedTrainWorker]:
        return [w for w in self.workers.values() if isinstance(w, SimulatedTrainWorker)]

    def workers_on(self, node: str) -> list[SimulatedWorker]:
        return [worker for worker in self.workers.values() if worker.node == node]

    def new_id(self) -> str:
        """Deterministic, of the length of real ids."""
        return f"{next(self._ids):012x}"

    def owner(self, node_id: str, address: str) -> SimulatedStore:
        worker = self.workers[node_id]
        if worker.exit_status is not None or worker.address != address:
            raise PeerLost(f"{node_id} at {address} is lost")
        return worker.store

    def draw(self, number: Number) -> float:
        return number(self.rng) if callable(number) else number

    async def spend(self, duration: Number) -> None:
        await asyncio.sleep(self.draw(duration))

    def note_start(self, worker: SimulatedRolloutWorker, args: dict[str, Any]) -> None:
        self.starts.append(
            GroupStart(
                self.now_s,
                worker.name,
                worker.version,
                args["group_id"],
                args["attempt"],
                args["admitted_version"],
                args["index"],
                sum(len(worker.running) for worker in self.rollout_workers),
            )
        )

    def note_trained(self, version: int, batch: BatchMetadata) -> None:
        if not self.trained or self.trained[-1].version != version:
            num_running = sum(len(worker.running) for worker in self.rollout_workers)
            self.trained.append(TrainedStep(version, self.now_s, num_running))
        self.trained[-1].rows += batch.rows
        self.trained[-1].min_token_versions.add(batch.min_token_version)


class SimulatedTransport:
    """Connections to the workers of one cluster."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster

    def connect(
        self, address: str, node_id: str, incarnation: str, *, keeps_trying: bool = False
    ) -> SimulatedConnection:
        worker = self._cluster.workers[node_id]
        assert address in (worker.address, worker.beat_address)
        connection = SimulatedConnection(
            worker,
            incarnation,
            self._cluster.behavior.latency_s,
            is_heartbeat=address == worker.beat_address,
            keeps_trying=keeps_trying,
        )
        worker.connections.append(connection)
        return connection

    async def call_all(
        self,
        calls: Sequence[tuple[SimulatedConnection, dict[str, Any]]],
        method: str,
        *,
        timeout_s: float,
        stops_at_error: bool = False,
    ) -> list[Any | ArealError]:
        running = [
            asyncio.create_task(connection.call(method, args, timeout_s=timeout_s))
            for connection, args in calls
        ]
        until = asyncio.FIRST_EXCEPTION if stops_at_error else asyncio.ALL_COMPLETED
        try:
            done, _ = await asyncio.wait(running, return_when=until) if running else (set(), None)
            failed = [call for call in running if call in done and call.exception()]
            if failed and stops_at_error:
                return [call.exception() if call is failed[0] else None for call in running]
            return [call.exception() or call.result() for call in running]
        finally:
            for call in running:
                call.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def close(self) -> None:
        """Nothing is left to close: connections are closed by their users."""
