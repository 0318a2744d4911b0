"""RolloutController: keeps generation busy, within the staleness bound; forms training batches.

    prompts (references)                                  publish_weights
         |                                                      |
    admission ---> queued ---> running on a worker              v
      eq. 3            |            |  reply: metadata    weight updates, one a worker at a time,
         ^             '------------'       |             newest first; running groups go on
         | refunds                          v
         '--- rejected <---------------- finished ---> batch of the current version

Each running group is one task that waits for one RPC: `run_group`, whose reply is the group's
metadata. Admission, replies, weight updates and batch forming all run on one event loop and change
the ledger between two awaits only, so there is nothing to lock; whoever waits for a change of
that state waits on `Background`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

from areal_sc.batch_wire import batch_from_wire
from areal_sc.config.placement import rollout_devices
from areal_sc.config.plain import to_plain
from areal_sc.config.schema import RolloutConfig, RolloutEngine
from areal_sc.config.sglang_checks import sglang_of_worker
from areal_sc.controller.background import Background
from areal_sc.controller.control_loop import Shell
from areal_sc.controller.evaluation import EvaluationOutcome, MetricSums, mean_metrics
from areal_sc.controller.fleet import Fleet
from areal_sc.controller.group import Group, GroupState
from areal_sc.controller.ledger import Ledger
from areal_sc.controller.rollout_workers import (
    RPC_MARGIN_S,
    RolloutWorkers,
    RolloutWorkerState,
    update_timeout_s,
)
from areal_sc.controller.runtime import Runtime
from areal_sc.controller.staleness import StalenessPolicy
from areal_sc.engines.base import EngineHandle
from areal_sc.errors import TooManyRejections, WorkerLost, WorkflowError
from areal_sc.metadata import (
    BatchMetadata,
    PromptReference,
    RowMetadata,
    WeightsReference,
    concat,
)
from areal_sc.schedulers.base import LaunchRequest, Scheduler
from areal_sc.workflows.base import Workflow
from areal_sc.workflows.prompts import prompt_at
from areal_sc.workflows.sources import PromptSource, SourceRegistry

logger = logging.getLogger(__name__)


@dataclass
class Counters:
    """What happened since the start, for metrics.

    Attributes:
        rejected_rows: rows rejected by their workflow or reward, by cause.
        rejection_examples: cause -> one full message.
        num_stale_rows: rows of groups that were rejected as stale, finished or running.
        wasted_tokens: trained-to-be tokens of finished groups among them.
    """

    rejected_rows: Counter[str] = field(default_factory=Counter)
    rejection_examples: dict[str, str] = field(default_factory=dict)
    num_stale_rows: int = 0
    wasted_tokens: int = 0


@dataclass(frozen=True)
class Source:
    """A dataset and a workflow by number."""

    dataset: int
    workflow: int
    num_prompts: int


class RolloutController(Shell):
    """Runs the user's workflow over prompts on any number of rollout workers.

    Methods block; each has an awaitable twin, named `..._async`.

    Attributes:
        ledger: the state of every group.
        version: the policy version that admission and batch forming count from.
        num_prompts_taken: position in the endless stream of shuffled prompts.
        total_steps: training steps that the run will make; nothing is admitted beyond what they
            need. None admits without end.
    """

    def __init__(
        self, engine: EngineHandle, scheduler: Scheduler, *, runtime: Runtime | None = None
    ) -> None:
        self.engine = engine
        self.config: RolloutConfig = engine.config
        self.scheduler = scheduler
        self.ledger = Ledger()
        self.version = 0
        self.num_prompts_taken = 0
        self.total_steps: int | None = None
        self.counters = Counters()
        self.policy = StalenessPolicy(
            self.config.max_staleness, self.config.train_batch_groups, self.config.over_bound
        )
        self._owns_transport = runtime is None
        self._runtime = runtime or Runtime.create(scheduler.keys)
        self._background = Background(
            RPC_MARGIN_S
            + max(self.config.group_timeout_s + RPC_MARGIN_S, update_timeout_s(self.config)),
            lambda: f"groups: {self.ledger.account()}",
        )
        self._fleet = Fleet(scheduler, self._runtime, on_lost=self._note_loss)
        self._workers = RolloutWorkers(self.config, self._fleet, self._background)
        self._sources = SourceRegistry(Path(scheduler.config.run_dir))
        self._source: Source | None = None
        self._paused = False
        self._returned_prompts: deque[PromptReference] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._group_tasks: dict[int, asyncio.Task[None]] = {}
        self._group_metrics: dict[int, MetricSums] = {}
        self._recent_rows: deque[tuple[int, int]] = deque(maxlen=self.config.rejection_window)
        self._num_outside_groups = 0
        self._outside_batches: list[BatchMetadata] = []
        self.batch_metrics: dict[str, float] = {}

    async def start_async(self) -> None:
        """Starts the workers and builds the engine in each.

        Raises: WorkerStartError, ModelError: with the worker's own words.
        """
        device, num_devices = rollout_devices(self.config)
        await self._fleet.launch(
            [
                LaunchRequest(
                    role="rollout",
                    index=index,
                    engine=type(self.engine).__name__,
                    engine_config=to_plain(self._config_of_worker(index)),
                    device=device,
                    store_bytes=self.config.store_bytes,
                    num_devices=num_devices,
                )
                for index in range(self.config.num_workers)
            ]
        )
        self._workers.track(self._fleet.members)
        self._workers.check_room()
        await self._workers.initialize()

    async def close_async(self) -> None:
        """Ends all running groups, then the workers."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # failures are the background's
        await self._workers.close()
        await self._fleet.close()
        if self._owns_transport:
            await self._runtime.transport.close()

    @property
    def num_bytes(self) -> int:
        """Bytes on this controller's sockets so far."""
        return self._fleet.num_bytes

    async def prepare_batch_async(self, prompts: PromptSource, workflow: Workflow) -> BatchMetadata:
        """The batch to train the current policy version on.

        Generation goes on from here, also between two calls, and admits what the staleness bound
        allows. A batch's rows live until the next call.

        Raises: WorkflowError: the workflow or dataset cannot be used. TooManyRejections: most
            rows are rejected. WorkerLost: a worker died. WaitTimeout: no group ended for longer
            than a group may take.
        """
        self._source = self.register(prompts, workflow)
        await self._forget_outside_batches()
        finished = self.ledger.in_state(GroupState.finished)
        await self._workers.sweep([group.batch for group in finished if group.batch])
        for group in self.ledger.in_state(GroupState.queued):
            if group.group_id not in self._group_tasks:  # restored
                self._spawn_group(group, self._source)
        self._admit()
        while True:
            self._background.raise_failure()
            decision = self.policy.form_batch(self.ledger.unconsumed(), self.version)
            for group in decision.stale:
                self._reject_stale(group)
            if decision.groups is not None:
                return self._consume(decision.groups)
            self._admit()
            await self._background.wait(
                f"{decision.num_missing} more groups for the batch of version {self.version}"
            )

    async def rollout_batch_async(
        self, prompts: PromptSource, workflow: Workflow, num_groups: int | None = None
    ) -> BatchMetadata:
        """Runs `num_groups` groups (None: the whole dataset), in order, and waits for all.

        They are outside of admission, staleness and the ledger, and so have negative group ids;
        rejected groups are missing from the batch. Its rows live until the next `rollout_batch` or
        `prepare_batch`.

        Raises: WorkflowError: every group was rejected. WorkerLost: a worker died. WaitTimeout:
            the stores have no room for so many groups.
        """
        source = self.register(prompts, workflow)
        await self._forget_outside_batches()
        indices = range(source.num_prompts if num_groups is None else num_groups)
        groups = []
        for index in indices:
            self._num_outside_groups += 1
            prompt = self._reference(source, index % source.num_prompts)
            groups.append(Group(-self._num_outside_groups, prompt, self.version))
        results = await self._gather([self._run_outside_group(g, source) for g in groups])
        batches = [batch for batch in results if batch is not None]
        if not batches:
            raise WorkflowError(
                f"all {len(groups)} groups were rejected: {_causes(self.counters.rejected_rows)}"
            )
        return concat(batches, batch_id=self._runtime.new_id(), global_step=self.version)

    async def evaluate_async(
        self,
        prompts: PromptSource,
        workflow: Workflow,
        *,
        num_prompts: int | None = None,
        temperature: float | None = None,
    ) -> EvaluationOutcome:
        """Runs one episode a prompt and averages rewards and metrics; trains on nothing.

        With several workers it runs on one, which keeps its weights until the evaluation is done;
        with one worker, `versions` tells which versions took part. Training generation goes on.

        Args:
            prompts: the dataset; its first `num_prompts` rows are evaluated.
            workflow: the episode.
            num_prompts: None: all.
            temperature: replaces that of the run; 0 is greedy; None keeps it.
        """
        source = self.register(prompts, workflow)
        num_prompts = min(num_prompts or source.num_prompts, source.num_prompts)
        async with self._workers.held_for_evaluation() as worker:
            replies = await self._gather(
                [
                    self._workers.call(
                        worker,
                        "run_evaluation",
                        {
                            "dataset": source.dataset,
                            "index": index,
                            "workflow": source.workflow,
                            "evaluation": {"temperature": temperature},
                        },
                    )
                    for index in range(num_prompts)
                ]
            )
        return EvaluationOutcome.of(replies)

    def begin_evaluation(
        self,
        prompts: PromptSource,
        workflow: Workflow,
        *,
        num_prompts: int | None = None,
        temperature: float | None = None,
    ) -> Future[EvaluationOutcome]:
        """`evaluate` beside training: returns at once; the result is in the future."""
        return self._submit(
            self.evaluate_async(prompts, workflow, num_prompts=num_prompts, temperature=temperature)
        )

    async def state_async(self) -> dict[str, Any]:
        """What a new controller needs to go on from here, msgpack-able; see `restore`.

        On the event loop, as everything that reads the ledger: nothing changes meanwhile.
        """
        return {
            "version": self.version,
            "num_prompts_taken": self.num_prompts_taken,
            "returned_prompts": [astuple(prompt) for prompt in self._returned_prompts],
            "ledger": self.ledger.snapshot(),
            "rejected_rows": dict(self.counters.rejected_rows),
            "num_stale_rows": self.counters.num_stale_rows,
        }

    async def account_async(self) -> dict[str, Any]:
        """Where every group ever admitted is; see `Ledger.account`."""
        return self.ledger.account()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, before the first batch; unconsumed groups are generated again."""
        self.version = int(state["version"])
        self.num_prompts_taken = int(state["num_prompts_taken"])
        self._returned_prompts = deque(PromptReference(*p) for p in state["returned_prompts"])
        self.ledger = Ledger.restore(state["ledger"])
        self.ledger.requeue_all()
        self.counters.rejected_rows = Counter(state["rejected_rows"])
        self.counters.num_stale_rows = int(state["num_stale_rows"])

    async def pause_async(self) -> None:
        """Stops admission and generation; running groups keep their state."""
        self._paused = True
        await self._workers.call_all("pause")

    async def resume_async(self) -> None:
        """Goes on after `pause`."""
        await self._workers.call_all("resume")
        self._paused = False
        self._admit()

    async def drain_async(self) -> None:
        """Waits until every admitted group has ended, without stopping admission."""
        await self._background.wait_until(
            lambda: not self.ledger.num(GroupState.queued) + self.ledger.num(GroupState.running),
            "running groups to end",
        )

    async def worker_stats_async(self) -> list[dict[str, float]]:
        """Counters of each worker's engine and store."""
        return await self._workers.call_all("stats")

    def receive_weights(
        self, weights: WeightsReference, trained_rows: Iterable[RowMetadata] = ()
    ) -> None:
        """A new policy version exists: workers begin to pull it, admission counts from it.

        Args:
            weights: the sealed version.
            trained_rows: the rows whose training made it; those of admitted groups enter the
                account.
        """
        self.ledger.record_trained(row for row in trained_rows if row.group_id >= 0)
        self.version = weights.version
        for group in self.policy.expired(list(self.ledger.unconsumed()), self.version):
            self._reject_stale(group)
        self._workers.receive_weights(weights)
        self._admit()
        self._background.notify()

    async def hold_updates_async(self) -> int:
        """Waits until no worker updates its weights; none begins before `receive_weights`.

        Between the two the trainer seals the next version and drops the one before.
        Returns: the oldest version that a worker holds.
        """
        return await self._workers.hold_updates()

    async def weight_ranks_async(self, group: str) -> list[dict[str, Any]]:
        """What each worker needs in a weight group; see `WeightsReceiver`."""
        return await self._workers.call_all("weight_ranks", {"group": group})

    async def join_weight_group_async(
        self, group: dict[str, Any], first_ranks: Sequence[int]
    ) -> None:
        """All workers join a weight group at once, each from its first rank on."""
        await self._workers.join_weight_group(
            [{"group": group, "first_rank": rank} for rank in first_ranks]
        )

    async def leave_weight_group_async(self, group: str) -> None:
        """Workers that are in a weight group leave it."""
        await self._workers.call_all("leave_weight_group", {"group": group})

    async def wait_for_weights_async(self) -> None:
        """Waits until every worker holds the newest version."""
        await self._workers.wait_for_weights()

    def _admit(self) -> None:
        """Admits groups while eq. 3, concurrency and store bytes allow."""
        if self._source is None or self._paused or self._background.has_failed:
            return
        num_admissible = self.policy.num_admissible(
            self.version, self.ledger.num_admitted_not_rejected
        )
        if self.total_steps is not None:
            needed = self.total_steps * self.config.train_batch_groups
            num_admissible = min(num_admissible, needed - self.ledger.num_admitted_not_rejected)
        for _ in range(num_admissible):
            num_open = self.ledger.num(GroupState.queued) + self.ledger.num(GroupState.running)
            has_slot = num_open < self.config.max_concurrent_groups
            if not has_slot or not self._workers.has_room(num_open):
                return
            group = self.ledger.admit(self._next_prompt(self._source), self.version)
            self._spawn_group(group, self._source)

    def _next_prompt(self, source: Source) -> PromptReference:
        """Prompts of stale groups come again first; else the shuffled stream goes on."""
        if self._returned_prompts:
            return self._returned_prompts.popleft()
        index = prompt_at(self.num_prompts_taken, source.num_prompts, self.config.seed)
        self.num_prompts_taken += 1
        return self._reference(source, index)

    def _spawn_group(self, group: Group, source: Source) -> None:
        task = asyncio.create_task(
            self._background.guard(self._run_group(group, source)), name=f"group {group.group_id}"
        )
        self._tasks.add(task)
        self._group_tasks[group.group_id] = task
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._group_tasks.pop(group.group_id, None))

    async def _run_group(self, group: Group, source: Source) -> None:
        """From queued to finished or rejected."""
        worker = await self._wait_for_worker(group.admitted_version)
        attempt = self.ledger.start(group.group_id, worker.name)
        reply = await self._call_run_group(group, source, worker)
        if reply["batch"] is None:
            self.ledger.reject(group.group_id, _main_cause(reply["rejected"]))
        elif self.ledger.finish(group.group_id, attempt, batch_from_wire(reply["batch"])):
            worker.num_held += 1
            self._group_metrics[group.group_id] = {
                name: (total, count) for name, (total, count) in reply["metrics"].items()
            }
        self._check_rejection_rate()
        self._admit()
        self._background.notify()

    async def _run_outside_group(self, group: Group, source: Source) -> BatchMetadata | None:
        """Rows of a group that the ledger does not know; None when all were rejected."""
        worker = await self._wait_for_worker(group.admitted_version)
        reply = await self._call_run_group(group, source, worker)
        if reply["batch"] is None:
            return None
        batch = batch_from_wire(reply["batch"])
        worker.num_held += 1
        self._outside_batches.append(batch)
        return batch

    async def _forget_outside_batches(self) -> None:
        batches, self._outside_batches = self._outside_batches, []
        if batches:
            await self._workers.forget(batches)

    async def _wait_for_worker(self, version: int) -> RolloutWorkerState:
        while (worker := self._workers.choose(version)) is None:
            self._background.raise_failure()
            await self._background.wait(
                f"a rollout worker with policy version {version} or later, and room in its store"
            )
        return worker

    async def _call_run_group(
        self, group: Group, source: Source, worker: RolloutWorkerState
    ) -> Any:
        """Reply of `run_group`; its rejected rows are counted."""
        worker.num_running += 1
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
                    "group_size": self.config.group_size,
                },
            )
        finally:
            worker.num_running -= 1
            self._background.notify()  # a group that leaves no rows leaves room
        num_rejected = 0
        for cause, (count, example) in reply["rejected"].items():
            self.counters.rejected_rows[cause] += count
            self.counters.rejection_examples.setdefault(cause, example)
            num_rejected += count
        self._recent_rows.append((num_rejected, self.config.group_size))
        return reply

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
            batch_id=self._runtime.new_id(),
            global_step=self.version,
            min_token_version=self.policy.min_token_version(self.version),
        )
        self._admit()
        return batch

    def _reject_stale(self, group: Group) -> None:
        """Refunds the group and ends it where it runs; its prompt is admitted anew."""
        if group.state == GroupState.running:
            self.counters.num_stale_rows += self.config.group_size
        if group.batch is not None:
            self.counters.num_stale_rows += group.batch.total_batch_size
            self.counters.wasted_tokens += sum(row.num_loss_tokens for row in group.batch.rows)
            self._group_metrics.pop(group.group_id, None)
            self._workers.release(group.batch)
        task = self._group_tasks.pop(group.group_id, None)
        if task:
            task.cancel()
        self.ledger.reject(group.group_id, "stale")
        self._returned_prompts.append(group.prompt)

    def _check_rejection_rate(self) -> None:
        if len(self._recent_rows) < self.config.rejection_window:
            return
        rejected = sum(count for count, _ in self._recent_rows)
        rows = sum(count for _, count in self._recent_rows)
        if rejected > self.config.max_rejection_rate * rows:
            raise TooManyRejections(
                f"{rejected} of the last {rows} rows were rejected; rollout.max_rejection_rate "
                f"is {self.config.max_rejection_rate:g}. Causes: "
                f"{_causes(self.counters.rejected_rows)}. For example: "
                f"{next(iter(self.counters.rejection_examples.values()), 'none')}"
            )

    def _note_loss(self, loss: WorkerLost) -> None:
        self.worker_lost = self.worker_lost or loss
        self._background.fail(loss)

    async def _gather(self, calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Results in order, at most `max_concurrent_groups` calls at a time."""
        slots = asyncio.Semaphore(self.config.max_concurrent_groups)

        async def one(call: Coroutine[Any, Any, Any]) -> Any:
            async with slots:
                return await call

        tasks = [asyncio.create_task(one(call)) for call in calls]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for call in calls:
                call.close()  # those whose turn never came

    def register(self, prompts: PromptSource, workflow: Workflow) -> Source:
        """Names both for the workers; to be called beforehand only to see what is wrong early.

        Raises: WorkflowError: the dataset is empty, or a worker could not build one of them.
        """
        dataset = self._sources.register_prompts(prompts)
        return Source(
            dataset,
            self._sources.register_workflow(workflow),
            len(self._sources.prompts(dataset)),
        )

    def _config_of_worker(self, index: int) -> RolloutConfig:
        config = replace(self.config, seed=self.config.seed + index)
        if config.engine == RolloutEngine.sglang:
            config.sglang = sglang_of_worker(config.sglang, index, config.num_workers)
        return config

    def _reference(self, source: Source, index: int) -> PromptReference:
        return PromptReference(source.dataset, index, self.config.seed)

    def prepare_batch(self, prompts: PromptSource, workflow: Workflow) -> BatchMetadata:
        return self._run(self.prepare_batch_async(prompts, workflow))

    def rollout_batch(
        self, prompts: PromptSource, workflow: Workflow, num_groups: int | None = None
    ) -> BatchMetadata:
        return self._run(self.rollout_batch_async(prompts, workflow, num_groups))

    def evaluate(
        self,
        prompts: PromptSource,
        workflow: Workflow,
        *,
        num_prompts: int | None = None,
        temperature: float | None = None,
    ) -> EvaluationOutcome:
        return self._run(
            self.evaluate_async(prompts, workflow, num_prompts=num_prompts, temperature=temperature)
        )

    def pause(self) -> None:
        self._run(self.pause_async())

    def resume(self) -> None:
        self._run(self.resume_async())

    def drain(self) -> None:
        self._run(self.drain_async())

    def wait_for_weights(self) -> None:
        self._run(self.wait_for_weights_async())

    def state(self) -> dict[str, Any]:
        return self._run(self.state_async())

    def account(self) -> dict[str, Any]:
        return self._run(self.account_async())

    def worker_stats(self) -> list[dict[str, float]]:
        return self._run(self.worker_stats_async())


def _main_cause(rejected: dict[str, Any]) -> str:
    return max(rejected, key=lambda cause: int(rejected[cause][0]), default="empty")


def _causes(rejected: Counter[str]) -> str:
    return ", ".join(f"{cause} x{count}" for cause, count in rejected.most_common()) or "none"
