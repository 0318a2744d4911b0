"""The controllers' training loop over simulated workers, with books that the test keeps itself.

`TrainingRun` drives the real `RolloutController` and `TrainController` the way a user's script
does, and checks what every mode promises at each admission, start, batch and sweep.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from simulation.behavior import Behavior
from simulation.cluster import SimulatedCluster
from simulation.disk import SimulatedDisk
from simulation.tasks import NamedWorkflow, NumberedPrompts
from simulation.virtual_loop import run_virtual
from simulation.workers import SnapshotKey

from areal_sc.config.schema import (
    ActorConfig,
    Dtype,
    GenerationConfig,
    OptimizerConfig,
    OverBound,
    ParallelConfig,
    PPOConfig,
    RolloutConfig,
    WeightUpdateConfig,
    WeightUpdateMethod,
)
from areal_sc.config.store_room import trajectory_bytes
from areal_sc.controller.evaluation import EvaluationOutcome
from areal_sc.controller.group import Group
from areal_sc.controller.ledger import Ledger
from areal_sc.controller.rollout import RolloutController, RolloutState
from areal_sc.controller.runtime import Runtime
from areal_sc.controller.train import TrainController
from areal_sc.controller.weight_updates import NO_VERSION
from areal_sc.engines.handles import FSDPPPOActor, LocalGenerator
from areal_sc.metadata import BatchMetadata, PromptReference

SLOWEST_MESSAGES_S = 100.0


@dataclass
class Settings:
    """What a run is made of; `store_groups` is each rollout store's limit in worst-case groups."""

    num_steps: int = 8
    over_bound: OverBound = OverBound.train
    max_staleness: int = 2
    batch_groups: int = 4
    group_size: int = 2
    num_rollout_workers: int = 2
    num_ranks: int = 1
    model_size: int = 1
    num_minibatches: int = 2
    max_concurrent_groups: int = 64
    store_groups: int = 1000
    max_context_tokens: int = 64
    max_episode_tokens: int = 0
    max_rejection_rate: float = 1.0
    rejection_window: int = 20
    group_timeout_s: float = 50_000.0
    ends_at_last_step: bool = True
    evaluate_every: int = 0
    weight_update: WeightUpdateMethod = WeightUpdateMethod.pull
    weight_step_timeout_s: float = 600.0
    num_prompts: int = 1000
    memory_every: int = 1
    keep_rows_steps: int = 0
    max_deaths: int = 5
    seed: int = 0
    behavior: Behavior = field(default_factory=Behavior)

    @property
    def group_bytes(self) -> int:
        return trajectory_bytes(
            self.group_size * (self.max_episode_tokens or self.max_context_tokens)
        )


class WatchedLedger(Ledger):
    """The real ledger; tells a run of each admission before it is made."""

    run: TrainingRun

    def admit(self, prompt: PromptReference, version: int) -> Group:
        self.run.before_admission(prompt, version)
        return super().admit(prompt, version)

    def reject(self, group_id: int, reason: str, *, returns_prompt: bool = False) -> None:
        super().reject(group_id, reason, returns_prompt=returns_prompt)
        self.run.rejected[group_id] = reason


