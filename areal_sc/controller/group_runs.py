"""One run of one group on a worker, up to the metadata of its rows.

consumes     groups, whoever admitted them, each with the worker that was chosen for it
waits for    the reply of `run_group`
unblocked by that reply, or the loss of the worker

given up     a run whose caller is cancelled goes on in the background until the worker, which is
             told to end it, has replied: only then nothing more can be sealed in its room
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from areal_sc.controller.background import Background
from areal_sc.controller.evaluation import MetricSums
from areal_sc.controller.group import Group
from areal_sc.controller.rejections import Rejections
from areal_sc.controller.rollout_workers import RolloutWorkers, RolloutWorkerState
from areal_sc.controller.worker_store import GroupRun, ShardOwner
from areal_sc.errors import ArealError
from areal_sc.metadata import BatchMetadata, PromptReference
from areal_sc.workers.calls import (
    GIVE_UP_GROUP,
    RUN_GROUP,
    GroupAttempt,
    GroupReply,
    RunGroup,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """A dataset and a workflow by number, as the workers know them."""

    dataset: int
    workflow: int
    num_prompts: int

    def reference(self, index: int, seed: int) -> PromptReference:
        """The dataset's prompt at `index`."""
        return PromptReference(self.dataset, index, seed)


@dataclass(frozen=True)
class GroupResult:
    """What became of a group.

    Attributes:
        batch: its rows, in the worker's store; None when all were rejected.
        cause: why most of the rejected episodes were; "empty" when the group gave no rows at all.
        metrics: sums of the workflow's own metrics over the episodes.
    """

    batch: BatchMetadata | None
    cause: str
    metrics: MetricSums

    @classmethod
    def of(cls, reply: GroupReply) -> GroupResult:
        rejected = reply.rejected
        cause = max(rejected, key=lambda cause: rejected[cause][0], default="empty")
        return cls(reply.batch, cause, reply.metrics)


class GroupRunner:
    """Runs groups on the workers of one RolloutController."""

    def __init__(
        self,
        group_size: int,
        workers: RolloutWorkers,
        rejections: Rejections,
        background: Background,
    ) -> None:
        self._group_size = group_size
        self._workers = workers
        self._rejections = rejections
        self._background = background
        self._tasks: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Ends the calls that go on; nobody waits for them any more."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def run(
        self, group: Group, source: Source, worker: RolloutWorkerState, owner: ShardOwner
    ) -> GroupResult:
        """Plays the group's episodes on `worker`; the rejected ones are counted.

        Its shard stays while `owner` needs it. Cancelled, the run is given up.

        Raises: WorkerLost: the worker died. What the engine raised.
        """
        run = GroupRun(owner, group.group_id, group.attempt)
        self._workers.begin_run(worker, run)
        call = self._spawn(
            self._workers.call(
                worker,
                RUN_GROUP,
                RunGroup(
                    group.group_id,
                    group.attempt,
                    group.admitted_version,
                    group.prompt,
                    source.workflow,
                    self._group_size,
                ),
            )
        )
        try:
            reply = await asyncio.shield(call)
        except asyncio.CancelledError:
            self._spawn(self._background.guard(self._give_up(worker, run, call)))
            raise
        except ArealError:
            self._workers.end_run(worker, run, None)
            raise
        result = GroupResult.of(reply)
        self._workers.end_run(worker, run, result.batch)
        self._rejections.add_group(reply.rejected, self._group_size)
        return result

    async def _give_up(
        self, worker: RolloutWorkerState, run: GroupRun, call: asyncio.Task[GroupReply]
    ) -> None:
        """Has the worker end the run, and waits until it has; what it sealed is swept."""
        attempt = GroupAttempt(run.group_id, run.attempt)
        outcomes = await asyncio.gather(
            self._workers.call(worker, GIVE_UP_GROUP, attempt), call, return_exceptions=True
        )
        batch = None
        for outcome in outcomes:
            if isinstance(outcome, ArealError):  # of a group that is nobody's any more
                logger.info("given_up_group=%d failed=%r", run.group_id, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            elif outcome is not None:
                batch = outcome.batch
        self._workers.end_run(worker, run, batch)
        self._workers.sweep_one(worker)
        self._workers.on_room()

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
