"""Workers without engines, and those that generate: rows are numbers of tokens.

Generation, training and transfers are pauses of random length. Whoever reads a shard that was
swept fails, as with real workers, and so does whoever seals one that the store has no room for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from statistics import fmean
from typing import TYPE_CHECKING

from msgspec.structs import replace
from simulation.behavior import Number
from simulation.process import Process
from simulation.store import SimulatedStore

from areal_sc.errors import EngineFailed, StoreFull, TransportError
from areal_sc.metadata import BatchMetadata, Columns, RowMetadata, RowRun, ShardMetadata
from areal_sc.nodes.spec import Beat, WorkerOrder
from areal_sc.rejection import Rejection, RejectionKind
from areal_sc.sizing.store_room import trajectory_bytes
from areal_sc.system.waiting import all_of
from areal_sc.token_fields import TRAJECTORY_FIELDS
from areal_sc.transport.plane_stats import PlaneStats
from areal_sc.transport.rpc.method import Served
from areal_sc.transport.rpc.newest_term import NewestTerm
from areal_sc.weights import methods
from areal_sc.weights.published import ShardReference, WeightsReference
from areal_sc.workers import calls
from areal_sc.workers.calls import DESCRIBE_ROLLOUT, NO_POLICY, RolloutDescription
from areal_sc.workers.group_runs import GroupRuns

if TYPE_CHECKING:
    from simulation.cluster import SimulatedCluster

PROMPT_TOKENS = 4


class SimulatedWorker:
    """Base of both kinds: a store, and a life.

    Attributes:
        order: what it was started by.
        process: of this life.
        newest_term: of a controller.
        room_bytes: that it has found for the stores of its node.
        exit_status: how its process ended; None while it lives.
        is_hung: it lives, and does nothing, as when it is stopped.
        is_blocked: it beats, and its event loop does not turn.
        inbox: what it takes when it goes on.
    """

    def __init__(self, cluster: SimulatedCluster, order: WorkerOrder, node: str) -> None:
        self.cluster = cluster
        self.order = order
        self.newest_term = NewestTerm(cluster.agents[node].newest_term.number)
        self.process = Process(order.name)
        self.config = order.engine_config
        self.name = order.name
        self.role = order.role
        self.incarnation = order.incarnation
        self.node = node
        self.address = f"sim://{cluster.machine(node)}:{order.port or cluster.new_port()}"
        self.store = SimulatedStore(self.name, order.incarnation, order.store_bytes)
        self.room_bytes = cluster.room_bytes
        self.version = 0
        self.exit_status: str | None = None
        self.inbox: list[Callable[[], None]] = []
        self.has_memory = False  # of the card
        self.num_using = 0
        self._woken = asyncio.Event()
        self._last_beat_s: float | None = None
        self._last_turn_s: float | None = None
        self.served = {served.method.name: served for served in self.methods()}

    def methods(self) -> list[Served]:
        """Those of its control socket, as the real worker has them."""
        return [
            calls.PING.served_by(self.ping),
            calls.SHUTDOWN.served_by(self.shutdown),
            calls.SWEEP.served_by(self.sweep),
            calls.ADOPTED_SHARDS.served_by(self.adopted_shards),
            calls.STATS.served_by(self.stats),
        ]

    def take_memory(self) -> None:
        """Uses the card's memory, or goes on to."""
        self.has_memory = True
        self.cluster.check_cards()

    @property
    def is_hung(self) -> bool:
        return self._last_beat_s is not None

    @is_hung.setter
    def is_hung(self, is_hung: bool) -> None:
        self._last_beat_s = self.cluster.now_s if is_hung else None
        self._note_wake_up()

    @property
    def is_blocked(self) -> bool:
        return self._last_turn_s is not None

    @is_blocked.setter
    def is_blocked(self, is_blocked: bool) -> None:
        self._last_turn_s = self.cluster.now_s if is_blocked else None
        self._note_wake_up()

    def _note_wake_up(self) -> None:
        """It takes what came while it was stopped, and goes on with what it did."""
        if not (self.is_hung or self.is_blocked):
            self._woken.set()
            inbox, self.inbox = self.inbox, []
            for take in inbox:
                take()
        else:
            self._woken.clear()

    async def spend(self, duration: Number) -> None:
        """The worker is at work for so long; while it is stopped it gets nowhere."""
        await self.cluster.spend(duration)
        while self.is_hung or self.is_blocked:
            await self._woken.wait()

    @property
    def beat(self) -> Beat:
        """What its agent last heard of it."""
        now_s = self.cluster.now_s
        beat_s = now_s if self._last_beat_s is None else self._last_beat_s
        turn_s = beat_s if self._last_turn_s is None else self._last_turn_s
        return Beat(self.name, self.incarnation, now_s - beat_s, now_s - turn_s)

    async def ping(self, _: None) -> None:
        return None

    async def shutdown(self, _: None) -> None:
        self.cluster.on_left(self)
        asyncio.get_running_loop().call_later(0.05, self.end, "exit code 0")

    async def sweep(self, sweep: calls.Sweep) -> int:
        for shard_id, group_id in self.store.sweep(sweep).items():
            self.cluster.on_forgotten(shard_id, group_id)
        return self.store.last_sequence

    async def adopted_shards(self, _: None) -> tuple[calls.HeldShard, ...]:
        return self.store.adopted

    async def stats(self, _: None) -> calls.WorkerStats:
        return calls.WorkerStats(PlaneStats(store_bytes=sum(self.store.sizes.values())))

    def end(self, exit_status: str, *, keeps_memory: bool = True) -> None:
        """The process ends: nothing that it still did is ever answered.

        Args:
            keeps_memory: its shards outlive it, and its next life adopts them.
        """
        if self.exit_status is None:
            self.exit_status = exit_status
            self.process.kill()
            self.has_memory = False
            self.is_hung = True
            if not keeps_memory:
                self.store.lose()
            self.cluster.network.end(self)
            self.cluster.agents[self.node].note_end(self.name, self.incarnation, exit_status)

    async def read_shards(self, batch: BatchMetadata, duration: Number = 0.0) -> None:
        """Reads all rows of a batch from their owners; every shard must last until the end."""
        for _ in range(2):
            for shard in batch.shards:
                owner = await self.cluster.reach(shard.node_id, shard.node_addr)
                owner.require(shard.shard_id)
            await self.spend(duration)

    def sealed(self, shard_id: str) -> calls.SealedShard:
        shard = ShardReference(self.name, self.address, shard_id)
        return calls.SealedShard(shard, self.store.last_sequence)


