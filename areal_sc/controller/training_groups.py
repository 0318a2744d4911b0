"""The groups of training: from admission, within the staleness bound, to the batch.

    prompts (references)
         |
    admission ---> queued ---> running on a worker
      eq. 3          ^ |            |  reply: metadata
         ^           | '------------'
         |           '-- the worker, or the rows, are lost
         | refunds                  v
         '--- rejected <-------- finished ---> batch of the current version

consumes     prompts, policy versions, the ends of running groups
waits for    as many finished groups as the batch needs
unblocked by each group that ends, and by `Background`'s failure and time limit

Each admitted group is one task. Admission, replies, new versions and batch forming all run on one
event loop and change the ledger between two awaits only, so there is nothing to lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence

from areal_sc.config.schema import RolloutConfig
from areal_sc.controller.background import Background
from areal_sc.controller.evaluation import mean_metrics
from areal_sc.controller.group import Group, GroupState, MakeReadable, RolloutSource
from areal_sc.controller.group_deaths import GroupDeaths, rejected_reply
from areal_sc.controller.kept_rows import KeptRows
from areal_sc.controller.ledger import Ledger
from areal_sc.controller.ledger_records import LedgerState
from areal_sc.controller.rejections import STALE, Rejections
from areal_sc.controller.rollout_workers import RolloutWorkers
from areal_sc.controller.staleness import StalenessPolicy
from areal_sc.errors import ConfigError, StepsLost, WorkerLost
from areal_sc.metadata import BatchMetadata, PromptReference, RowMetadata, concat
from areal_sc.workers.calls import GroupAttempt, GroupReply
from areal_sc.workflows.prompts import prompt_at

logger = logging.getLogger(__name__)


class TrainingGroups:
    """Admits groups, runs them, and forms the batch of each policy version.

    Args:
        make_readable: returns when workers can read a row of a dataset.
        durable: returns when all changes of the ledger until now are on the disk; see `Journal`.
        new_id: names batches.

    Attributes:
        version: the policy version that admission and batch forming count from.
        total_steps: training steps that the run will make; nothing is admitted beyond what they
            need. None admits without end.
        num_finished: groups that gave rows, since the start of this process.
        run_again: times that groups had to run again, by the worker that was lost.
        batch_metrics: means of the workflow's own metrics over the newest batch.
    """

    def __init__(
        self,
        config: RolloutConfig,
        workers: RolloutWorkers,
        rejections: Rejections,
        background: Background,
        make_readable: MakeReadable,
        durable: Callable[[], Awaitable[None]],
        new_id: Callable[[], str],
    ) -> None:
        self.ledger = Ledger()
        self.kept_rows = KeptRows()
        self.version = 0
        self.total_steps: int | None = config.total_steps or None
        self.num_finished = 0
        self.run_again = Counter[str]()
        self.batch_metrics: dict[str, float] = {}
        self._config = config
        self._workers = workers
        self._rejections = rejections
        self._background = background
        self._make_readable = make_readable
        self._durable = durable
        self._new_id = new_id
        self._policy = StalenessPolicy(
            config.max_staleness, config.train_batch_groups, config.over_bound
        )
        self._source: RolloutSource | None = None
        self._is_paused = False
        self._batch: BatchMetadata | None = None  # of the current version, once it is formed
        self._suspects = asyncio.Lock()
        self._lost: set[int] = set()  # groups of that batch whose rows are gone
        self._restored: dict[int, Group] = {}  # queued groups without a task
        self._tasks: dict[int, asyncio.Task[None]] = {}  # of queued and running groups
        workers.on_room = self.admit

    @property
    def num_open(self) -> int:
        """Groups that are queued or running."""
        return self.ledger.num(GroupState.queued) + self.ledger.num(GroupState.running)

    @property
    def num_awaited(self) -> int:
        """Open groups that may end; a pause stops all."""
        return 0 if self._is_paused else self.num_open

    def needs(self, run: GroupAttempt) -> bool:
        """Whether its rows wait to be trained, or are in the batch of the current version."""
        return self.ledger.needs_rows(run.group_id, run.attempt)

    async def next_batch(self, source: RolloutSource) -> BatchMetadata:
        """As `RolloutController.prepare_batch_async`.

        Raises: ConfigError: all of `total_steps` are trained. TooManyRejections, WorkerLost: as of
            a group. WaitTimeout: nothing changed for too long. StepsLost: see `_take_back`.
        """
        if self.total_steps is not None and self.version >= self.total_steps:
            raise ConfigError(
                f"there is no batch for policy version {self.version}: total_steps is "
                f"{self.total_steps}; train fewer steps, or raise it"
            )
        self._source = source
        self.admit()
        if self._batch is not None:  # it is asked for again, because rows of it are gone, say
            await self._workers.notice_losses({shard.node_id for shard in self._batch.shards})
        while True:
            self._background.raise_failure()
            if self._lost:
                self._take_back()
            if self._batch is not None:
                owners = {shard.node_id for shard in self._batch.shards}
                if self._workers.are_rows_known(*owners):
                    await self._durable()
                    return self._batch
                await self._background.wait("workers to tell what they still hold of the batch")
                continue
            decision = self._policy.form_batch(self.ledger.unconsumed(), self.version)
            if decision.stale:
                self._reject_stale(decision.stale)
                self._workers.sweep()
            if decision.groups is not None:
                unknown = [g for g in decision.groups if not self._workers.are_rows_known(g.worker)]
                if not unknown:
                    self._consume(decision.groups)
                    continue
                await self._background.wait(f"{unknown[0].worker} to tell what it still holds")
                continue
            self.admit()
            await self._background.wait(
                f"{decision.num_missing} more groups for the batch of version {self.version}"
            )

    def record_version(self, version: int, trained_rows: Iterable[RowMetadata]) -> None:
        """A new policy version exists; `begin_version` follows when that is durable.

        A repeat, of a publication that was given up meanwhile, changes nothing.

        Args:
            trained_rows: the rows whose training made it; those of admitted groups enter the
                account.
        """
        if version == self.ledger.version:
            return
        self.ledger.record_trained(row for row in trained_rows if row.group_id >= 0)
        self.ledger.publish(version)

    def begin_version(self, version: int) -> None:
        """The version is the current one; `admit` follows when workers may get it."""
        if version != self.version:
            self._batch = None
            self._lost.clear()
        self.kept_rows.release(self.ledger, version)
        self.version = version
        self._reject_stale(self._policy.expired(list(self.ledger.unconsumed()), version))
        self._workers.sweep()

    def keep_rows(self, first_step: int, *, is_being_covered: bool) -> None:
        """As `RolloutController.keep_rows`."""
        self.kept_rows.keep_from(first_step, is_being_covered=is_being_covered)
        self.kept_rows.release(self.ledger, self.version)
        self._workers.sweep()

    def lose_rows(self, runs: Iterable[GroupAttempt]) -> None:
        """The rows of these runs went with their worker: groups that wait to be trained run again.

        Those of the current batch may have been read: the batch stays as it is until it is asked
        for again, and nothing takes the room of these rows meanwhile.
        """
        in_batch = {(row.group_id, row.attempt) for row in self._batch.rows} if self._batch else ()
        for run in runs:
            if (run.group_id, run.attempt) in in_batch:
                self._lost.add(run.group_id)
            elif self.ledger.needs_rows(run.group_id, run.attempt) and (
                group := self.ledger.get(run.group_id)
            ):
                self.run_again[group.worker or ""] += 1
                self._requeue(group)
        self.admit()

    def _take_back(self) -> None:
        """Groups of the current batch that have lost their rows run again; it is formed anew.

        Raises: StepsLost: its step is recorded as trained, though the version was not announced.
        """
        if self.ledger.version > self.version:
            raise StepsLost(
                f"step {self.version + 1} was trained, and cannot be repeated: the train workers "
                "died before its weights were announced, and rows of it are gone; run the same "
                "command again: it goes on from the newest snapshot on the disk"
            )
        logger.warning(
            "step=%d its batch is formed anew: the rows of %d groups are gone",
            *(self.version + 1, len(self._lost)),
        )
        for group in self.ledger.take_back(self.version):
            if group.group_id in self._lost:
                self._requeue(group)
        self._batch = None
        self._lost.clear()
        self.admit()

    def _requeue(self, group: Group) -> None:
        self.ledger.requeue(group.group_id, "its rows are gone with their worker")
        self._restored[group.group_id] = group

    def end(self) -> None:
        """Nothing more is admitted, whatever room comes back, until the next batch is asked for."""
        self._source = None

    def pause(self) -> None:
        """Stops admission; groups that run go on."""
        self._is_paused = True

    def resume(self) -> None:
        """Goes on after `pause`."""
        self._is_paused = False
        self.admit()

    def admit(self) -> None:
        """Admits groups while eq. 3, concurrency and store bytes allow; requeued ones go first."""
        if self._source is None or self._is_paused or self._background.has_failed:
            return
        while self._restored and self._has_slot:
            group_id = next(iter(self._restored))
            self._start(self._restored.pop(group_id), self._source)
        if self._lost:
            return
        num_counted = self.ledger.num_admitted_not_rejected
        num_admissible = self._policy.num_admissible(self.version, num_counted)
        if self.total_steps is not None:
            needed = self.total_steps * self._config.train_batch_groups
            num_admissible = min(num_admissible, needed - num_counted)
        for _ in range(num_admissible):
            num_queued = self.ledger.num(GroupState.queued)
            if not self._has_slot:
                return
            if not self._workers.has_room(num_queued):
                self._make_room()
                return
            group = self.ledger.admit(self._next_prompt(self._source), self.version)
            self._start(group, self._source)

    @property
    def num_prompts_taken(self) -> int:
        """Position in the dataset, counted over all epochs."""
        return self.ledger.num_prompts_taken

    def restore(self, state: LedgerState) -> None:
        """Goes on from `state`, before the first batch; unconsumed groups run again."""
        self.version = state.version
        self.ledger = Ledger.restore(state)
        self.ledger.requeue_all("the workers of before are gone")
        self._restored = {group.group_id: group for group in self.ledger.unconsumed()}

    def _make_room(self) -> None:
        """Admission has no room: the oldest rows go that are kept only for a repeat of a step."""
        if not self._workers.is_sweeping and self.kept_rows.let_go(self.ledger, self.version):
            self._workers.sweep()

    @property
    def _has_slot(self) -> bool:
        return self.num_open - len(self._restored) < self._config.max_concurrent_groups

    def _next_prompt(self, source: RolloutSource) -> PromptReference:
        """Prompts of stale groups come again first; else the next ones of the dataset.

        Its rows are shuffled in each epoch, unless it is a stream, which has its order.
        """
        if (returned := self.ledger.returned_prompt) is not None:
            return returned
        index = self.num_prompts_taken
        if source.num_prompts is not None:
            index = prompt_at(index, source.num_prompts, self._config.seed)
        return source.prompt(index, self._config.seed)

    def _start(self, group: Group, source: RolloutSource) -> None:
        group_id = group.group_id
        task = self._background.start(self._run(group, source), f"group {group_id}")
        self._tasks[group_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(group_id, None))

    async def _run(self, group: Group, source: RolloutSource) -> None:
        """From queued to finished or rejected."""
        await self._make_readable(group.prompt.dataset, group.prompt.index)
        deaths = GroupDeaths(group.prompt, self._suspects)
        reply: GroupReply | None = None
        while reply is None:
            async with deaths.turn:
                await self._durable()  # its admission, or new attempt, before a worker hears of it
                worker = await self._workers.take(group.admitted_version)
                attempt = self.ledger.start(group.group_id, worker.name)
                try:
                    reply = await self._workers.run_group(worker, group, source)
                except WorkerLost as death:  # says nothing of the group, unless it is to blame
                    self.run_again[worker.name] += 1
                    self.ledger.requeue(group.group_id, f"{worker.name} was lost")
                    if rejection := deaths.note(death):
                        reply = rejected_reply(group, rejection, self._config.group_size)
        self._rejections.add_group(reply.rejected, self._config.group_size)
        if reply.batch is None:
            self.ledger.reject(group.group_id, _main_cause(reply))
        elif self.ledger.finish(group.group_id, attempt, reply.batch, reply.metrics):
            self.num_finished += 1
        else:
            self._workers.sweep_one(worker)
        self._rejections.check_rate()
        self.admit()

    def _consume(self, groups: Sequence[Group]) -> None:
        self.batch_metrics = mean_metrics([group.metrics for group in groups])
        ids = [group.group_id for group in groups]
        batches = self.ledger.consume(ids, self.version)
        self._batch = concat(
            batches,
            batch_id=self._new_id(),
            global_step=self.version,
            min_token_version=self._policy.min_token_version(self.version),
        )
        self.admit()

    def _reject_stale(self, groups: Iterable[Group]) -> None:
        """Refunds the groups and ends them where they run; their prompts are admitted anew."""
        for group in groups:
            self._rejections.add_stale(group, self._config.group_size)
            if group.group_id in self._tasks:
                self._tasks.pop(group.group_id).cancel()
            self._restored.pop(group.group_id, None)
            self.ledger.reject(group.group_id, STALE, returns_prompt=True)


def _main_cause(reply: GroupReply) -> str:
    """Why most of the rejected episodes were; "empty" when the group gave no rows at all."""
    if not reply.rejected:
        return "empty"
    return max(reply.rejected, key=lambda same: same.num_episodes).first.cause
