"""The controllers' training loop over simulated workers, with books that the test keeps itself.

`TrainingRun` drives the real `RolloutController` and `TrainController` the way a user's script
does, and checks what every mode promises at each admission, start, batch and sweep.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
from simulation.books import SLOWEST_MESSAGES_S, RunBooks
from simulation.cards import SmallCards
from simulation.cluster import SimulatedCluster
from simulation.disk import SimulatedDisk
from simulation.process import PROCESS
from simulation.settings import Settings, configs
from simulation.store import SnapshotKey
from simulation.tasks import NamedWorkflow, NumberedPrompts
from simulation.virtual_loop import VirtualTimeLoop, run_virtual

from areal_sc.config.parallel_settings import Placement
from areal_sc.config.schema import WeightUpdateMethod
from areal_sc.controller import shared_card
from areal_sc.controller.base import Controller
from areal_sc.controller.ledger.ledger import Ledger
from areal_sc.controller.rollout.evaluation import EvaluationOutcome
from areal_sc.controller.rollout.rejections import RolloutState
from areal_sc.controller.rollout.rollout_controller import RolloutController
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.engines.handles import FSDPPPOActor, LocalGenerator
from areal_sc.fleet.runtime import Runtime
from areal_sc.metadata import BatchMetadata


class TrainingRun(RunBooks):
    """One run of some settings; `cluster` holds what the workers saw."""

    def __init__(
        self, settings: Settings, cluster_class: type[SimulatedCluster] = SimulatedCluster
    ) -> None:
        # in memory: hundreds of runs bring files to the disk, and would wait for it
        self._folder = tempfile.TemporaryDirectory(prefix="simulated-run-", dir="/dev/shm")
        self.disk = SimulatedDisk()
        cluster = cluster_class(Path(self._folder.name), settings.behavior, settings.seed)
        cluster.config.max_deaths = settings.max_deaths
        if settings.placement is Placement.turns:
            cluster.cards = SmallCards(settings)
        cluster.num_nodes = -(-max(settings.num_rollout_workers, settings.num_ranks) // 2)
        super().__init__(settings, cluster)
        self.prompts = NumberedPrompts(settings.num_prompts)
        self.workflow = NamedWorkflow()
        self.evaluations: list[tuple[int, EvaluationOutcome]] = []
        self.duration_s = 0.0
        self._evaluation: asyncio.Task[EvaluationOutcome] | None = None
        self.make_controllers()

    def make_controllers(self) -> None:
        """Those of one start of the script, which is a process of its own."""
        settings, cluster = self.settings, self.cluster
        shared_card._of_schedulers.pop(cluster, None)
        self.runtime = runtime = Runtime(cluster.transport(), cluster.new_id, self.disk)
        actor_config, rollout_config = configs(settings)
        self.actor = TrainController(FSDPPPOActor(actor_config), cluster, runtime=runtime)
        self.rollout = RolloutController(LocalGenerator(rollout_config), cluster, runtime=runtime)
        model = FSDPPPOActor(replace(actor_config, is_frozen=settings.is_reference_frozen))
        reference = TrainController(model, cluster, role="ref", runtime=runtime)
        self.others = [reference] if settings.has_reference else []
        self.rollout.groups.admission.total_steps = (
            settings.num_steps if settings.ends_at_last_step else None
        )
        self.watch_journal()

    @property
    def controllers(self) -> list[Controller]:
        return [*self.others, self.actor, self.rollout]

    @asynccontextmanager
    async def started(self) -> AsyncIterator[TrainingRun]:
        """The controllers, between `start_async` and `close_async`."""
        around, controllers = asyncio.all_tasks(), self.controllers
        try:
            with self.watching():
                await asyncio.gather(*(controller.start_async() for controller in controllers))
                yield self
        finally:
            await asyncio.gather(*(controller.close_async() for controller in controllers))
            self.clean_up()
        left = asyncio.all_tasks() - around
        await asyncio.sleep(SLOWEST_MESSAGES_S)  # what was on its way arrives
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        process = PROCESS.get()
        left = {task for task in left if not task.done() and loop.process_of(task) is process}
        assert not left, f"tasks are left: {left}"

    async def play(self) -> TrainingRun:
        """All steps; raises what the controllers raise."""
        async with self.started():
            for _ in range(self.settings.num_steps):
                await self.step()
            self.duration_s = self.cluster.now_s
            await self.collect_evaluation()
            await self.check_end()
        return self

    async def step(self, *, checks_business: bool = True) -> BatchMetadata:
        """One training step, as in a script."""
        settings, rollout, actor = self.settings, self.rollout, self.actor
        batch = await rollout.prepare_batch_async(self.prompts, self.workflow)
        self.batches.append(batch)
        self.check_batch(batch)
        self.check_stores(batch)
        await self._evaluate_when_due()
        batch = await self.compute_logprobs(batch)
        batch = actor.compute_advantages(batch)
        await actor.ppo_update_async(batch)
        self.check_step_was_trained(batch)
        await actor.publish_weights_async(rollout)
        if checks_business:
            self.check_generation_is_busy()
        num_sealed = settings.weight_update is not WeightUpdateMethod.disk
        for rank in self.cluster.train_workers:
            assert len(rank.store.sizes) == num_sealed, "a rank holds more than the weights"
        return batch

    async def compute_logprobs(self, batch: BatchMetadata) -> BatchMetadata:
        for reference in self.others:
            batch = await reference.compute_logprobs_async(batch, field="reference_logprobs")
        return await self.actor.compute_proximal_logprobs_async(batch)

    def watching(self) -> AbstractContextManager[Any]:
        """While it lasts, these books hear of it when the ledger goes back."""
        return patch.object(Ledger, "go_back", self.watched_go_back())

    def clean_up(self) -> None:
        """The run has ended."""
        self._folder.cleanup()

    def forget_batch(self) -> None:
        """The newest one is formed anew: what was trained on it is undone."""
        batch, trained = self.batches.pop(), self.cluster.trained
        for group_id in batch.group_ids:
            del self.trained_at[group_id]
        if trained and trained[-1].version == batch.global_step:
            trained.pop()

    async def save(self) -> dict[str, Any]:
        """What a snapshot holds, as it would lie on the disk, and this book."""
        return {
            "controllers": msgspec.msgpack.encode(await self.rollout.state_async()),
            "version": self.actor.version,
            "ranks": {rank.name: list(rank.past) for rank in self.cluster.train_workers},
            "batches": list(self.batches),
            "admitted": list(self.admitted),
            "rejected": dict(self.rejected),
            "trained_at": dict(self.trained_at),
        }

    async def load(self, saved: dict[str, Any]) -> None:
        """Goes on from there, as the trainer does, with other workers."""
        state = msgspec.msgpack.decode(saved["controllers"], type=RolloutState)
        for name, past in saved["ranks"].items():
            self.cluster.snapshots[SnapshotKey("", -1, saved["version"], name)] = past
        await self.actor.load_snapshot_async(saved["version"])
        self.batches = list(saved["batches"])
        self.admitted = list(saved["admitted"])
        self.rejected = dict(saved["rejected"])
        self.trained_at = dict(saved["trained_at"])
        await self.rollout.go_back_async(state)
        await self.actor.share_weights_async(self.rollout)

    async def _evaluate_when_due(self) -> None:
        every = self.settings.evaluate_every
        if every and len(self.batches) % every == 0:
            await self.collect_evaluation()
            self._evaluation = asyncio.create_task(
                self.rollout.evaluate_async(self.prompts, self.workflow, num_prompts=7)
            )

    async def collect_evaluation(self) -> None:
        if self._evaluation is not None:
            evaluation, self._evaluation = self._evaluation, None
            self.evaluations.append((len(self.batches), await evaluation))


def play(settings: Settings, **limits: Any) -> TrainingRun:
    """Plays a run in virtual time."""
    return run_virtual(TrainingRun(settings).play(), **limits)
