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
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from areal_sc.batch_wire import batch_from_wire
from areal_sc.controller.background import Background
from areal_sc.controller.evaluation import MetricSums
from areal_sc.controller.group import Group
from areal_sc.controller.rejections import Rejections
from areal_sc.controller.rollout_workers import RolloutWorkers, RolloutWorkerState
from areal_sc.controller.worker_store import GroupRun, ShardOwner
from areal_sc.errors import ArealError
from areal_sc.metadata import BatchMetadata, PromptReference

logger = logging.getLogger(__name__)


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
        cause: why most of the rejected rows were; "empty" when the group gave no rows at all.
        metrics: sums of the workflow's own metrics over the rows.
    """

    batch: BatchMetadata | None
    cause: str
    metrics: MetricSums

    @classmethod
    def from_reply(cls, reply: Mapping[str, Any]) -> GroupResult:
        rejected, batch = reply["rejected"], reply["batch"]
        return cls(
            batch=None if batch is None else batch_from_wire(batch),
            cause=max(rejected, key=lambda cause: int(rejected[cause][0]), default="empty"),
            metrics={name: (total, count) for name, (total, count) in reply["metrics"].items()},
        )


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
        """Plays the group's episodes on `worker`; its rejected rows are counted.

        Its shard stays while `owner` needs it. Cancelled, the run is given up.

        Raises: WorkerLost: the worker died. What the engine raised.
        """
        run = GroupRun(owner, group.group_id, group.attempt)
        self._workers.begin_run(worker, run)
        call = self._spawn(
            self._workers.call(
                worker,
                "run_group",
                {
                    "group_id": group.group_id,
                    "attempt": group.attempt,
                    "admitted_version": group.admitted_version,
                    "dataset": group.prompt.dataset,
                    "index": group.prompt.index,
                    "workflow": source.workflow,
                    "group_size": self._group_size,
                },
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
        result = GroupResult.from_reply(reply)
        self._workers.end_run(worker, run, result.batch)
        self._rejections.add_group(reply["rejected"], self._group_size)
        return result

    async def _give_up(
        self, worker: RolloutWorkerState, run: GroupRun, call: asyncio.Task[Any]
    ) -> None:
        """Has the worker end the run, and waits until it has; what it sealed is swept."""
        order = {"group_id": run.group_id, "attempt": run.attempt}
        outcomes = await asyncio.gather(
            self._workers.call(worker, "give_up_group", order), call, return_exceptions=True
        )
        batch = None
        for outcome in outcomes:
            if isinstance(outcome, ArealError):  # of a group that is nobody's any more
                logger.info("given_up_group=%d failed=%r", run.group_id, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            elif outcome is not None:
                batch = GroupResult.from_reply(outcome).batch
        self._workers.end_run(worker, run, batch)
        self._workers.sweep_one(worker)
        self._workers.on_room()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
