"""One start of a training script whose workers fail, and which dies, or is superseded, itself.

It does what a `Run` does: it takes over what lives, goes back where it must, and writes snapshots.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from simulation.faults import FaultInjector, FaultKind
from simulation.faulty_cluster import FaultyCluster
from simulation.journal_watch import JournalWatch
from simulation.process import PROCESS, Process
from simulation.scenario import Scenario
from simulation.training_run import TrainingRun
from simulation.workers import SimulatedWorker

from areal_sc.config.schema import KeepGroups
from areal_sc.controller.ledger.journal import ledger_on_disk
from areal_sc.controller.ledger.ledger import Ledger
from areal_sc.controller.rollout.rejections import INITIAL_STATE, RolloutState
from areal_sc.controller.rollout.rollout_controller import RolloutController
from areal_sc.controller.starting import take_over
from areal_sc.errors import BatchLost, CheckpointError, RunFolderError, StepsLost
from areal_sc.metadata import BatchMetadata
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.run_owner import RunTerm
from areal_sc.transport.shards.ids import parse_shard_id

MAX_REST_S = 400.0
"""All steps are made by then, if nothing goes wrong any more."""
MAX_REST_OF_CHANCE_S = 1200.0
"""The same where a group counts only if its episodes differ, which chance decides."""
MAX_RECOVERY_S = 300.0
NOTICE_S = 30.0
"""After this time a death or a hang has been noticed, also over a slow network."""


class Superseded(Exception):
    """A script would go on, but a later start has taken the run over."""


async def _nothing() -> None: ...


class _ThisLoop:
    """Stands for that of a `start` block."""

    takes_over = True

    def is_running_here(self) -> bool:
        return True


class FaultyScript(TrainingRun):
    """The script of a scenario; `FaultRun` starts it, once or several times.

    Attributes:
        process: of the newest start.
        phase: what the loop is at.
        stale: scripts that a later start has taken the run over from.
        ends: how earlier starts of the script have ended.
        saved: of snapshots that are whole, the controllers' part.
        num_lost_batches: that were formed anew, since rows went with a node's memory.
        num_retreats: to an earlier snapshot, as there was none of the present version.
    """

    cluster: FaultyCluster
    process: Process

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario.settings, FaultyCluster)
        self.stale: list[asyncio.Task[None]] = []
        self.all_rollouts: list[RolloutController] = []
        self.left_beside: list[asyncio.Task[Any]] = []
        self.phase = "start"
        self.broken_callbacks: list[str] = []
        self.num_lost_batches = 0
        self.num_retreats = 0
        self.has_scaled = False
        self._later_stores = iter(scenario.later_stores)
        self.num_wanted = scenario.settings.num_rollout_workers
        self._has_taken_over = self._leaves_all_behind = False
        self.snapshot_every = scenario.snapshot_every
        self.segment_bytes = scenario.segment_bytes
        self._snapshot: asyncio.Task[None] | None = None
        network = self.cluster.network
        network.duplication, network.jitter_s = scenario.duplication, scenario.jitter_s
        self.slowest_s = self.cluster.behavior.latency_s + network.jitter_s
        self.ledger_folder = RunFolder(self.cluster.config.run_dir).ledger
        self.journal = JournalWatch(self.disk, self.ledger_folder)
        self.cluster.on_left = self.before_left
        network.on_call = lambda args: self._is_newest() and self.journal.before_call(args)
        self.faults = FaultInjector(
            *(self.cluster, network, self.disk, scenario.faults),
            state=lambda: self.state,
            end_controllers=self.end_controllers,
            scale=self._begin_scaling,
        )
        self.scalings: list[asyncio.Task[None]] = []
        self.restart_s = scenario.restart_s
        self.ends: Counter[str] = Counter()
        self.saved: dict[int, RolloutState] = {}

    @property
    def state(self) -> str:
        """What the controllers are at."""
        recovering = [w for w in self.cluster.workers.values() if self._is_missing(w)]
        if recovering and self.phase not in ("start", "close"):
            return "in recovery"
        if self._evaluation is not None and not self._evaluation.done():
            return "evaluation"
        return self.phase

    def _numbers_to_begin_with(self) -> set[int]:
        """How many rollout workers a start may have: as many as an earlier one wanted, if any live.

        Whether it has is for the agents to say, who may not know yet of one that has just ended.
        """
        path = RunFolder(self.cluster.config.run_dir).rollout_workers_path
        lives = any(worker.exit_status is None for worker in self.cluster.rollout_workers)
        kept = {int(self.disk.durable[path])} if path in self.disk.durable else set()
        return kept if lives and kept else kept | {self.settings.num_rollout_workers}

    def _change_room(self) -> None:
        """The stores of the next start may be smaller, or larger: its workers are new lives."""
        store_groups = next(self._later_stores, self.settings.store_groups)
        self.has_other_room |= store_groups != self.settings.store_groups
        self.settings.store_groups = store_groups

    def _is_missing(self, worker: SimulatedWorker) -> bool:
        members = [member for it in self.controllers for member in it.fleet.members]
        is_wanted = any(member.name == worker.name for member in members)
        return is_wanted and worker.exit_status is not None

    @property
    def _has_lost_rows_of_a_step(self) -> bool:
        """Rows of a batch went with a node's memory, or there is no snapshot of a version."""
        cluster = self.cluster
        has_lost_rows = bool(cluster.lost_groups & self.trained_at.keys()) or self.num_lost_batches
        has_lost_rows |= self._has_lost_fields
        has_no_snapshot = not self.settings.memory_snapshots or bool(cluster.unreadable)
        has_no_snapshot |= bool(cluster.num_lost_snapshots or cluster.num_failed_snapshots)
        return bool(has_lost_rows or has_no_snapshot or self._has_taken_over)

    @property
    def _has_lost_fields(self) -> bool:
        """What a second model had computed went with a node's memory."""
        kinds = {kind for kind, _ in self.faults.struck}
        return bool(self.others) and FaultKind.lose_node in kinds

    async def _begin(self) -> None:
        """The next term, and controllers of their own."""
        self._check_newest()  # the folder's lock has kept it out
        self._noted_step = 0
        self._leaves_all_behind = False
        self.scalings.clear()
        if self.ends:
            found = ledger_on_disk(self.ledger_folder, self.disk)
            self.forget_lost(found if found is not None else Ledger())
        self.cluster.terms[self.process] = RunTerm.begin(self.cluster.run_dir)
        self.make_controllers()
        self.all_rollouts.append(self.rollout)
        for controller in self.controllers:
            controller._control_loop = _ThisLoop()  # type: ignore[assignment]
        await self._play()

    async def _play(self) -> None:
        self.phase = "taking over" if self.ends else "start"
        may_begin_with = self._numbers_to_begin_with()
        async with self.started():
            self.num_wanted = len(self.rollout._workers.set.staying)
            assert self.num_wanted in may_begin_with
            self._has_taken_over = False
            if self.ends:
                self._check_newest()
                taken = await take_over(self.controllers)
                self._check_newest()
                self._has_taken_over = taken is not None
                for controller in self.controllers:
                    if controller.worker_lost is not None:
                        raise controller.worker_lost
                if taken is None:
                    self._leaves_all_behind = True
                    await self._go_back()
                    self._leaves_all_behind = False
                else:
                    self._noted_step = taken.version  # it counts like a snapshot of then
            self.faults.begin()
            while self.actor.version < self.settings.num_steps:
                try:
                    await self._unless_given_up(self.step())
                except BatchLost:
                    self._check_newest()
                    is_expected = self._has_taken_over or self._has_lost_owners(self.batches[-1])
                    is_expected |= self._has_lost_fields
                    assert is_expected or self.cluster.lost_groups & self.trained_at.keys()
                    self.num_lost_batches += 1
                    self.forget_batch()
                except StepsLost:  # there is no snapshot of the present version
                    self._check_newest()
                    if not self._has_lost_rows_of_a_step:
                        raise
                    self.num_retreats += 1
                    await self._go_back()
            self.duration_s = self.cluster.now_s
            keeps_all = self.settings.keep_groups is KeepGroups.all
            max_rest_s = MAX_REST_S if keeps_all else MAX_REST_OF_CHANCE_S
            assert self.duration_s < self.faults.last_s + max_rest_s, "it has made no progress"
            self.phase = "end"
            await self.collect_evaluation()
            if self._snapshot is not None:
                await self._snapshot
            self.faults.is_over = True
            await asyncio.gather(*self.scalings)
            self._check_newest()
            self.cluster.network.jitter_s = 0.0  # else somebody may still miss its heartbeats
            await self._until_recovered()
            self._check_newest()
            self.check_restarts()
            await self.check_end()
            self._check_newest()
            self.phase = "close"

    async def _go_back(self) -> None:
        """In place, to the newest snapshot that can be read, or the initial model; as a `Run`."""
        self.phase = "going back"
        await self._end_beside()
        while True:
            try:
                await self._load_newest()
                break
            except StepsLost:
                continue
        self._check_newest()
        await self.actor.share_weights_async(self.rollout)

    async def _load_newest(self) -> None:
        for step in sorted(self.saved, reverse=True):
            self._check_newest()
            try:
                await self.actor.load_snapshot_async(step)
            except CheckpointError:
                self._check_newest()
                del self.saved[step]  # it is set aside
                continue
            self._check_newest()
            await self.rollout.go_back_async(self.saved[step])
            self._noted_step = step
            return
        self._check_newest()
        self._noted_step = 0
        await self.actor.load_snapshot_async(0)
        self._check_newest()
        await self.rollout.go_back_async(INITIAL_STATE)

    async def _end_beside(self) -> None:
        """What goes on beside training is of no use any more."""
        beside = [task for task in (self._evaluation, self._snapshot) if task is not None]
        self._evaluation = self._snapshot = None
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)

    def _begin_scaling(self, num_workers: int) -> bool:
        """As the script's own loop would; tells whether it is at a place where it can."""
        if self.phase in ("start", "taking over", "going back", "end", "close"):
            return False
        if num_workers * self.settings.store_groups < self.settings.batch_groups:
            return False
        self.has_scaled = True
        rollout = self.rollout

        async def scale() -> None:
            with contextlib.suppress(RunFolderError):  # the run ends with it
                await rollout.scale_async(num_workers)
                self.num_wanted = num_workers

        self.scalings.append(self.process.create_task(scale(), f"scale to {num_workers}"))
        return True

    def _set_phase(self, phase: str) -> None:
        if self._is_newest():
            self.phase = phase

    def _is_newest(self) -> bool:
        """Whether the code that asks is of the newest start."""
        return PROCESS.get() is self.process

    async def _unless_given_up(self, work: Coroutine[Any, Any, Any]) -> None:
        """As `ControlLoop.run`: a worker that is given up ends every call."""
        task, controllers = asyncio.create_task(work, name="the step"), self.controllers
        try:
            while not task.done():
                await asyncio.wait([task], timeout=5.0)
                for controller in controllers:
                    if controller.worker_lost is not None and not task.done():
                        raise controller.worker_lost
        finally:
            task.cancel()
            await asyncio.wait([task])
        task.result()
        self._check_newest()

    def _check_newest(self) -> None:
        if not self._is_newest():
            raise Superseded

    async def _until_recovered(self) -> None:
        """Workers that died at the end come back, too.

        Raises: StepsLost: the last steps went with them.
        """
        workers = self.cluster.workers.values()
        async with asyncio.timeout(MAX_RECOVERY_S):
            rest_s = self.faults.last_s - self.cluster.now_s  # of a partition, say
            if rest_s > 0.0 or any(self._is_missing(w) or w.is_hung for w in workers):
                await asyncio.sleep(max(rest_s, 0.0) + NOTICE_S)
            for model in (*self.others, self.actor):
                await model.ranks.repeated(_nothing)  # as when the model is written
            staying = [state.member for state in self.rollout._workers.set.staying]
            for controller, members in (
                *((model, model.fleet.members) for model in (*self.others, self.actor)),
                (self.rollout, staying),
            ):
                for member in members:
                    await controller._recovery.wait_until_ready(member)

    async def step(self, *, checks_business: bool = True) -> BatchMetadata:
        self._check_newest()
        rollout, actor = self.rollout, self.actor
        self.phase = "waiting for a batch"
        batch = await rollout.prepare_batch_async(self.prompts, self.workflow)
        self._check_newest()
        self.journal.check_batch(batch)
        is_repeated = len(self.batches) == self.actor.version + 1  # an earlier start had one
        if is_repeated and batch.rows != self.batches[-1].rows:
            assert self._has_lost_owners(self.batches[-1]), "its rows live, and it is another one"
            self.forget_batch()
            is_repeated = False
        if not is_repeated:
            self.batches.append(batch)
            self.check_batch(batch)
        await self._evaluate_when_due()
        self.phase = "recomputing log-probabilities"
        batch = await self.compute_logprobs(batch)
        batch = actor.compute_advantages(batch)
        self._set_phase("training")
        await actor.ppo_update_async(batch)
        self._set_phase("publishing")
        await actor.publish_weights_async(rollout)
        self._check_newest()
        if self.snapshot_every and self.actor.version % self.snapshot_every == 0:
            await self._begin_snapshot()
        return batch

    def _has_lost_owners(self, batch: BatchMetadata) -> bool:
        """Whether some that have sealed its rows are dead."""
        living = {w.incarnation for w in self.cluster.workers.values() if w.exit_status is None}
        return any(parse_shard_id(shard.shard_id)[0] not in living for shard in batch.shards)

    def before_forgotten(self, shard_id: str, group_id: int) -> None:
        is_about_to_go_back = self.phase == "taking over" and self.actor.found is None
        if not (is_about_to_go_back or self._leaves_all_behind):
            super().before_forgotten(shard_id, group_id)

    def before_left(self, worker: SimulatedWorker) -> None:
        """It was asked to end, in a run that goes on: nothing of it is needed."""
        if any(state.name == worker.name for state in self.rollout._workers.set.states):
            return  # the script ends
        assert not getattr(worker, "running", ()), f"{worker.name} leaves, and runs groups"
        for shard_id, group_id in worker.store.group_of.items():
            self.before_forgotten(shard_id, group_id)

    def before_announcement(self, version: int) -> None:
        self.journal.check_announced(version)

    async def collect_evaluation(self) -> None:
        await super().collect_evaluation()
        self._check_newest()

    async def _begin_snapshot(self) -> None:
        """One on the disk; written beside training, as `Checkpoints` does."""
        if self._snapshot is not None:
            await self._snapshot
            self._check_newest()
        self.phase, step = "beginning a snapshot", self.actor.version
        state = await self.rollout.state_async()
        self._check_newest()
        try:
            finish = await self.actor.ranks.begin_snapshot()
            self._check_newest()
        except CheckpointError:
            return  # a warning, and the run goes on without this one

        async def complete() -> None:
            with contextlib.suppress(CheckpointError, StepsLost):
                await finish()
                self._check_newest()
                self.saved[step] = state
                self._noted_step = step
                self.actor.ranks.state.note_durable(step)

        self._snapshot = asyncio.create_task(complete(), name=f"snapshot of step {step}")

    @abstractmethod
    def end_controllers(self, paused_s: float | None) -> None: ...

    @abstractmethod
    def check_restarts(self) -> None: ...
