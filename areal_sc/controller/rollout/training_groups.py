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
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Final

from areal_sc.controller.events import BatchFormed
from areal_sc.controller.ledger.group import Group, GroupState, RolloutSource
from areal_sc.controller.ledger.ledger import Ledger
from areal_sc.controller.ledger.ledger_records import LedgerState, Split
from areal_sc.controller.rollout.admission import Admission
from areal_sc.controller.rollout.evaluation import mean_metrics
from areal_sc.controller.rollout.groups import Groups, GroupTools
from areal_sc.controller.rollout.rejections import STALE, main_cause
from areal_sc.controller.rollout.rollout_takeover import FoundRuns
from areal_sc.controller.rollout.staleness import StalenessPolicy, by_deadline
from areal_sc.controller.rollout.worker_set import RolloutWorkerState
from areal_sc.controller.shared_card import Side
from areal_sc.errors import ConfigError, StoreFull, WorkerLost
from areal_sc.metadata import BatchMetadata, PromptReference, RowMetadata, concat
from areal_sc.run.run_status import RoleStatus
from areal_sc.sources.prompt_choice import PromptChoice
from areal_sc.workers.calls import SHARED, GroupAttempt, GroupReply

logger = logging.getLogger(__name__)

WORKER_LOST: Final = "worker_lost"
ROWS_LOST: Final = "rows_lost"
NO_ROOM: Final = "no_room"
"""Why episodes begin anew."""

MAX_PASSED: Final = 1000
"""Prompts in a row that are passed over; the one after them is taken, and the loop goes on."""


