"""The rollout workers, as their controller tracks them: load, policy version, stored shards.

weights      one update a worker at a time, always to the newest version; none begins while
             the trainer seals the next one, or while an evaluation holds the worker. With
             `max_unavailable` workers take turns
stores       a group reserves its worst-case bytes in a worker's store and in its node's memory
             until nothing of it is left there (`worker_store`): a full store means that admission
             waits, not that a put fails. Shards that nobody needs are swept beside everything else
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from areal_sc.config.schema import (
    OnWeightUpdate,
    WeightUpdateMethod,
)
from areal_sc.config.store_room import describe_largest_group, max_group_bytes
from areal_sc.controller.background import Background
from areal_sc.controller.fleet import Fleet, Member
from areal_sc.controller.worker_loads import WorkerLoads
from areal_sc.controller.worker_queue import WorkerQueue
from areal_sc.controller.worker_rounds import WorkerRounds
from areal_sc.controller.worker_store import GroupRun, WorkerStore
from areal_sc.engines.handle_base import GeneratorHandle
from areal_sc.errors import ConfigError
from areal_sc.metadata import BatchMetadata
from areal_sc.transport.rpc.method import A, Method, R
from areal_sc.transport.shards.arena import block_span
from areal_sc.weights import WeightsReference
from areal_sc.workers import calls

UPDATE_STEPS = 4
"""Of a weight update that may take `weight_update.step_timeout_s` each; most take far less."""

RPC_MARGIN_S = 60.0
"""What a group's RPC may take beyond the group's own time limit, which the worker keeps."""


@dataclass
class RolloutWorkerState:
    """One rollout worker.

    Attributes:
        number: its place in the list of all workers.
        version: the policy version that its engine holds.
        store: the groups that take room in its store.
        num_evaluations: while there are any, it skips publications.
        update: the weight update that goes on, or the last one.
        sweep: the sweep of its store that goes on, or the last one.
    """

    member: Member
    number: int
    version: int = 0
    store: WorkerStore = field(default_factory=WorkerStore)
    num_evaluations: int = 0
    update: asyncio.Task[None] | None = None
    sweep: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def incarnation(self) -> str:
        return self.member.worker.incarnation

    @property
    def node(self) -> str:
        return self.member.worker.node

    @property
    def is_updating(self) -> bool:
        return self.update is not None and not self.update.done()

    @property
    def is_swept(self) -> bool:
        return self.sweep is not None and not self.sweep.done()


class RolloutWorkers:
    """Chooses, calls, updates and sweeps the workers of one RolloutController.

    Attributes:
        on_room: called whenever room in a store is free again.
    """

    def __init__(self, engine: GeneratorHandle, fleet: Fleet, background: Background) -> None:
        self.on_room: Callable[[], None] = lambda: None
        self._engine = engine
        self._config = config = engine.config
        self._fleet = fleet
        self._background = background
        self._states: list[RolloutWorkerState] = []
        self._loads = WorkerLoads([], 0, {})
        self._queue = WorkerQueue(self._loads, background)
        self._weights: WeightsReference | None = None
        self._are_updates_held = False
        self._updates = WorkerRounds(background, "weight updates", self._begin_update)
        self._sweeps = WorkerRounds(background, "sweeps", self.sweep_one)
        self._group_bytes = max_group_bytes(config)
        self._method = config.weight_update.method
        self._update_places = asyncio.Semaphore(_num_updated_at_once(engine))

    def __len__(self) -> int:
        return len(self._states)

    def track(self, members: Iterable[Member]) -> None:
        """The workers are up."""
        self._states = [RolloutWorkerState(m, number) for number, m in enumerate(members)]
        nodes = [state.node for state in self._states]
        self._loads = WorkerLoads(nodes, self._groups_per_worker, self._groups_by_node())
        self._queue = WorkerQueue(self._loads, self._background)

    async def close(self) -> None:
        """Ends updates and sweeps; their failures are the background's already."""
        await self._queue.close()
        await self._updates.close()
        await self._sweeps.close()
        await asyncio.sleep(0)  # updates take their first step: they are ended from within
        tasks = [task for state in self._states for task in (state.update, state.sweep) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._states.clear()

    def has_room(self, num_queued: int) -> bool:
        """Whether the stores can hold one more group at its worst-case size.

        Args:
            num_queued: groups that will be given to a worker.
        """
        return num_queued + self._loads.num_stored < self._loads.max_groups

    def check_room(self) -> None:
        """Whether the stores hold one training batch at its worst-case size.

        The limits that are set were checked before; how much memory is free shows only here.

        Raises: ConfigError: they do not, so that no batch might ever be complete.
        """
        wanted = self._config.train_batch_groups
        if self._loads.max_groups < wanted:
            raise ConfigError(
                "transport.shared_memory: expected room for a batch, that is for "
                f"rollout.train_batch_groups={wanted} groups "
                f"({describe_largest_group(self._config)}), but what is free there, and the limits "
                f"of the stores, leave room for {self._loads.max_groups}; give more room, shorter "
                "contexts, smaller batches, or another folder"
            )

    async def take(self, version: int) -> RolloutWorkerState:
        """The least loaded worker that holds `version` or a later one and has room.

        Whoever takes it counts the group as running before its next await.

        Raises: WaitTimeout: nothing changed for too long. The failure of background work.
        """
        return self._states[await self._queue.take(version)]

    async def call(self, state: RolloutWorkerState, method: Method[A, R], args: A) -> R:
        """Reply of a call that may take as long as a group."""
        return await self._fleet.call(
            state.member, method, args, timeout_s=self._config.group_timeout_s + RPC_MARGIN_S
        )

    def begin_run(self, state: RolloutWorkerState, run: GroupRun) -> None:
        """The worker is asked to run a group, which takes room from now on."""
        state.store.begin(run)
        self._recount(state)

    def end_run(
        self, state: RolloutWorkerState, run: GroupRun, batch: BatchMetadata | None
    ) -> None:
        """The worker has ended the run; the shards of `batch` take its room, if there are any."""
        state.store.end(run, [] if batch is None else [s.shard_id for s in batch.shards])
        self._recount(state)
        self._background.notify()

    def sweep(self) -> None:
        """Workers begin to forget the shards that their owners do not need any more."""
        self._sweeps.begin(self._states)

    def sweep_one(self, state: RolloutWorkerState) -> bool:
        """One worker begins to forget such shards, if there are any and it is not at it."""
        if state.is_swept or not state.store.has_dead:
            return False
        state.sweep = asyncio.create_task(
            self._background.guard(self._sweep(state)), name=f"sweep {state.name}"
        )
        return True

    async def _sweep(self, state: RolloutWorkerState) -> None:
        while state.store.has_dead:
            plan = state.store.plan_sweep(state.incarnation)
            last_sequence = await self._fleet.call(state.member, calls.SWEEP, plan.sweep)
            state.store.confirm_sweep(plan, last_sequence)
            self._recount(state)
            self.on_room()
            self._background.notify()

    async def call_all(self, method: Method[A, R], args: A) -> list[R]:
        """Replies of all workers to the same call."""
        return await self._fleet.call_all(method, args)

    async def initialize(self) -> None:
        """Workers build their engines, which start what they need."""
        timeout_s = self._fleet.config.transport.call_timeout_s + self._engine.start_timeout_s
        await self._fleet.call_all(calls.INITIALIZE_ENGINE, None, timeout_s=timeout_s)

    async def join_weight_group(self, args: Sequence[calls.JoinWeightGroup]) -> None:
        """All workers join a weight group at once, each with its own arguments."""
        timeout_s = self._config.weight_update.step_timeout_s + RPC_MARGIN_S
        await self._fleet.call_each(calls.JOIN_WEIGHT_GROUP, args, timeout_s=timeout_s)

    @asynccontextmanager
    async def held_for_evaluation(self) -> AsyncIterator[RolloutWorkerState]:
        """A worker that keeps its weights for the while.

        It does not if it is the only one, or if weights are broadcast, which needs all of them.
        """
        state = max(self._states, key=lambda state: (state.version, -state.store.num_running))
        is_held = len(self._states) > 1 and self._method != WeightUpdateMethod.collective
        state.num_evaluations += is_held
        try:
            if is_held:
                await self._background.wait_until(
                    lambda: not state.is_updating, f"{state.name} to update its weights"
                )
            yield state
        finally:
            state.num_evaluations -= is_held
            self._begin_updates()

    def receive_weights(self, weights: WeightsReference) -> None:
        """Workers begin to update to the new version."""
        self._weights = weights
        self._are_updates_held = False
        self._begin_updates()

    async def hold_updates(self) -> int:
        """Waits until no worker updates its weights; none begins before `receive_weights`.

        Returns: the oldest version that a worker holds.
        """
        self._are_updates_held = True
        await self._background.wait_until(
            lambda: (
                not (self._updates.is_going_on or any(state.is_updating for state in self._states))
            ),
            "rollout workers to update their weights",
        )
        return min(state.version for state in self._states)

    async def wait_for_weights(self) -> None:
        """Waits until every worker holds the newest version."""
        await self._background.wait_until(
            lambda: all(self._is_current(state) for state in self._states),
            "rollout workers to hold the newest weights",
        )

    @property
    def _groups_per_worker(self) -> int:
        """Groups of the longest rows that one store holds, at least one."""
        return max(1, self._config.store_bytes // self._group_bytes)

    def _groups_by_node(self) -> dict[str, int]:
        """Groups of the longest rows that each node holds."""
        by_node: dict[str, list[RolloutWorkerState]] = {}
        for state in self._states:
            by_node.setdefault(state.node, []).append(state)
        return {node: self._groups_on(states) for node, states in by_node.items()}

    def _groups_on(self, states: Sequence[RolloutWorkerState]) -> int:
        """Groups of the longest rows that one node holds, on these workers."""
        fitting = [self._groups_per_worker * len(states)]
        if self._config.node_store_bytes:
            fitting.append(self._config.node_store_bytes // self._group_bytes)
        rooms = (state.member.worker.store_room_bytes for state in states)
        # a limit counts shards; of the memory itself their blocks take whole pages
        fitting += [room // block_span(self._group_bytes) for room in rooms if room]
        return min(fitting)

    def _recount(self, state: RolloutWorkerState) -> None:
        """The worker's version, or a number of its groups, has changed."""
        self._loads.note(
            state.number,
            version=state.version,
            num_running=state.store.num_running,
            num_held=state.store.num_held,
        )

    def _begin_updates(self) -> None:
        if not self._are_updates_held:
            self._updates.begin(self._states)

    def _begin_update(self, state: RolloutWorkerState) -> bool:
        if state.is_updating or state.num_evaluations or self._is_current(state):
            return False
        state.update = asyncio.create_task(
            self._background.guard(self._update(state)), name=f"update {state.name}"
        )
        return True

    def _is_current(self, state: RolloutWorkerState) -> bool:
        return self._weights is None or state.version == self._weights.version

    async def _update(self, state: RolloutWorkerState) -> None:
        async with self._update_places:
            while self._weights and not self._is_current(state) and not state.num_evaluations:
                weights = self._weights
                await self._fleet.call(
                    state.member,
                    calls.UPDATE_WEIGHTS,
                    weights,
                    timeout_s=update_timeout_s(self._engine),
                )
                state.version = weights.version
                self._recount(state)
                self._background.notify()


def update_timeout_s(engine: GeneratorHandle) -> float:
    """What one worker's weight update may take, servers that have to be restarted included."""
    config = engine.config
    step_s = UPDATE_STEPS * config.weight_update.step_timeout_s
    if config.on_weight_update == OnWeightUpdate.finish_running:
        step_s += config.group_timeout_s
    num_waves = -(-engine.num_servers // (config.max_unavailable or engine.num_servers))
    return num_waves * step_s + engine.restart_timeout_s + RPC_MARGIN_S


def _num_updated_at_once(engine: GeneratorHandle) -> int:
    """Workers that may update at one time, so that `max_unavailable` servers stand still."""
    config = engine.config
    if not config.max_unavailable:
        return config.num_workers
    return max(1, config.max_unavailable // engine.num_servers)
