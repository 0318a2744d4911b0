"""Bugs to plant in the code under test: a simulation that finds none of them proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace
from simulation.virtual_loop import VirtualTimeLoop

from areal_sc.controller.ledger import Ledger
from areal_sc.controller.memory_snapshots import MemorySnapshots
from areal_sc.controller.node_workers import NodeWorkers
from areal_sc.controller.rollout import RolloutController
from areal_sc.controller.rollout_workers import RolloutWorkers
from areal_sc.controller.training_groups import TrainingGroups
from areal_sc.controller.worker_store import WorkerStore
from areal_sc.errors import WorkerLost
from areal_sc.metadata import RowMetadata
from areal_sc.transport.rpc.codec import ANY_INCARNATION
from areal_sc.workers.calls import GroupAttempt, GroupReply, Sweep
from areal_sc.workers.operations import Operations
from areal_sc.workers.spec import WorkerReport


@contextmanager
def operation_run_twice() -> Iterator[None]:
    """A repeat of an operation does not join it."""
    join = Operations.join

    async def join_none(self: Operations, operation: Any, *args: Any, **options: Any) -> Any:
        self.forget(operation)
        return await join(self, operation, *args, **options)

    with patch.object(Operations, "join", join_none):
        yield


@contextmanager
def refund_forgotten() -> Iterator[None]:
    """Rejected groups count against the staleness bound for ever."""

    def num_admitted(self: Ledger) -> int:
        return self._state.next_id

    with patch.object(Ledger, "num_admitted_not_rejected", property(num_admitted)):
        yield


@contextmanager
def fence_left_out() -> Iterator[None]:
    """Calls name no life of a worker, and its loss does not end them: the next life gets them."""

    def connect(self: NodeWorkers, worker: WorkerReport) -> Any:
        connection = self._runtime.transport.connect(
            worker.address, worker.name, ANY_INCARNATION, keeps_trying=True
        )
        connection.fail_pending = lambda error: None
        return connection

    with patch.object(NodeWorkers, "_connect", connect):
        yield


@contextmanager
def snapshot_counted_when_begun() -> Iterator[None]:
    """A snapshot counts before it is written; the rows that it will cover may go."""
    begin = MemorySnapshots.begin_when_due

    def begin_and_note(self: MemorySnapshots) -> None:
        begin(self)
        if self.is_writing:
            self._history.note_in_memory(self._history.version)

    with patch.object(MemorySnapshots, "begin_when_due", begin_and_note):
        yield


@contextmanager
def group_sent_before_its_record() -> Iterator[None]:
    """Groups, and the batch, do not wait for the journal."""
    begin = TrainingGroups.__init__

    async def at_once() -> None:
        pass

    def begin_without(self: TrainingGroups, *args: Any) -> None:
        *before, _, new_id = args
        begin(self, *before, at_once, new_id)

    with patch.object(TrainingGroups, "__init__", begin_without):
        yield


@contextmanager
def version_announced_before_its_record() -> Iterator[None]:
    """The journal is not waited for between the record of a version and its announcement."""

    async def record(
        self: RolloutController, version: int, trained_rows: Iterable[RowMetadata]
    ) -> None:
        self.groups.record_version(version, trained_rows)

    with patch.object(RolloutController, "record_version_async", record):
        yield


@contextmanager
def pause_counted_as_silence() -> Iterator[None]:
    """The controllers' clock goes on while they stand still."""

    def pause(self: VirtualTimeLoop, duration_s: float) -> None:
        self.paused_until_s = max(self.world_s, self.paused_until_s) + duration_s

    with patch.object(VirtualTimeLoop, "pause", pause):
        yield


@contextmanager
def late_rejection_taken() -> Iterator[None]:
    """The end of an attempt that was lost counts as a rejection of its group."""
    run_group = RolloutWorkers.run_group

    async def run(self: RolloutWorkers, state: Any, group: Any, source: Any) -> GroupReply:
        try:
            return await run_group(self, state, group, source)
        except WorkerLost:
            return GroupReply(GroupAttempt(group.group_id, group.attempt))

    with patch.object(RolloutWorkers, "run_group", run):
        yield


@contextmanager
def shard_not_swept() -> Iterator[None]:
    """What earlier lives of a worker have sealed is never thrown away."""
    plan_sweep = WorkerStore.plan_sweep

    def plan(self: WorkerStore, incarnation: str) -> tuple[Sweep, list[str]]:
        sweep, dead_ids = plan_sweep(self, incarnation)
        return replace(sweep, adopted_live=None), dead_ids

    with patch.object(WorkerStore, "plan_sweep", plan):
        yield


PLANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    plant.__name__.replace("_", "-"): plant
    for plant in (
        operation_run_twice,
        refund_forgotten,
        fence_left_out,
        group_sent_before_its_record,
        version_announced_before_its_record,
        snapshot_counted_when_begun,
        pause_counted_as_silence,
        late_rejection_taken,
        shard_not_swept,
    )
}