class TrainingGroups(Groups):
    """Admits groups, runs them, and forms the batch of each policy version.

    Attributes:
        admission: how many groups may begin.
        run_again: times that groups had to run again, by the worker that was lost.
        episodes_again: that such groups had to begin anew, by the cause; what was kept is not.
        batch_metrics: means of the workflow's own metrics over the newest batch.
    """

    def __init__(self, tools: GroupTools) -> None:
        super().__init__(tools)
        config = self._config
        self._choice = PromptChoice(config.choose_prompts, config.seed)
        self.ledger = Ledger(remembers_prompts=not self._choice.takes_all)
        self.run_again = Counter[str]()
        self.episodes_again = Counter[str]()
        self._why_again: dict[int, str] = {}
        self.batch_metrics: dict[str, float] = {}
        self._policy = StalenessPolicy(
            config.staleness_bound, config.train_batch_groups, config.over_bound
        )
        self.admission = Admission(config, self._policy, lambda: asyncio.get_running_loop().time())
        self._kept = tools.workers.kept
        self._kept.is_open = self._is_open
        self._kept.open_groups = lambda: tuple(
            it.group_id for it in self.ledger.unconsumed() if self._is_open(it.group_id)
        )
        self._source: RolloutSource | None = None
        self._is_paused = False
        self._restored: dict[int, Group] = {}  # queued groups without a task
        self._tasks: dict[int, asyncio.Task[None]] = {}  # of queued and running groups

    @property
    def version(self) -> int:
        """The policy version that admission and batch forming count from."""
        return self.step.version

    @property
    def num_open(self) -> int:
        """Groups that are queued or running."""
        return self.ledger.num(GroupState.queued) + self.ledger.num(GroupState.running)

    def tell(self, status: RoleStatus) -> None:
        """Adds how many groups and steps there are, and what is waited for."""
        status.total_steps = self.admission.total_steps
        status.num_open, status.num_finished = self.num_open, self.num_finished
        states = self._workers.set.states
        status.num_running = sum(state.store.num_running + state.num_calls for state in states)
        status.waits += self._background.waits()

    @property
    def num_awaited(self) -> int:
        """Open groups that may end; a pause stops all."""
        return 0 if self._is_paused else self.num_open

    def needs(self, run: GroupAttempt) -> bool:
        """Whether its rows wait to be trained, or for the rest of their group, or are in the batch
        of the current version."""
        return self._kept.needs(run) or self.ledger.needs_rows(run.group_id, run.attempt)

    def _is_open(self, group_id: int) -> bool:
        group = self.ledger.get(group_id)
        return group is not None and group.state in (GroupState.queued, GroupState.running)

    async def next_batch(self, source: RolloutSource) -> BatchMetadata:
        """The batch for `RolloutController.prepare_batch_async`.

        Raises: ConfigError: all of `total_steps` are trained, or prompts are to be chosen from a
            stream. TooManyRejections: most episodes are rejected. WorkerLost: workers died too
            often. WaitTimeout: nothing changed for long. StepsLost: the ranks are lost, or as
            `StepLife.take_back` says.
        """
        if self.step.batch is None:
            self.admission.note_asked(self.version)
        if source.num_prompts is None and not self._choice.takes_all:
            raise ConfigError(
                "rollout.choose_prompts: expected all with a stream of prompts, where none comes "
                f"again, got {self._config.choose_prompts!r}"
            )
        self._source = source
        if (batch := self.step.batch) is not None:  # asked for again, as rows of it are gone, say
            await self._workers.notice_losses({shard.node_id for shard in batch.shards})
        while True:
            self._background.raise_failure()
            self.step.check()
            if self.step.gone:
                self._take_back()
            if self._background.standstill.is_on and self.step.batch is None:
                await self._stand_still()
                continue
            self.admit()
            if (batch := self.step.batch) is not None:
                if self._workers.are_rows_known(*{shard.node_id for shard in batch.shards}):
                    await self._workers.durable()
                    return batch
                await self._background.wait("workers to tell what they still hold of the batch")
                continue
            decision = self._policy.form_batch(self.ledger.unconsumed(), self.version)
            if decision.stale:
                self._reject_stale(decision.stale)
                self._workers.begin_sweeps()
                continue
            if decision.groups is not None:
                unknown = [g for g in decision.groups if not self._workers.are_rows_known(g.worker)]
                if unknown:
                    await self._background.wait(f"{unknown[0].worker} to tell what it still holds")
                else:
                    self._consume(decision.groups)
                continue
            self._workers.set.check_room()
            with self._workers.card.wanted(Side.generation):
                await self._background.wait(
                    f"{decision.num_missing} more groups for the batch of version {self.version}"
                )

    async def _stand_still(self) -> None:
        def check() -> None:
            self._background.raise_failure()
            self.step.check()

        with self._workers.card.wanted(Side.generation):  # groups that run are to end
            await self._background.standstill.hold(check)
        self.admission.forget()

    def record_version(
        self, version: int, trained_rows: Iterable[RowMetadata], splits: tuple[Split, ...]
    ) -> None:
        """A new policy version exists; `adopt_version` follows when that is durable.

        A repeat, of a publication that was given up meanwhile, changes nothing.

        Args:
            trained_rows: the rows whose training made it; those of admitted groups enter the
                account.
            splits: as of the journal's record of it.
        """
        if version == self.ledger.version:
            return
        of_training = (row for row in trained_rows if row.group_id >= 0)
        self.ledger.record_trained(of_training, splits)
        self.ledger.publish(version)
        self.step.record()

    def adopt_version(self, version: int) -> None:
        """The version is the current one; `admit` follows when workers may get it.

        The step before is complete: nobody reads its rows any more.
        """
        self.step.are_weights_told = True
        self.ledger.release(version - 1)
        self._reject_stale(self._policy.expired(list(self.ledger.unconsumed()), version))
        self._workers.begin_sweeps()

    def lose_rows(self, runs: Iterable[GroupAttempt]) -> None:
        """The rows of these runs are gone: groups that wait to be trained run again.

        Nothing takes the room of rows of the current batch until it is asked for again.
        """
        for run in self.step.lose_rows(runs):
            if self.ledger.needs_rows(run.group_id, run.attempt) and (
                group := self.ledger.get(run.group_id)
            ):
                self.run_again[group.worker or ""] += 1
                self._requeue(group)
        self.admit()

    def _take_back(self) -> None:
        """Groups of the current batch that have lost their rows run again; it is formed anew."""
        gone = self.step.take_back()
        logger.warning(
            "step=%d its batch is formed anew: the rows of %d groups are gone",
            self.version + 1,
            len(gone),
        )
        for group in self.ledger.take_back(self.version):
            if group.group_id in gone:
                self._requeue(group)

    def _requeue(self, group: Group, cause: str = "its rows are gone with their worker") -> None:
        self.ledger.requeue(group.group_id, cause)
        self._why_again[group.group_id] = ROWS_LOST
        self._restored[group.group_id] = group
        self.admission.note_finished(self.ledger.num(GroupState.finished))

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
        """Admits groups while eq. 3, concurrency and store bytes allow.

        Those that wait to run again go first, the oldest of them before the others.
        """
        is_paused = self._is_paused or self._background.standstill.is_on
        if self._source is None or is_paused or self._background.has_failed:
            return
        for group in sorted(self._restored.values(), key=by_deadline):
            if not self._has_slot:
                break
            del self._restored[group.group_id]
            self._start(group, self._run(group, self._source))
        if self.step.gone:
            return
        num_queued = self._num_without_room
        if num_queued and not self._workers.set.has_room(num_queued - 1):
            self._make_room()  # there was more when they were admitted
            return
        num_counted = self.ledger.num_admitted_not_rejected
        for _ in range(self.admission.num_admissible(self.version, num_counted)):
            if not self._has_slot:
                return
            if not self._workers.set.has_room(self._num_without_room):
                self._make_room()
                return
            # prompts of stale groups come again first
            prompt, num_passed = self.ledger.returned_prompt, 0
            if prompt is None:
                prompt, num_passed = self._next_prompt(self._source)
            group = self.ledger.admit(prompt, self.version, num_passed)
            self._start(group, self._run(group, self._source))

    @property
    def _num_without_room(self) -> int:
        """Queued groups that have no room in a store yet."""
        kept = (self.ledger.get(group_id) for group_id in self._kept.group_ids)
        num_at_home = sum(it is not None and it.state is GroupState.queued for it in kept)
        return self.ledger.num(GroupState.queued) - num_at_home

    def _next_prompt(self, source: RolloutSource) -> tuple[PromptReference, int]:
        """The next prompt that is chosen, and how many before it are passed over."""
        num_passed = 0
        while True:
            position = self.ledger.num_prompts_taken + num_passed
            prompt = source.next_prompt(position, self._config.seed)
            if num_passed == MAX_PASSED or self._choice.takes(position, self.ledger.past(prompt)):
                return prompt, num_passed
            num_passed += 1

    def take_over(self, ledger: Ledger) -> None:
        """Goes on from what an earlier start of the script has left; `go_on` follows."""
        self.ledger = ledger
        self.ledger.release(ledger.version - 1)
        self.step.go_back(ledger.version)
        self.admission.go_on(self.version, ledger.num_admitted_not_rejected)
        if groups := ledger.kept_groups(self.version):  # its step is not trained yet
            self._form_batch(groups, [group.batch for group in groups if group.batch])

    def go_on(self, found: FoundRuns) -> None:
        """Runs that were found are joined; what else is queued, or ran, runs again."""
        self.lose_rows(found.lost)
        found.num_again += len(self._restored) + len(self.step.gone)
        for group, worker in found.reconcile(self.ledger):
            self._start(group, self._join(group, worker))
        queued = (g for g in self.ledger.unconsumed() if g.state is GroupState.queued)
        self._restored = {group.group_id: group for group in queued}
        for group_id in self._restored:  # a worker that has just died may have episodes of it
            self._kept.note_lost(group_id, *self._workers.unknown)

    def go_back(self, lineage: int, state: LedgerState) -> None:
        """Goes back to `state` in a new lineage; `admit` follows when workers may get weights."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
        self._restored.clear()
        self.ledger.go_back(lineage, state)
        self.step.go_back(state.version)
        self.admission.forget()
        self._workers.updates.forget()
        self._workers.begin_sweeps()

    def _make_room(self) -> None:
        """Queued groups, or the next one, have no room: while a batch is waited for, groups that
        are finished too early give theirs up."""
        if self._workers.are_sweeps_due:
            return
        workers, groups = self._workers.set, self.ledger.unconsumed()
        full = {it.name for it in workers.states if it.number in workers.loads.full}
        too_early = self._policy.too_early(groups, full, self.version)
        if not too_early and not self.ledger.num(GroupState.running):
            # those that wait for room have all the slots, and these, which have room, have none
            for group_id in [it for it in self._kept.group_ids if it in self._restored]:
                self._kept.forget(group_id)
                self._workers.begin_sweeps()
        if not too_early or self.step.batch is not None:
            return
        logger.warning(
            "step=%d the stores lack room (transport.shared_memory): %d groups that are "
            "finished give theirs to older ones, and run again later",
            self.version + 1,
            len(too_early),
        )
        for group in too_early:
            self._requeue(group, "older groups need its room")
            self._why_again[group.group_id] = NO_ROOM
        self._workers.begin_sweeps()

    @property
    def _has_slot(self) -> bool:
        return self.num_open - len(self._restored) < self._config.max_concurrent_groups

    def _start(self, group: Group, work: Coroutine[Any, Any, None]) -> None:
        def forget(ended: asyncio.Task[None]) -> None:
            if self._tasks.get(group.group_id) is ended:  # else the group runs again, in another
                del self._tasks[group.group_id]

        task = self._tasks[group.group_id] = self._background.start(work, f"group {group.group_id}")
        task.add_done_callback(forget)

    async def _run(self, group: Group, source: RolloutSource) -> None:
        """From queued to finished or rejected."""

        async def take() -> RolloutWorkerState:
            # its admission, or new attempt, before a worker hears of it
            await self._workers.durable()
            return await self._workers.take_worker(group)

        self._end(group, await self._reply(group, source, take))

    async def _join(self, group: Group, worker: RolloutWorkerState) -> None:
        """Awaits a run that an earlier start of the script has begun, and ends it like `_run`."""
        try:
            reply = await self._workers.run_group(worker, group, None)
        except (WorkerLost, StoreFull) as error:
            if isinstance(error, StoreFull) and not await self._workers.yield_memory(error):
                raise
            self._begin_again(group, worker, error)
            self._restored[group.group_id] = group
            self.admit()
        else:
            self._end(group, reply)

    def _begin(self, group: Group, worker: RolloutWorkerState) -> None:
        self.ledger.start(group.group_id, worker.name)
        if group.attempt:
            kept = self._kept.of_group(group.group_id)
            num_again = self._config.group_size - sum(it.episode.number != SHARED for it in kept)
            self.episodes_again[self._why_again.pop(group.group_id, WORKER_LOST)] += num_again

    def _begin_again(
        self, group: Group, worker: RolloutWorkerState, error: WorkerLost | StoreFull
    ) -> None:
        cause = "had no room for its rows"
        self._why_again[group.group_id] = NO_ROOM
        if isinstance(error, WorkerLost):
            self.run_again[worker.name] += 1
            self._kept.note_lost(group.group_id, worker.name)
            self._why_again[group.group_id] = WORKER_LOST
            cause = "was lost"
        self.ledger.requeue(group.group_id, f"{worker.name} {cause}")

    def _end(self, group: Group, reply: GroupReply) -> None:
        if group.worker is not None:  # None: the group is to blame for deaths of workers
            self.admission.note_end(group.worker, reply.num_waiting)
        self._rejections.add_group(reply.rejected, self._config.group_size)
        if reply.batch is None:
            self.ledger.reject(group.group_id, main_cause(reply.rejected))
            self._workers.begin_sweeps()  # an earlier start's worker may have told of shards of it
        elif self.ledger.finish(group.group_id, reply.run.attempt, reply.batch, reply.metrics):
            self.num_finished += 1
            if reason := self._rejections.refuse_without_signal(reply.batch):
                self.ledger.reject(group.group_id, reason)
                self._workers.begin_sweeps()
            self.admission.note_finished(self.ledger.num(GroupState.finished))
        else:
            self._workers.begin_sweeps()
        if group.attempt or self._kept.of_group(group.group_id):
            # of earlier attempts there may be shards that it did not take over
            self._kept.forget(group.group_id)
            self._workers.begin_sweeps()
        self._rejections.check_rate(self._source.num_prompts if self._source else None)
        self.admit()

    def _consume(self, groups: Sequence[Group]) -> None:
        self._form_batch(groups, self.ledger.consume([g.group_id for g in groups], self.version))
        self.admission.note_batch(self.ledger.num(GroupState.finished))
        self._workers.hear(BatchFormed())
        self.admit()

    def _form_batch(self, groups: Sequence[Group], batches: Sequence[BatchMetadata]) -> None:
        self.batch_metrics = mean_metrics([group.metrics for group in groups])
        self.step.form(
            concat(
                batches,
                batch_id=self._new_id(),
                global_step=self.version,
                min_token_version=self._policy.min_token_version(self.version),
            )
        )

    def _reject_stale(self, groups: Iterable[Group]) -> None:
        """Refunds the groups and ends them where they run; their prompts are admitted anew."""
        for group in groups:
            self._rejections.add_stale(group, self._config.group_size)
            if group.group_id in self._tasks:
                self._tasks.pop(group.group_id).cancel()
            self._restored.pop(group.group_id, None)
            self._kept.forget(group.group_id)
            self.ledger.reject(group.group_id, STALE, returns_prompt=True)