class TrainingRun:
    """One run of some settings; `cluster` holds what the workers saw."""

    def __init__(
        self, settings: Settings, cluster_class: type[SimulatedCluster] = SimulatedCluster
    ) -> None:
        self.settings = settings
        self._folder = tempfile.TemporaryDirectory(prefix="simulated-run-")
        self.disk = SimulatedDisk()
        self.cluster = cluster_class(Path(self._folder.name), settings.behavior, settings.seed)
        self.cluster.config.max_deaths = settings.max_deaths
        self.cluster.num_nodes = -(-max(settings.num_rollout_workers, settings.num_ranks) // 2)
        self.runtime = runtime = Runtime(self.cluster.transport(), self.cluster.new_id, self.disk)
        actor_config, rollout_config = configs(settings)
        self.actor = TrainController(FSDPPPOActor(actor_config), self.cluster, runtime=runtime)
        self.rollout = RolloutController(
            LocalGenerator(rollout_config), self.cluster, runtime=runtime
        )
        self.rollout.groups.total_steps = settings.num_steps if settings.ends_at_last_step else None
        self.cluster.on_forgotten = self.before_forgotten
        ledger = WatchedLedger()
        ledger.run = self
        self.rollout.groups.ledger = ledger
        self.prompts = NumberedPrompts(settings.num_prompts)
        self.workflow = NamedWorkflow()
        self.batches: list[BatchMetadata] = []
        self.evaluations: list[tuple[int, EvaluationOutcome]] = []
        self.admitted: list[tuple[PromptReference, int]] = []
        self.rejected: dict[int, str] = {}
        self.trained_at: dict[int, int] = {}
        self.duration_s = 0.0
        self._evaluation: asyncio.Task[EvaluationOutcome] | None = None

    @asynccontextmanager
    async def started(self) -> AsyncIterator[TrainingRun]:
        """The controllers, between `start_async` and `close_async`."""
        try:
            await asyncio.gather(self.actor.start_async(), self.rollout.start_async())
            yield self
        finally:
            await asyncio.gather(self.actor.close_async(), self.rollout.close_async())
            self._folder.cleanup()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.sleep(SLOWEST_MESSAGES_S)  # what was on its way arrives
        assert all(task.done() for task in left), f"tasks are left: {left}"

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
        batch = await actor.compute_proximal_logprobs_async(batch)
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

    # ------------------------------------------------------------------ recovery

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
        self.rollout.restore(state)
        ledger = self.rollout.groups.ledger
        ledger.__class__ = WatchedLedger
        assert isinstance(ledger, WatchedLedger)
        ledger.run = self
        self.batches = list(saved["batches"])
        self.admitted = list(saved["admitted"])
        self.rejected = dict(saved["rejected"])
        self.trained_at = dict(saved["trained_at"])
        await self.actor.share_weights_async(self.rollout)

    # ------------------------------------------------------------------ checks

    def before_admission(self, prompt: PromptReference, version: int) -> None:
        """Eq. 3, counted by this book: floor(N / B) <= i + eta before the new group."""
        settings = self.settings
        assert version == self.rollout.version == self.actor.version
        self.before_announcement(version)
        num_counted = len(self.admitted) - len(self.rejected)
        assert num_counted // settings.batch_groups <= version + settings.max_staleness
        num_unconsumed = len(self.admitted) - len(self.rejected) - len(self.trained_at)
        taken = sum(
            len(worker.running) + len(worker.store.group_of)
            for worker in self.cluster.rollout_workers
        )
        assert max(num_unconsumed, taken) < settings.store_groups * settings.num_rollout_workers
        self.check_loads()
        self.admitted.append((prompt, version))

    def before_announcement(self, version: int) -> None:
        """Admission counts from this version."""

    def check_loads(self, num_promised: int | None = None) -> None:
        """What workers are chosen by is the sum of their stores' books, and within all limits."""
        workers, loads = self.rollout._workers, self.rollout._workers._loads
        books = [(s.store.num_running, s.store.num_held) for s in workers._states]
        assert list(zip(loads._running, loads._held, strict=True)) == books
        assert loads.num_stored == sum(running + held for running, held in books)
        assert all(loads._version[s.number] in (s.version, NO_VERSION) for s in workers._states)
        taken = loads._running + loads._held + loads._promised
        assert loads._on_node.tolist() == np.bincount(loads._node, taken).tolist()
        assert (taken <= loads._max_on_worker).all()
        assert (loads._on_node <= loads._max_on_node).all()
        assert num_promised is None or loads._promised.sum() == num_promised

    def before_forgotten(self, shard_id: str, group_id: int) -> None:
        """Its group is rejected, or was trained in a step that is over, or runs once more."""
        version = self.rollout.version
        is_over = group_id in self.rejected or self.trained_at.get(group_id, version) < version
        newest = max(attempt for group, attempt in self.cluster.sealed_rows if group == group_id)
        is_lost = self.cluster.attempt_of[shard_id] < max(newest, self._attempt(group_id))
        assert group_id < 0 or is_over or is_lost, f"group {group_id} is needed: {shard_id}"

    def _attempt(self, group_id: int) -> int:
        """The current one of a group that is not consumed yet."""
        groups = self.rollout.groups.ledger.unconsumed()
        return next((group.attempt for group in groups if group.group_id == group_id), 0)

    def check_batch(self, batch: BatchMetadata) -> None:
        settings, version = self.settings, len(self.batches) - 1
        assert batch.global_step == version
        assert len(batch.group_ids) == settings.batch_groups
        assert list(batch.group_ids) == sorted(batch.group_ids), "the oldest groups come first"
        attempts = {row.group_id: row.attempt for row in batch.rows}
        sealed = [row for key in attempts.items() for row in self.cluster.sealed_rows[key]]
        assert list(batch.rows) == sealed, "batches consist of whole groups"
        for row in batch.rows:
            assert row.admitted_version == self.admitted[row.group_id][1]
            # tokens are of versions that existed, none older than the group's admission
            assert row.admitted_version <= row.version_spans[0][0]
            assert row.version_spans[-1][0] <= version
        for group_id in batch.group_ids:
            assert group_id not in self.trained_at, f"group {group_id} is trained twice"
            assert group_id not in self.rejected, f"rejected group {group_id} is trained"
            self.trained_at[group_id] = version
        if settings.over_bound in (OverBound.wait, OverBound.regenerate):
            assert max(version - row.admitted_version for row in batch.rows) <= (
                settings.max_staleness
            )
        is_masked = settings.over_bound is OverBound.mask
        bound = version - settings.max_staleness if is_masked else None
        assert batch.min_token_version == bound
        if bound is not None:
            trainable = {r.group_id for r in batch.rows if r.num_loss_tokens_since(bound)}
            assert trainable == set(batch.group_ids), "a group without a trainable token"

    def check_stores(self, batch: BatchMetadata) -> None:
        """Right after a batch is formed, the stores hold what is still needed, and little else.

        What the step before has trained may still be on its way out; all before that is gone.
        """
        needed = {shard.shard_id for shard in batch.shards}
        for group in self.rollout.groups.ledger.unconsumed():
            if group.batch is not None and self.rollout._workers.are_rows_known(group.worker):
                needed |= {shard.shard_id for shard in group.batch.shards}
        held: dict[str, int] = {}
        for worker in self.cluster.rollout_workers:
            held |= worker.store.group_of
        assert needed <= held.keys()
        if self.settings.behavior.sweep_delay_s or self.rollout.num_restarts:
            return
        for shard_id in held.keys() - needed:
            trained_at = self.trained_at.get(held[shard_id], batch.global_step)
            assert trained_at >= batch.global_step - 1, (
                f"group {held[shard_id]}, trained at {trained_at}, is still held at version "
                f"{batch.global_step}"
            )

    def check_step_was_trained(self, batch: BatchMetadata) -> None:
        step = self.cluster.trained[-1]
        assert step.version == batch.global_step
        assert step.min_token_versions == {batch.min_token_version}
        expected = Counter((row.group_id, row.sequence_length) for row in batch.rows)
        assert Counter((row.group_id, row.sequence_length) for row in step.rows) == expected
        episodes = [{(r.group_id, r.episode) for r in rows} for rows in step.minibatches.values()]
        sizes = [len(of_minibatch) for of_minibatch in episodes]
        assert sum(sizes) == len(batch.episodes), "an episode lies in two minibatches"
        assert len(sizes) == min(self.settings.num_minibatches, len(batch.episodes))
        assert max(sizes) - min(sizes) <= 1
        if self.settings.max_staleness == 0:
            assert {span[0] for row in step.rows for span in row.version_spans} == {step.version}
            assert step.num_running_groups == 0, "generation goes on while a step is trained"

    def check_generation_is_busy(self) -> None:
        """After a publication nothing waits for admission that eq. 3 and the limits allow."""
        settings, account = self.settings, self.rollout.groups.ledger.account()
        num_counted = len(self.admitted) - len(self.rejected)
        limit = (self.actor.version + settings.max_staleness + 1) * settings.batch_groups
        if settings.ends_at_last_step:
            limit = min(limit, settings.num_steps * settings.batch_groups)
        num_open = account["queued"] + account["running"]
        assert (
            num_counted == limit
            or num_open >= settings.max_concurrent_groups
            or settings.store_groups < 100
        ), f"{num_counted} groups are admitted, {limit} may be"

    async def check_end(self) -> None:
        """The account is complete, and matches this book and the workers' state."""
        self.check_loads(num_promised=0 if self.settings.ends_at_last_step else None)
        account = self.rollout.groups.ledger.account()
        num_trained = sum(batch.total_batch_size for batch in self.batches)
        assert account["admitted"] == len(self.admitted)
        assert account["consumed"] == len(self.trained_at)
        assert account["consumed"] == self.settings.num_steps * self.settings.batch_groups
        assert account["rejected"] == dict(Counter(self.rejected.values()))
        assert account["rows_consumed"] == account["rows_trained"] == num_trained
        assert account["rows_trained_twice"] == 0
        if self.settings.ends_at_last_step:
            assert account["queued"] + account["running"] + account["finished"] == 0
            await self._check_stores_drain()
        await self._check_prompts()
        for start in self.cluster.starts:
            assert start.worker_version >= start.admitted_version

    async def _check_stores_drain(self) -> None:
        """Nothing is needed any more, so nothing is left, whatever was given up."""
        await asyncio.sleep(SLOWEST_MESSAGES_S)
        for worker in self.cluster.rollout_workers:
            assert not worker.store.sizes, f"{worker.name} still holds {worker.store.group_of}"

    async def _check_prompts(self) -> None:
        """Every prompt taken from the stream was admitted; a stale group's prompt comes again."""
        state = (await self.rollout.state_async()).training
        waiting = Counter(prompt.index for prompt in state.returned_prompts)
        num_stale = Counter(
            self.admitted[g][0].index for g, r in self.rejected.items() if r == "stale"
        )
        admitted = Counter(prompt.index for prompt, _ in self.admitted)
        assert (admitted - num_stale + waiting).total() == state.num_prompts_taken
        if state.num_prompts_taken <= self.settings.num_prompts:
            assert max((admitted - num_stale + waiting).values()) == 1

    # ------------------------------------------------------------------ evaluation

    async def _evaluate_when_due(self) -> None:
        every = self.settings.evaluate_every
        if every and len(self.batches) % every == 0:
            await self.collect_evaluation()
            self._evaluation = asyncio.create_task(
                self.rollout.evaluate_async(self.prompts, self.workflow, num_prompts=7)
            )

    async def collect_evaluation(self) -> None:
        if self._evaluation is not None:
            outcome = await self._evaluation
            self.evaluations.append((len(self.batches), outcome))
            self._evaluation = None


@dataclass
class SimulatedParallel(ParallelConfig):
    """Ranks that hold a model together, too; neighbours are in one model group."""

    model: int = 1

    @property
    def num_ranks(self) -> int:
        return self.data * self.model


def configs(settings: Settings) -> tuple[ActorConfig, RolloutConfig]:
    """The sections of a configuration, their `${...}` replaced."""
    weight_update = WeightUpdateConfig(
        settings.weight_update, folder="weights", step_timeout_s=settings.weight_step_timeout_s
    )
    actor = ActorConfig(
        path="/no/model",
        parallel=SimulatedParallel(settings.num_ranks // settings.model_size, settings.model_size),
        seed=settings.seed,
        optimizer=OptimizerConfig(total_steps=settings.num_steps),
        ppo=PPOConfig(num_minibatches=settings.num_minibatches),
        memory_every_steps=settings.memory_every,
        keep_rows_steps=settings.keep_rows_steps,
        weight_update=weight_update,
    )
    rollout = RolloutConfig(
        path="/no/model",
        generation=GenerationConfig(),
        dtype=Dtype.float32,
        num_workers=settings.num_rollout_workers,
        seed=settings.seed,
        train_batch_groups=settings.batch_groups,
        group_size=settings.group_size,
        max_staleness=settings.max_staleness,
        over_bound=settings.over_bound,
        max_concurrent_groups=settings.max_concurrent_groups,
        max_context_tokens=settings.max_context_tokens,
        max_episode_tokens=settings.max_episode_tokens,
        store_bytes=settings.store_groups * settings.group_bytes,
        group_timeout_s=settings.group_timeout_s,
        max_rejection_rate=settings.max_rejection_rate,
        rejection_window=settings.rejection_window,
        weight_update=weight_update,
    )
    return actor, rollout


def play(settings: Settings, **limits: Any) -> TrainingRun:
    """Plays a run in virtual time."""
    return run_virtual(TrainingRun(settings).play(), **limits)
