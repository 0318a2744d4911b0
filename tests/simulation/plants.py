"""Bugs to plant in the code under test: a simulation that finds none of them proves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

from msgspec.structs import replace
from simulation.process import Process
from simulation.virtual_loop import VirtualTimeLoop

from areal_sc.controller.ledger import journal
from areal_sc.controller.ledger.ledger import Ledger
from areal_sc.controller.ledger.ledger_records import Split
from areal_sc.controller.rollout.groups import GroupTools
from areal_sc.controller.rollout.kept_episodes import KEPT, KeptEpisodes
from areal_sc.controller.rollout.rollout_controller import RolloutController
from areal_sc.controller.rollout.rollout_workers import RolloutWorkers
from areal_sc.controller.rollout.training_groups import TrainingGroups
from areal_sc.controller.train.rank_state import MemorySnapshots
from areal_sc.controller.worker_store import WorkerStore
from areal_sc.errors import ArealError, WorkerLost
from areal_sc.fleet.node_workers import NodeWorkers
from areal_sc.metadata import RowMetadata
from areal_sc.nodes.spec import WorkerReport
from areal_sc.run.run_owner import RunTerm
from areal_sc.transport.rpc.codec import ANY_INCARNATION
from areal_sc.transport.rpc.newest_term import NewestTerm
from areal_sc.workers.calls import GroupAttempt, GroupReply, Sweep
from areal_sc.workers.group_runs import GroupRuns
from areal_sc.workers.operations import Operations


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
def version_announced_before_its_snapshot() -> Iterator[None]:
    """A step is complete while the snapshot in memory of its version is taken."""
    take, taking = MemorySnapshots.take, set[asyncio.Task[None]]()

    async def take_later(self: MemorySnapshots, version: int) -> None:
        async def take_at_last() -> None:
            with suppress(ArealError):
                await take(self, version)

        taking.add(asyncio.create_task(take_at_last()))

    with patch.object(MemorySnapshots, "take", take_later):
        yield


@contextmanager
def group_sent_before_its_record() -> Iterator[None]:
    """Groups, and the batch, do not wait for the journal."""
    begin = TrainingGroups.__init__

    async def at_once() -> None:
        pass

    def begin_without(self: TrainingGroups, tools: GroupTools) -> None:
        begin(self, tools)
        tools.workers.durable = at_once

    with patch.object(TrainingGroups, "__init__", begin_without):
        yield


@contextmanager
def version_announced_before_its_record() -> Iterator[None]:
    """The journal is not waited for between the record of a version and its announcement."""

    async def record(
        self: RolloutController,
        version: int,
        trained_rows: Iterable[RowMetadata],
        splits: tuple[Split, ...],
    ) -> None:
        self.groups.record_version(version, trained_rows, splits)

    with patch.object(RolloutController, "record_version_async", record):
        yield


@contextmanager
def pause_counted_as_silence() -> Iterator[None]:
    """The controllers' clock goes on while they stand still."""

    def pause(self: VirtualTimeLoop, process: Process, duration_s: float) -> None:
        process.paused_until_s = self._start_s(process) + duration_s

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


@contextmanager
def term_not_checked() -> Iterator[None]:
    """Workers, agents and the disk take what a controller of an earlier term asks for."""
    with (
        patch.object(NewestTerm, "refusal", lambda self, term: None),
        patch.object(RunTerm, "is_over", property(lambda self: False)),
    ):
        yield


@contextmanager
def leftovers_swept_before_they_are_known() -> Iterator[None]:
    """A later start does not look up which shards of an earlier one its ledger needs."""

    def expect(self: WorkerStore, shards: Any) -> None: ...

    with patch.object(WorkerStore, "expect", expect):
        yield


@contextmanager
def reply_acknowledged_when_sent() -> Iterator[None]:
    """Workers forget the reply of a run once they have sent it."""
    join = GroupRuns.join

    async def join_and_forget(self: GroupRuns, run: GroupAttempt, play: Any) -> GroupReply:
        reply = await join(self, run, play)
        self._replies.pop(run, None)
        return reply

    with patch.object(GroupRuns, "join", join_and_forget):
        yield


@contextmanager
def reply_of_an_earlier_attempt_taken() -> Iterator[None]:
    """Whoever is asked for an attempt gives what came of an earlier one, if anything did."""
    join = GroupRuns.join
    known: WeakKeyDictionary[Any, dict[int, GroupReply]] = WeakKeyDictionary()  # by run

    async def join_earlier(self: GroupRuns, run: GroupAttempt, play: Any) -> GroupReply:
        replies = known.setdefault(asyncio.get_running_loop(), {})
        if run.group_id not in replies:
            replies[run.group_id] = await join(self, run, play)
        return replace(replies[run.group_id], run=run)

    with patch.object(GroupRuns, "join", join_earlier):
        yield


@contextmanager
def ledger_restored_without_its_last_records() -> Iterator[None]:
    """A later start reads the state at the head of a segment, and not the records after it."""

    def replay_nothing(ledger: Ledger, records: Any) -> None: ...

    with patch.object(journal, "replay", replay_nothing):
        yield


@contextmanager
def rows_dropped_with_a_worker_that_leaves() -> Iterator[None]:
    """A worker leaves when its groups have ended, whoever needs their rows."""
    with patch.object(WorkerStore, "needs_any", property(lambda self: False)):
        yield


@contextmanager
def finished_episodes_played_again() -> Iterator[None]:
    """A further attempt of a group is told of no episodes of those before."""
    with patch.object(KeptEpisodes, "of_group", lambda self, group_id: ()):
        yield


@contextmanager
def kept_episodes_swept() -> Iterator[None]:
    """Nobody needs finished episodes of groups that run again."""
    with patch.object(KeptEpisodes, "needs", lambda self, run: False):
        yield


@contextmanager
def kept_episodes_left_behind() -> Iterator[None]:
    """Finished episodes of groups that have ended, or were dropped, are needed for ever."""
    with (
        patch.object(KeptEpisodes, "needs", lambda self, run: run.attempt == KEPT),
        patch.object(KeptEpisodes, "hand_over", lambda self, group_id, worker: []),
    ):
        yield


PLANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    plant.__name__.replace("_", "-"): plant
    for plant in (
        operation_run_twice,
        refund_forgotten,
        fence_left_out,
        group_sent_before_its_record,
        version_announced_before_its_record,
        version_announced_before_its_snapshot,
        pause_counted_as_silence,
        late_rejection_taken,
        shard_not_swept,
        term_not_checked,
        leftovers_swept_before_they_are_known,
        reply_acknowledged_when_sent,
        reply_of_an_earlier_attempt_taken,
        ledger_restored_without_its_last_records,
        rows_dropped_with_a_worker_that_leaves,
        finished_episodes_played_again,
        kept_episodes_swept,
        kept_episodes_left_behind,
    )
}