class SimulatedRolloutWorker(SimulatedWorker):
    """Generates rows of random length in random time.

    Attributes:
        runs: of groups; a run is played once.
        running: those that are played now.
        policy: lineage and version of its weights; None: the first ones.
        policies: all that it has held, in order.
        history: (time, policy version held from then on), ascending.
    """

    def __init__(self, cluster: SimulatedCluster, order: WorkerOrder, node: str) -> None:
        self.runs = GroupRuns()
        super().__init__(cluster, order, node)
        self.running: set[calls.GroupAttempt] = set()
        self.history: list[tuple[float, int]] = [(cluster.now_s, 0)]
        self.num_evaluations = 0
        self.policy: tuple[int, int] | None = None
        self.policies: list[tuple[int, int]] = []
        self.is_updating = False
        self._one_update = asyncio.Lock()
        self._is_built = False
        self._copy = ""
        self.is_awake = asyncio.Event()
        self.is_awake.set()
        self._has_weights = asyncio.Event()
        self._building = asyncio.Event()
        self._building.set()

    def methods(self) -> list[Served]:
        return [
            *super().methods(),
            calls.INITIALIZE_ENGINE.served_by(self.initialize),
            DESCRIBE_ROLLOUT.served_by(self.describe),
            calls.RUN_GROUP.served_by(self.run_group),
            calls.GIVE_UP_GROUP.served_by(self.runs.give_up),
            calls.EPISODES.served_by(self.report),
            calls.RUN_EVALUATION.served_by(self.run_evaluation),
            methods.ADOPT_WEIGHTS.served_by(self.adopt_weights),
            methods.COPY_WEIGHTS.served_by(self.copy_weights),
            methods.WEIGHT_RANKS.served_by(self.weight_ranks),
            methods.JOIN_WEIGHT_GROUP.served_by(self.join_weight_group),
            methods.LEAVE_WEIGHT_GROUP.served_by(self.leave_weight_group),
            calls.SLEEP.served_by(self.sleep),
            calls.PAUSE.served_by(self.pause),
            calls.RESUME.served_by(self.resume),
        ]

    async def initialize(self, _: None) -> None:
        if self._is_built:
            return
        self._is_built = True
        self.take_memory()
        self._building.clear()
        await self.spend(self.cluster.behavior.publication_s)
        self._building.set()
        self._has_weights.set()

    async def sleep(self, _: None) -> None:
        await self._building.wait()
        async with self._one_update:
            self._has_weights.clear()
            self.policy = NO_POLICY
            self.has_memory = False

    def end(self, exit_status: str, *, keeps_memory: bool = True) -> None:
        super().end(exit_status, keeps_memory=keeps_memory)
        self.running.clear()

    async def pause(self, _: None) -> None:
        self.is_awake.clear()

    async def resume(self, _: None) -> None:
        self.is_awake.set()

    async def run_group(self, group: calls.RunGroup) -> calls.GroupReply:
        run = calls.GroupAttempt(group.group_id, group.attempt)
        return await self.runs.join(run, lambda: self._play_group(run, group))

    async def _play_group(self, run: calls.GroupAttempt, group: calls.RunGroup) -> calls.GroupReply:
        """Cancelled, it leaves nothing in the store."""
        self.cluster.note_start(self, group)
        self.check_room(group)
        self.running.add(run)
        sealed: dict[int, str] = {}
        try:
            await self._take_over(run, group, sealed)
            own = [number for number in range(group.group_size) if number not in sealed]
            await all_of(self._play_episode(run, group, number, sealed) for number in own)
        except asyncio.CancelledError:
            await self.spend(self.cluster.behavior.give_up_s)
            for shard_id in sealed.values():
                if self.store.episodes[shard_id].run == run:
                    self.store.drop(shard_id)
            raise
        finally:
            self.running.discard(run)
        self.cluster.num_taken_over += group.group_size - len(own)
        return self._close_group(run, group, sealed)

    async def _take_over(
        self, run: calls.GroupAttempt, group: calls.RunGroup, sealed: dict[int, str]
    ) -> None:
        for shard, episode in ((it.shard, it.episode) for it in group.kept):
            assert episode.number not in sealed, "an episode was kept twice"
            assert episode.run.group_id == run.group_id
            if shard.shard_id in self.store.sizes:
                sealed[episode.number] = shard.shard_id
                continue
            try:
                owner = await self.cluster.reach(shard.node_id, shard.node_addr)
                owner.require(shard.shard_id)
            except TransportError:
                continue
            num_bytes = trajectory_bytes(sum(row.sequence_length for row in episode.rows))
            sealed[episode.number] = self.store.put(num_bytes, replace(episode, run=run))

    async def _play_episode(
        self, run: calls.GroupAttempt, group: calls.RunGroup, number: int, sealed: dict[int, str]
    ) -> None:
        behavior, rng, began = self.cluster.behavior, self.cluster.rng, self.cluster.now_s
        await self.spend(behavior.generation_s)
        await self._until_it_samples()
        rows, rejection = (), None
        if rng.random() < behavior.episode_rejection:
            rejection = Rejection(RejectionKind.reward_error, "it raised")
        else:
            num_rows = int(self.cluster.draw(behavior.episode_rows))
            rows = tuple(self._row(group, began, number) for _ in range(num_rows))
        episode = calls.FinishedEpisode(run, number, rows, rejection=rejection)
        num_bytes = trajectory_bytes(sum(row.sequence_length for row in rows))
        sealed[number] = self.store.put(num_bytes, episode)
        played = run.group_id, number
        if played in self.cluster.sealed_episodes:
            self.cluster.played_again.append(played)
        self.cluster.sealed_episodes.add(played)

    def _close_group(
        self, run: calls.GroupAttempt, group: calls.RunGroup, sealed: dict[int, str]
    ) -> calls.GroupReply:
        """What the episodes come to, whoever has played them."""
        episodes = {number: self.store.episodes[it] for number, it in sorted(sealed.items())}
        kept = [number for number, it in episodes.items() if it.rejection is None]
        if self.cluster.rng.random() < self.cluster.behavior.group_rejection:
            kept = []
        for number, shard_id in sealed.items():
            if number not in kept and self.store.episodes[shard_id].run == run:
                self.store.drop(shard_id)
                self.cluster.sealed_episodes.discard((run.group_id, number))
        num_rejected = group.group_size - len(kept)
        rejection = Rejection(RejectionKind.reward_error, "it raised")
        rejected = (calls.RejectedEpisodes(num_rejected, rejection),) if num_rejected else ()
        if not kept:
            self.cluster.rejected_groups.add(group.group_id)
            return calls.GroupReply(run, rejected=rejected)
        shards, rows = [], list[RowMetadata]()
        for number in kept:
            its = [replace(row, attempt=run.attempt) for row in episodes[number].rows]
            part = (RowRun(len(rows), 0, len(its)),)
            shards.append(ShardMetadata(self.name, self.address, sealed[number], part))
            rows += its
        accuracy = fmean(row.reward for row in rows)
        metrics = {"accuracy": (accuracy * len(kept), len(kept))}
        self.cluster.sealed_rows[run.group_id, run.attempt] = tuple(rows)
        named = frozenset(shard.shard_id for shard in shards)
        self.cluster.shards_of[run.group_id, run.attempt] = named
        columns = Columns(dict(TRAJECTORY_FIELDS), tuple(shards))
        batch_id = f"g{group.group_id}.{group.attempt}"
        batch = BatchMetadata(batch_id, group.admitted_version, (columns,), tuple(rows))
        return calls.GroupReply(run, batch, rejected, metrics)

    async def _until_it_samples(self) -> None:
        """It has weights, which are the newest that it was given, and is not paused."""
        while not (self.is_awake.is_set() and self._has_weights.is_set()):
            await self.is_awake.wait()
            await self._has_weights.wait()
        assert self.has_memory, f"{self.name} samples, and has no memory"
        assert self.policy != NO_POLICY, f"{self.name} samples, and has no weights"

    def check_room(self, group: calls.RunGroup) -> None:
        """Whatever runs here may fill its rows, and one more group is about to begin."""
        groups = {run.group_id for run in self.running} | set(self.store.group_of.values())
        config, num_groups = self.config, len(groups | {group.group_id})
        episode_tokens = config["max_episode_tokens"] or config["max_context_tokens"]
        group_bytes = config["group_size"] * trajectory_bytes(episode_tokens)
        if 0 < self.store.max_bytes < num_groups * group_bytes:
            raise StoreFull(f"{self.name} was given {num_groups} groups of {group_bytes} bytes")

    async def report(self, _: None) -> calls.EpisodesReport:
        waiting = (calls.Waiting("generation", len(self.running), 1.0),)
        return calls.EpisodesReport(waiting if self.running else ())

    async def run_evaluation(self, _: calls.RunEvaluation) -> calls.EvaluationReply:
        self.num_evaluations += 1
        try:
            began = self.cluster.now_s
            await self.spend(self.cluster.behavior.evaluation_s)
            await self._until_it_samples()
        finally:
            self.num_evaluations -= 1
        versions = self._versions(began, 100)
        return calls.EvaluationReply(1.0, {"accuracy": 1.0}, (versions[0], versions[-1]))

    async def describe(self, _: None) -> RolloutDescription:
        runs = self.runs
        return RolloutDescription(self.policy, runs.going, runs.ended, self.store.held)

    async def sweep(self, sweep: calls.Sweep) -> int:
        last_sequence = await super().sweep(sweep)
        self.runs.forget(self.store.sizes.__contains__)
        return last_sequence

    async def adopt_weights(self, weights: WeightsReference) -> None:
        async with self._one_update:
            if self.policy != weights.policy:
                self.take_memory()
                await self._update(weights)
                self._has_weights.set()
                self.policy = weights.policy
                self.policies.append(weights.policy)
                if [shard.shard_id for shard in weights.shards] != [self._copy]:
                    self.store.remove(self._copy)

    async def copy_weights(self, wanted: methods.CopyWeights) -> tuple[ShardReference, ...]:
        async with self._one_update:
            self.store.remove(self._copy)
            await self._pull(wanted.weights)
            self._copy = self.store.put_copy(wanted.weights.policy)
            return (ShardReference(self.name, self.address, self._copy),)

    async def _update(self, weights: WeightsReference) -> None:
        assert not self.is_updating, f"{self.name} was given weights while it pulls others"
        self.is_updating = True
        try:
            if not (weights.broadcast and await self._has_received(weights.broadcast.group)):
                await self._pull(weights)
        finally:
            self.is_updating = False
        self.version = weights.version
        self.history.append((self.cluster.now_s, self.version))

    async def _pull(self, weights: WeightsReference) -> None:
        for _ in range(2):
            for node_id, address, shard_id in weights.shards:
                store = await self.cluster.reach(node_id, address)
                store.require(shard_id)
                assert store.copies.get(shard_id, weights.policy) == weights.policy
            await self.spend(self.cluster.behavior.publication_s)

    async def _has_received(self, name: str) -> bool:
        """Whether the broadcast came; else this worker leaves the group, and pulls."""
        group = self.cluster.weight_groups[name]
        try:
            if not group.is_joined_by(self):
                raise EngineFailed(f"not a rank of weight group {name}")
            await group.receive(self)
        except EngineFailed:
            group.is_cancelled = True
            return False
        return True

    async def weight_ranks(self, name: str) -> methods.WeightRanks:
        is_member = bool(name) and self.cluster.weight_groups[name].is_joined_by(self)
        return methods.WeightRanks(1, is_cuda=False, devices=(), is_member=is_member)

    async def join_weight_group(self, join: methods.JoinWeightGroup) -> None:
        await self.cluster.weight_groups[join.group.name].meet(self)

    async def leave_weight_group(self, name: str) -> None:
        self.cluster.weight_groups[name].close()

    def _versions(self, began_s: float, num_tokens: int) -> list[int]:
        """The version that sampled each of the tokens, which come at a steady pace until now."""
        pace = (self.cluster.now_s - began_s) / num_tokens
        return [
            next(v for t, v in reversed(self.history) if t <= began_s + pace * (i + 1))
            for i in range(num_tokens)
        ]

    def _row(self, group: calls.RunGroup, began_s: float, episode: int) -> RowMetadata:
        num_tokens = int(self.cluster.draw(self.cluster.behavior.completion_tokens))
        # versions ascend: a few tokens tell where they change, and then stand for their share
        samples = self._versions(began_s, min(num_tokens, 50))
        counts = {v: samples.count(v) * num_tokens // len(samples) for v in samples}
        counts[samples[0]] += num_tokens - sum(counts.values())
        return RowMetadata(
            group_id=group.group_id,
            attempt=group.attempt,
            sequence_length=PROMPT_TOKENS + num_tokens,
            reward=float(self.cluster.rng.random() < 0.5),
            admitted_version=group.admitted_version,
            version_spans=tuple(sorted(counts.items())),
            episode=episode,
        )
