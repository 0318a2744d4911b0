"""One run of one group on a worker: from the wait for a place to the metadata of its rows.

consumes     groups, whoever admitted them
waits for    a worker that holds the group's version and has room; then the reply of `run_group`
unblocked by a weight update, a group that ends, a sweep; the reply, or the loss of the worker
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal_sc.batch_wire import batch_from_wire
from areal_sc.controller.background import Background
from areal_sc.controller.evaluation import MetricSums
from areal_sc.controller.group import Group
from areal_sc.controller.rejections import Rejections
from areal_sc.controller.rollout_workers import RolloutWorkers, RolloutWorkerState
from areal_sc.metadata import BatchMetadata, PromptReference


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

    async def wait_for_worker(self, version: int) -> RolloutWorkerState:
        """The least loaded worker that holds `version` or a later one and has room.

        Raises: WaitTimeout: nothing changed for too long. The failure of background work.
        """
        return await self._workers.take(version)

    async def run(self, group: Group, source: Source, worker: RolloutWorkerState) -> GroupResult:
        """Plays the group's episodes on `worker`; its rejected rows are counted.

        Raises: WorkerLost: the worker died. What the engine raised.
        """
        worker.num_running += 1
        self._workers.recount(worker)
        try:
            reply = await self._workers.call(
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
        finally:
            worker.num_running -= 1
            self._workers.recount(worker)
            self._background.notify()  # a group that leaves no rows leaves room
        self._rejections.add_group(reply["rejected"], self._group_size)
        return GroupResult.from_reply(reply)
