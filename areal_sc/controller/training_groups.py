"""The groups of training: from admission, within the staleness bound, to the batch.

    prompts (references)
         |
    admission ---> queued ---> running on a worker
      eq. 3            |            |  reply: metadata
         ^             '------------'
         | refunds                  v
         '--- rejected <-------- finished ---> batch of the current version

consumes     prompts, policy versions, the ends of running groups
waits for    as many finished groups as the batch needs
unblocked by each group that ends, and by `Background`'s failure and time limit

Each running group is one task that waits for one RPC. Admission, replies, new versions and batch
forming all run on one event loop and change the ledger between two awaits only, so there is nothing
to lock; whoever waits for a change of that state waits on `Background`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from areal_sc.config.schema import RolloutConfig
from areal_sc.controller.background import Background
from areal_sc.controller.evaluation import MetricSums, mean_metrics
from areal_sc.controller.group import Group, GroupState
from areal_sc.controller.group_runs import GroupRunner, Source
from areal_sc.controller.ledger import Ledger
from areal_sc.controller.rejections import Rejections
from areal_sc.controller.rollout_workers import RolloutWorkers
from areal_sc.controller.staleness import StalenessPolicy
from areal_sc.metadata import BatchMetadata, PromptReference, RowMetadata, concat
from areal_sc.workflows.prompts import prompt_at


class TrainingGroups:
    """Admits groups, runs them, and forms the batch of each policy version.

    Args:
        new_id: names batches.

    Attributes:
        ledger: the state of every group.
        version: the policy version that admission and batch forming count from.
        total_steps: training steps that the run will make; nothing is admitted beyond what they
            need. None admits without end.
        num_prompts_taken: position in the endless stream of shuffled prompts.
        batch_metrics: means of the workflow's own metrics over the newest batch.
    """

    def __init__(
        self,
        config: RolloutConfig,
        workers: RolloutWorkers,
        runner: GroupRunner,
        rejections: Rejections,
        background: Background,
        new_id: Callable[[], str],
    ) -> None:
        self.ledger = Ledger()
        self.version = 0
        self.total_steps: int | None = None
        self.num_prompts_taken = 0
        self.batch_metrics: dict[str, float] = {}
        self._config = config
        self._workers = workers
        self._runner = runner
        self._rejections = rejections
        self._background = background
        self._new_id = new_id
        self._policy = StalenessPolicy(
            config.max_staleness, config.train_batch_groups, config.over_bound
        )
        self._source: Source | None = None
        self._is_paused = False
        self._returned_prompts: deque[PromptReference] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._group_tasks: dict[int, asyncio.Task[None]] = {}
        self._group_metrics: dict[int, MetricSums] = {}

    async def close(self) -> None:
        """Ends all running groups; their failures are the background's already."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def num_open(self) -> int:
        """Groups that are queued or running."""
        return self.ledger.num(GroupState.queued) + self.ledger.num(GroupState.running)

    async def next_batch(self, source: Source) -> BatchMetadata:
        """The batch of the current version; its rows live until the next call.

        Groups are admitted from `source` from here on, also between two calls.

        Raises: TooManyRejections, WorkerLost: as of a group. WaitTimeout: nothing changed for too
            long.
        """
        self._source = source
        finished = self.ledger.in_state(GroupState.finished)
        await self._workers.sweep([group.batch for group in finished if group.batch])
        for group in self.ledger.in_state(GroupState.queued):
            if group.group_id not in self._group_tasks:  # restored
                self._spawn(group, source)
        self.admit()
        while True:
            self._background.raise_failure()
            decision = self._policy.form_batch(self.ledger.unconsumed(), self.version)
            for group in decision.stale:
                self._reject_stale(group)
            if decision.groups is not None:
                return self._consume(decision.groups)
            self.admit()
            await self._background.wait(
                f"{decision.num_missing} more groups for the batch of version {self.version}"
            )

    def begin_version(self, version: int, trained_rows: Iterable[RowMetadata]) -> None:
        """A new policy version exists; `admit` follows when workers may get it.

        Args:
            trained_rows: the rows whose training made it; those of admitted groups enter the
                account.
        """
        self.ledger.record_trained(row for row in trained_rows if row.group_id >= 0)
        self.version = version
        for group in self._policy.expired(list(self.ledger.unconsumed()), version):
            self._reject_stale(group)

    def pause(self) -> None:
        """Stops admission; groups that run go on."""
        self._is_paused = True

    def resume(self) -> None:
        """Goes on after `pause`."""
        self._is_paused = False
        self.admit()

    def admit(self) -> None:
        """Admits groups while eq. 3, concurrency and store bytes allow."""
        if self._source is None or self._is_paused or self._background.has_failed:
            return
        num_counted = self.ledger.num_admitted_not_rejected
        num_admissible = self._policy.num_admissible(self.version, num_counted)
        if self.total_steps is not None:
            needed = self.total_steps * self._config.train_batch_groups
            num_admissible = min(num_admissible, needed - num_counted)
        for _ in range(num_admissible):
            has_slot = self.num_open < self._config.max_concurrent_groups
            if not has_slot or not self._workers.has_room(self.num_open):
                return
            group = self.ledger.admit(self._next_prompt(self._source), self.version)
            self._spawn(group, self._source)

    def snapshot(self) -> dict[str, Any]:
        """What a new controller needs to go on from here, msgpack-able; see `restore`."""
        return {
            "version": self.version,
            "num_prompts_taken": self.num_prompts_taken,
            "returned_prompts": [astuple(prompt) for prompt in self._returned_prompts],
            "ledger": self.ledger.snapshot(),
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Goes on from `snapshot`, before the first batch; unconsumed groups run again."""
        self.version = int(snapshot["version"])
        self.num_prompts_taken = int(snapshot["num_prompts_taken"])
        self._returned_prompts = deque(PromptReference(*p) for p in snapshot["returned_prompts"])
        self.ledger = Ledger.restore(snapshot["ledger"])
        self.ledger.requeue_all()

    def _next_prompt(self, source: Source) -> PromptReference:
        """Prompts of stale groups come again first; else the shuffled stream goes on."""
        if self._returned_prompts:
            return self._returned_prompts.popleft()
        index = prompt_at(self.num_prompts_taken, source.num_prompts, self._config.seed)
        self.num_prompts_taken += 1
        return source.reference(index, self._config.seed)

    def _spawn(self, group: Group, source: Source) -> None:
        task = asyncio.create_task(
            self._background.guard(self._run(group, source)), name=f"group {group.group_id}"
        )
        self._tasks.add(task)
        self._group_tasks[group.group_id] = task
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._group_tasks.pop(group.group_id, None))

    async def _run(self, group: Group, source: Source) -> None:
        """From queued to finished or rejected."""
        worker = await self._runner.wait_for_worker(group.admitted_version)
        attempt = self.ledger.start(group.group_id, worker.name)
        result = await self._runner.run(group, source, worker)
        if result.batch is None:
            self.ledger.reject(group.group_id, result.cause)
        elif self.ledger.finish(group.group_id, attempt, result.batch):
            worker.num_held += 1
            self._workers.recount(worker)
            self._group_metrics[group.group_id] = result.metrics
        self._rejections.check_rate()
        self.admit()
        self._background.notify()

    def _consume(self, groups: Sequence[Group]) -> BatchMetadata:
        ids = [group.group_id for group in groups]
        batches = self.ledger.consume(ids, self.version)
        for rows in batches:
            self._workers.release(rows)  # the next sweep is that of the next batch
        self.batch_metrics = mean_metrics(
            [self._group_metrics.pop(group_id, {}) for group_id in ids]
        )
        batch = concat(
            batches,
            batch_id=self._new_id(),
            global_step=self.version,
            min_token_version=self._policy.min_token_version(self.version),
        )
        self.admit()
        return batch

    def _reject_stale(self, group: Group) -> None:
        """Refunds the group and ends it where it runs; its prompt is admitted anew."""
        if group.state == GroupState.running:
            self._rejections.add_stale_running(self._config.group_size)
        if group.batch is not None:
            self._rejections.add_stale_finished(group.batch.rows)
            self._group_metrics.pop(group.group_id, None)
            self._workers.release(group.batch)
        task = self._group_tasks.pop(group.group_id, None)
        if task:
            task.cancel()
        self.ledger.reject(group.group_id, "stale")
        self._returned_prompts.append(group.prompt)
