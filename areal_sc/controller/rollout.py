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
that state waits on `_changed`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

from areal_sc.config.plain import to_plain
from areal_sc.config.schema import RolloutConfig
from areal_sc.controller.control_loop import Shell
from areal_sc.controller.fleet import Fleet, Member
from areal_sc.controller.ledger import Group, GroupState, Ledger
from areal_sc.controller.runtime import Runtime
from areal_sc.controller.staleness import StalenessPolicy
from areal_sc.engines.base import EngineHandle
from areal_sc.errors import ArealError, TooManyRejections, WorkerLost, WorkflowError
from areal_sc.metadata import (
    TRAJECTORY_BYTES_PER_TOKEN,
    BatchMetadata,
    PromptReference,
    RowMetadata,
    WeightsReference,
    concat,
)
from areal_sc.schedulers.base import LaunchRequest, Scheduler
from areal_sc.transport.shard_ids import parse_shard_id
from areal_sc.workflows.base import Workflow
from areal_sc.workflows.prompts import prompt_at
from areal_sc.workflows.sources import PromptSource, SourceRegistry

logger = logging.getLogger(__name__)

RPC_MARGIN_S = 60.0
"""What a group's RPC may take beyond the group's own time limit, which the worker keeps."""


@dataclass
class Counters:
    """What happened since the start, for metrics.

    Attributes:
        rejected_rows: rows rejected by their workflow or reward, by cause.
        rejection_examples: cause -> one full message.
        wasted_tokens: trained-to-be tokens of groups that were rejected as stale.
    """

    rejected_rows: Counter[str] = field(default_factory=Counter)
    rejection_examples: dict[str, str] = field(default_factory=dict)
    wasted_tokens: int = 0


@dataclass(frozen=True)
class EvaluationOutcome:
    """Means over the evaluated prompts.

    Attributes:
        versions: lowest and highest policy version that sampled a token.
        num_rejected: prompts whose episode was rejected; they are in no mean.
    """

    num_prompts: int
    num_rejected: int
    reward: float
    metrics: dict[str, float]
    versions: tuple[int, int]


@dataclass
class _WorkerState:
    """What the controller tracks of one rollout worker.

    Attributes:
        version: the policy version that its engine holds.
        num_running: groups running on it.
        num_held: groups whose rows lie in its store: finished ones, those of the batch that is
            being trained, and dead ones.
        dead: shards that nothing refers to any more, to be forgotten at the next sweep.
        num_evaluations: while there are any, it skips publications.
        open_calls: calls in flight that may seal a shard whose name is not known here yet.
        mark: (last sequence, calls open when the worker told it): once those calls have returned,
            every shard up to that sequence is known here or abandoned.
        acknowledged: shards up to this sequence are known or abandoned.
    """

    member: Member
    version: int = 0
    num_running: int = 0
    num_held: int = 0
    dead: list[int] = field(default_factory=list)
    num_evaluations: int = 0
    open_calls: set[int] = field(default_factory=set)
    mark: tuple[int, frozenset[int]] | None = None
    acknowledged: int = 0
    update: asyncio.Task[None] | None = None


@dataclass(frozen=True)
class _Source:
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
        self._runtime = runtime or Runtime.create(scheduler.config.transport)
        self._fleet = Fleet(scheduler, self._runtime, on_lost=self._note_loss)
        self._sources = SourceRegistry(Path(scheduler.config.run_dir))
        self._workers: list[_WorkerState] = []
        self._source: _Source | None = None
        self._weights: WeightsReference | None = None
        self._are_pulls_held = False
        self._failure: BaseException | None = None
        self._paused = False
        self._returned_prompts: deque[PromptReference] = deque()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._group_tasks: dict[int, asyncio.Task[None]] = {}
        self._group_metrics: dict[int, dict[str, tuple[float, int]]] = {}
        self._recent_rows: deque[tuple[int, int]] = deque(maxlen=self.config.rejection_window)
        self._num_calls = 0
        self._num_outside_groups = 0
        self.batch_metrics: dict[str, float] = {}

    async def start_async(self) -> None:
        """Starts the workers and builds the engine in each.

        Raises: WorkerStartError, ModelError: with the worker's own words.
        """
        await self._fleet.launch(
            [
                LaunchRequest(
                    role="rollout",
                    index=index,
                    engine=type(self.engine).__name__,
                    engine_config=to_plain(replace(self.config, seed=self.config.seed + index)),
                    device=self.config.device,
                    store_bytes=self.config.store_bytes,
                )
                for index in range(self.config.num_workers)
            ]
        )
        self._workers = [_WorkerState(member) for member in self._fleet.members]
        await self._fleet.call_all("initialize", [{}] * len(self._workers))

    async def close_async(self) -> None:
        """Ends all running groups, then the workers."""
        tasks = [*self._tasks, *(w.update for w in self._workers if w.update)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # each failure is in `_failure`
        await self._fleet.close()
        self._workers.clear()
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
            rows are rejected. WorkerLost: a worker died. TimeoutError: no group ended for longer
            than a group may take.
        """
        self._source = self._register(prompts, workflow)
        await self._sweep_stores()
        for group in self.ledger.in_state(GroupState.queued):
            if group.group_id not in self._group_tasks:  # restored
                self._spawn_group(group, self._source)
        self._admit()
        while True:
            self._raise_failure()
            decision = self.policy.form_batch(self.ledger.unconsumed(), self.version)
            for group in decision.stale:
                self._reject_stale(group)
            if decision.groups is not None:
                return self._consume(decision.groups)
            self._admit()
            await self._wait_for_change(
                lambda missing=decision.num_missing: (  # type: ignore[misc]
                    f"{missing} more groups for the batch of version {self.version}"
                )
            )

    async def rollout_batch_async(
        self, prompts: PromptSource, workflow: Workflow, num_groups: int | None = None
    ) -> BatchMetadata:
        """Runs `num_groups` groups (None: the whole dataset), in order, and waits for all.

        They are outside of admission, staleness and the ledger, and so have negative group ids;
        rejected groups are missing from the batch. Its rows live until the next `prepare_batch`.

        Raises: WorkflowError: every group was rejected. WorkerLost: a worker died.
        """
        source = self._register(prompts, workflow)
        indices = range(source.num_prompts if num_groups is None else num_groups)
        groups = []
        for index in indices:
            self._num_outside_groups += 1
            prompt = self._reference(source, index % source.num_prompts)
            groups.append(Group(-self._num_outside_groups, prompt, self.version))
        replies = await self._gather([self._run_outside_group(g, source) for g in groups])
        batches = [BatchMetadata.from_wire(r["batch"]) for r in replies if r["batch"] is not None]
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
        source = self._register(prompts, workflow)
        num_prompts = min(num_prompts or source.num_prompts, source.num_prompts)
        worker = max(self._workers, key=lambda w: (w.version, -w.num_running))
        is_held = len(self._workers) > 1
        worker.num_evaluations += is_held
        try:
            while is_held and worker.update and not worker.update.done():
                self._raise_failure()
                await self._wait_for_change(lambda: f"{worker.member.name} to pull weights")
            replies = await self._gather(
                [
                    self._call_worker(
                        worker,
                        {
                            "dataset": source.dataset,
                            "index": index,
                            "workflow": source.workflow,
                            "evaluation": {"temperature": temperature},
                        },
                        method="run_evaluation",
                    )
                    for index in range(num_prompts)
                ]
            )
        finally:
            worker.num_evaluations -= is_held
            self._begin_updates()
        return _outcome(replies)

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

    def state(self) -> dict[str, Any]:
        """What a new controller needs to go on from here, msgpack-able; see `restore`."""
        return {
            "version": self.version,
            "num_prompts_taken": self.num_prompts_taken,
            "returned_prompts": [astuple(prompt) for prompt in self._returned_prompts],
            "ledger": self.ledger.snapshot(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, before the first batch; unconsumed groups are generated again."""
        self.version = int(state["version"])
        self.num_prompts_taken = int(state["num_prompts_taken"])
        self._returned_prompts = deque(PromptReference(*p) for p in state["returned_prompts"])
        self.ledger = Ledger.restore(state["ledger"])
        self.ledger.requeue_all()

    async def pause_async(self) -> None:
        """Stops admission and generation; running groups keep their state."""
        self._paused = True
        await self._fleet.call_all("pause", [{}] * len(self._workers))

    async def resume_async(self) -> None:
        """Goes on after `pause`."""
        await self._fleet.call_all("resume", [{}] * len(self._workers))
        self._paused = False
        self._admit()

    async def drain_async(self) -> None:
        """Waits until every admitted group has ended, without stopping admission."""
        while self.ledger.num(GroupState.queued) + self.ledger.num(GroupState.running):
            self._raise_failure()
            await self._wait_for_change(lambda: "running groups to end")
        self._raise_failure()

    async def worker_stats_async(self) -> list[dict[str, float]]:
        """Counters of each worker's engine and store."""
        return await self._fleet.call_all("stats", [{}] * len(self._workers))

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
        self._weights = weights
        self._are_pulls_held = False
        self.version = weights.version
        for group in self.policy.expired(list(self.ledger.unconsumed()), self.version):
            self._reject_stale(group)
        self._begin_updates()
        self._admit()
        self._notify()

    async def hold_pulls_async(self) -> None:
        """Waits until no worker pulls weights, and lets none begin before `receive_weights`.

        Between the two the trainer seals the next version and drops the one before.
        """
        self._are_pulls_held = True
        while pulling := [w for w in self._workers if w.update and not w.update.done()]:
            self._raise_failure()
            names = ", ".join(worker.member.name for worker in pulling)
            await self._wait_for_change(lambda names=names: f"{names} to pull weights")  # type: ignore[misc]
        self._raise_failure()

    async def wait_for_weights_async(self) -> None:
        """Waits until every worker holds the newest version."""
        while behind := [w for w in self._workers if not self._is_current(w)]:
            self._raise_failure()
            names = ", ".join(worker.member.name for worker in behind)
            await self._wait_for_change(lambda names=names: f"{names} to be up to date")  # type: ignore[misc]

    def _begin_updates(self) -> None:
        if self._are_pulls_held:
            return
        for worker in self._workers:
            idle = worker.update is None or worker.update.done()
            if idle and not worker.num_evaluations and not self._is_current(worker):
                worker.update = asyncio.create_task(
                    self._guard(self._update(worker)), name=f"update {worker.member.name}"
                )

    def _is_current(self, worker: _WorkerState) -> bool:
        return self._weights is None or worker.version == self._weights.version

    async def _update(self, worker: _WorkerState) -> None:
        while self._weights and not self._is_current(worker) and not worker.num_evaluations:
            weights = self._weights
            await self._fleet.call(
                worker.member,
                "update_weights",
                {"version": weights.version, "shards": [list(shard) for shard in weights.shards]},
            )
            worker.version = weights.version
            self._notify()

    def _admit(self) -> None:
        """Admits groups while eq. 3, concurrency and store bytes allow."""
        if self._source is None or self._paused or self._failure:
            return
        num_admissible = self.policy.num_admissible(
            self.version, self.ledger.num_admitted_not_rejected
        )
        if self.total_steps is not None:
            needed = self.total_steps * self.config.train_batch_groups
            num_admissible = min(num_admissible, needed - self.ledger.num_admitted_not_rejected)
        for _ in range(num_admissible):
            num_open = self.ledger.num(GroupState.queued) + self.ledger.num(GroupState.running)
            if num_open >= self.config.max_concurrent_groups or not self._has_room(num_open):
                return
            group = self.ledger.admit(self._next_prompt(self._source), self.version)
            self._spawn_group(group, self._source)

    def _next_prompt(self, source: _Source) -> PromptReference:
        """Prompts of stale groups come again first; else the shuffled stream goes on."""
        if self._returned_prompts:
            return self._returned_prompts.popleft()
        index = prompt_at(self.num_prompts_taken, source.num_prompts, self.config.seed)
        self.num_prompts_taken += 1
        return self._reference(source, index)

    def _has_room(self, num_open: int) -> bool:
        """Whether the stores can hold one more group at its worst-case size."""
        num_stored = num_open + sum(worker.num_held for worker in self._workers)
        per_worker = self.config.store_bytes // self._group_bytes
        return num_stored < per_worker * len(self._workers)

    @property
    def _group_bytes(self) -> int:
        tokens = self.config.group_size * self.config.max_context_tokens
        return tokens * TRAJECTORY_BYTES_PER_TOKEN

    def _spawn_group(self, group: Group, source: _Source) -> None:
        task = asyncio.create_task(
            self._guard(self._run_group(group, source)), name=f"group {group.group_id}"
        )
        self._tasks.add(task)
        self._group_tasks[group.group_id] = task
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._group_tasks.pop(group.group_id, None))

    async def _run_group(self, group: Group, source: _Source) -> None:
        """From queued to finished or rejected."""
        while (worker := self._worker_for(group.admitted_version)) is None:
            await self._wait_for_change(
                lambda: f"a rollout worker with policy version {group.admitted_version} or later"
            )
        attempt = self.ledger.start(group.group_id, worker.member.name)
        reply = await self._call_run_group(group, source, worker)
        if reply["batch"] is None:
            self.ledger.reject(group.group_id, _main_cause(reply["rejected"]))
        elif self.ledger.finish(group.group_id, attempt, BatchMetadata.from_wire(reply["batch"])):
            worker.num_held += 1
            self._group_metrics[group.group_id] = {
                name: (total, count) for name, (total, count) in reply["metrics"].items()
            }
        self._check_rejection_rate()
        self._admit()
        self._notify()

    async def _run_outside_group(self, group: Group, source: _Source) -> Any:
        """Reply of `run_group` for a group that the ledger does not know."""
        while not (able := [w for w in self._workers if w.version >= group.admitted_version]):
            self._raise_failure()
            await self._wait_for_change(lambda: f"policy version {group.admitted_version}")
        return await self._call_run_group(group, source, min(able, key=lambda w: w.num_running))

    def _worker_for(self, version: int) -> _WorkerState | None:
        """The least loaded worker that holds `version` or a later one and has room."""
        per_worker = max(1, self.config.store_bytes // self._group_bytes)
        able = [
            worker
            for worker in self._workers
            if worker.version >= version and worker.num_running + worker.num_held < per_worker
        ]
        return min(able, key=lambda worker: worker.num_running, default=None)

    async def _call_run_group(self, group: Group, source: _Source, worker: _WorkerState) -> Any:
        """Reply of `run_group`; its rejected rows are counted."""
        worker.num_running += 1
        try:
            reply = await self._call_worker(
                worker,
                {
                    "group_id": group.group_id,
                    "attempt": group.attempt,
                    "admitted_version": group.admitted_version,
                    "dataset": group.prompt.dataset,
                    "index": group.prompt.index,
                    "workflow": source.workflow,
                    "group_size": self.config.group_size,
                },
                method="run_group",
            )
        finally:
            worker.num_running -= 1
        num_rejected = 0
        for cause, (count, example) in reply["rejected"].items():
            self.counters.rejected_rows[cause] += count
            self.counters.rejection_examples.setdefault(cause, example)
            num_rejected += count
        self._recent_rows.append((num_rejected, self.config.group_size))
        return reply

    async def _call_worker(self, worker: _WorkerState, args: dict[str, Any], *, method: str) -> Any:
        self._num_calls += 1
        call = self._num_calls
        worker.open_calls.add(call)
        try:
            return await self._fleet.call(
                worker.member, method, args, timeout_s=self.config.group_timeout_s + RPC_MARGIN_S
            )
        finally:
            worker.open_calls.discard(call)

    def _consume(self, groups: Sequence[Group]) -> BatchMetadata:
        ids = [group.group_id for group in groups]
        batches = self.ledger.consume(ids, self.version)
        for rows in batches:
            self._release(rows)  # the next sweep is that of the next batch
        self.batch_metrics = _mean_metrics(
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
        if group.batch is not None:
            self.counters.wasted_tokens += sum(row.num_loss_tokens for row in group.batch.rows)
            self._group_metrics.pop(group.group_id, None)
            self._release(group.batch)
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

    def _release(self, batch: BatchMetadata) -> None:
        """Its shards are dead from the next sweep on."""
        workers = {worker.member.name: worker for worker in self._workers}
        for shard in batch.shards:
            workers[shard.node_id].dead.append(parse_shard_id(shard.shard_id)[1])

    async def _sweep_stores(self) -> None:
        """Workers forget every shard that no unconsumed group refers to.

        Those that the ledger let go of are named. Others (of a group that was given up, of a batch
        that was never asked for again) are found by the mark: see `_WorkerState`.
        """
        live: dict[str, list[int]] = {worker.member.name: [] for worker in self._workers}
        for group in self.ledger.in_state(GroupState.finished):
            assert group.batch is not None
            for shard in group.batch.shards:
                live[shard.node_id].append(parse_shard_id(shard.shard_id)[1])
        for worker in self._workers:
            if worker.mark and not worker.mark[1] & worker.open_calls:
                worker.acknowledged = worker.mark[0]
                worker.mark = None
            dead, worker.dead = worker.dead, []
            reply = await self._fleet.call(
                worker.member,
                "sweep",
                {
                    "live": live[worker.member.name],
                    "dead": dead,
                    "acknowledged": worker.acknowledged,
                },
            )
            worker.num_held -= len(dead)
            if worker.mark is None:
                worker.mark = (reply["last_sequence"], frozenset(worker.open_calls))

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for_change(self, what: Callable[[], str]) -> None:
        limit_s = self.config.group_timeout_s + 2 * RPC_MARGIN_S
        try:
            async with asyncio.timeout(limit_s):
                await self._changed.wait()
        except TimeoutError:
            account = self.ledger.account()
            raise TimeoutError(
                f"waited {limit_s:g} s without any change for {what()}; groups: {account}"
            ) from None

    def _note_loss(self, loss: WorkerLost) -> None:
        self.worker_lost = self.worker_lost or loss
        self._fail(loss)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self._notify()

    def _raise_failure(self) -> None:
        if self._failure:
            raise self._failure

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Background work whose exception is raised by the next call that waits."""
        try:
            await work
        except (ArealError, TimeoutError) as error:
            self._fail(error)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            logger.exception("background work failed")
            self._fail(error)
        finally:
            self._notify()

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

    def _register(self, prompts: PromptSource, workflow: Workflow) -> _Source:
        dataset = self._sources.register_prompts(prompts)
        return _Source(
            dataset,
            self._sources.register_workflow(workflow),
            len(self._sources.prompts(dataset)),
        )

    def _reference(self, source: _Source, index: int) -> PromptReference:
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

    def worker_stats(self) -> list[dict[str, float]]:
        return self._run(self.worker_stats_async())


def _mean_metrics(groups: Sequence[dict[str, tuple[float, int]]]) -> dict[str, float]:
    totals: dict[str, list[float]] = {}
    for metrics in groups:
        for name, (total, count) in metrics.items():
            entry = totals.setdefault(name, [0.0, 0.0])
            entry[0] += total
            entry[1] += count
    return {name: total / count for name, (total, count) in totals.items() if count}


def _main_cause(rejected: dict[str, Any]) -> str:
    return max(rejected, key=lambda cause: int(rejected[cause][0]), default="empty")


def _causes(rejected: Counter[str]) -> str:
    return ", ".join(f"{cause} x{count}" for cause, count in rejected.most_common()) or "none"


def _outcome(replies: Sequence[Any]) -> EvaluationOutcome:
    done = [reply for reply in replies if reply["reward"] is not None]
    rewards = [float(reply["reward"]) for reply in done]
    versions = [version for reply in done for version in reply["versions"]]
    return EvaluationOutcome(
        num_prompts=len(done),
        num_rejected=len(replies) - len(done),
        reward=sum(rewards) / max(1, len(rewards)),
        metrics=_mean_metrics(
            [{name: (value, 1) for name, value in reply["metrics"].items()} for reply in done]
        ),
        versions=(min(versions, default=0), max(versions, default=0)),
    )
