"""The rollout workers, as their controller tracks them: load, policy version, stored shards.

groups       each is one call of the worker that was chosen for it. A run whose caller is cancelled
             goes on in the background until the worker, which is told to end it, has replied: only
             then nothing more can be sealed in its room
stores       a group reserves its worst-case bytes in a worker's store and in its node's memory
             until nothing of it is left there (`worker_store`): a full store means that admission
             waits, not that a put fails. Shards that nobody needs are swept beside everything else
weights      one update a worker at a time, always to the newest version; none begins while
             the trainer seals the next one, or while an evaluation holds the worker
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from areal_sc.config.schema import OnWeightUpdate, WeightUpdateMethod
from areal_sc.config.store_room import describe_largest_group, max_group_bytes
from areal_sc.controller.background import Background
from areal_sc.controller.fleet import Fleet
from areal_sc.controller.group import Group, RolloutSource
from areal_sc.controller.node_workers import Member
from areal_sc.controller.worker_choice import WorkerLoads, WorkerQueue
from areal_sc.controller.worker_store import Needs, WorkerStore
from areal_sc.engines.handle_base import GeneratorHandle
from areal_sc.errors import ArealError, ConfigError
from areal_sc.metadata import BatchMetadata
from areal_sc.transport.rpc.method import A, Method, R
from areal_sc.transport.shards.arena import block_span
from areal_sc.weights import WeightsReference
from areal_sc.workers import calls
from areal_sc.workers.calls import GroupAttempt, GroupReply

logger = logging.getLogger(__name__)

UPDATE_STEPS: Final = 4
"""A weight update has so many steps; each may take `weight_update.step_timeout_s`."""

RPC_MARGIN_S: Final = 60.0
"""A group's RPC may take this much longer than the group's time limit, which the worker keeps."""

REPORT_TIMEOUT_S: Final = 5.0
"""A worker whose event loop turns tells at once what its episodes do."""

BEGUN_PER_TURN: Final = 32
"""So many calls of workers begin in one turn of the event loop; that takes some milliseconds."""


@dataclass
class RolloutWorkerState:
    """One rollout worker.

    Attributes:
        number: its place in the list of all workers.
        store: the groups that take room in its store.
        version: the policy version that its engine holds.
        num_evaluations: while there are any, it skips publications.
        update: the weight update that goes on, or the last one.
        sweep: the sweep of its store that goes on, or the last one.
    """

    member: Member
    number: int
    store: WorkerStore
    version: int = 0
    num_evaluations: int = 0
    update: asyncio.Task[None] | None = None
    sweep: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def is_updating(self) -> bool:
        return _goes_on(self.update)


class RolloutWorkers:
    """Chooses, calls, updates and sweeps the workers of one RolloutController.

    Args:
        needs: whose shards stay.

    Attributes:
        on_room: called whenever room in a store is free again.
    """

    def __init__(
        self, engine: GeneratorHandle, fleet: Fleet, background: Background, needs: Needs
    ) -> None:
        self.on_room: Callable[[], None] = lambda: None
        self._engine = engine
        self._config = config = engine.config
        self._fleet = fleet
        self._background = background
        self._needs = needs
        self._states: list[RolloutWorkerState] = []
        self._loads = WorkerLoads([], 0, {})
        self._queue = WorkerQueue(self._loads, background)
        self._weights: WeightsReference | None = None
        self._are_updates_held = False
        self._has_warned = False
        self._update_round: asyncio.Task[None] | None = None
        self._group_bytes = max_group_bytes(config)
        # of workers, so that `max_unavailable` servers stand still at one time
        num_servers = config.max_unavailable or config.num_workers * engine.num_servers
        self._update_slots = asyncio.Semaphore(max(1, num_servers // engine.num_servers))

    def track(self, members: Iterable[Member]) -> None:
        """The workers are up."""
        self._states = [
            RolloutWorkerState(member, number, WorkerStore(self._needs))
            for number, member in enumerate(members)
        ]
        nodes = [state.member.worker.node for state in self._states]
        per_worker = max(1, self._config.store_bytes // self._group_bytes)
        self._loads = WorkerLoads(nodes, per_worker, self._groups_by_node(per_worker))
        self._queue = WorkerQueue(self._loads, self._background)

    async def initialize(self) -> None:
        """Workers build their engines, which start what they need."""
        timeout_s = self._fleet.config.transport.call_timeout_s + self._engine.start_timeout_s
        await self._fleet.call_all(calls.INITIALIZE_ENGINE, None, timeout_s=timeout_s)

    def has_room(self, num_queued: int) -> bool:
        """Whether the stores hold one more group at its worst-case size beside the queued ones."""
        return num_queued + self._loads.num_stored < self._loads.max_groups

    def check_room(self) -> None:
        """The limits that are set were checked before; how much memory is free shows only here.

        Raises: ConfigError: the stores do not hold one training batch at its worst-case size.
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
        """As `WorkerQueue.take`. Whoever takes it calls `run_group` before the next await."""
        return self._states[await self._queue.take(version)]

    async def call(self, state: RolloutWorkerState, method: Method[A, R], args: A) -> R:
        """Reply of a call that may take as long as a group."""
        return await self._fleet.call(
            state.member, method, args, timeout_s=self._config.group_timeout_s + RPC_MARGIN_S
        )

    async def episode_reports(self) -> dict[str, calls.EpisodesReport | None]:
        """What the episodes of each worker do, by its name; None: it does not answer in time."""

        async def ask(state: RolloutWorkerState) -> calls.EpisodesReport | None:
            try:
                return await self._fleet.call(
                    state.member, calls.EPISODES, None, timeout_s=REPORT_TIMEOUT_S
                )
            except ArealError as error:
                logger.info("worker=%s no report of episodes: %s", state.name, error)
                return None

        reports = await asyncio.gather(*map(ask, self._states))
        return {state.name: report for state, report in zip(self._states, reports, strict=True)}

    async def run_group(
        self, state: RolloutWorkerState, group: Group, source: RolloutSource
    ) -> GroupReply:
        """Plays the group's episodes on the worker. Cancelled, the run is given up.

        Raises: WorkerLost: the worker died. What the engine raised.
        """
        run = GroupAttempt(group.group_id, group.attempt)
        state.store.begin(run)
        self._recount(state)
        request = calls.RunGroup(
            group.group_id,
            group.attempt,
            group.admitted_version,
            group.prompt,
            source.workflow,
            self._config.group_size,
        )
        call = self._background.hold(
            self.call(state, calls.RUN_GROUP, request), f"run of group {run.group_id}"
        )
        try:
            reply = await asyncio.shield(call)
        except asyncio.CancelledError:
            self._background.start(self._give_up(state, run, call), f"end of group {run.group_id}")
            raise
        except ArealError:
            self._end_run(state, run, None)
            raise
        self._end_run(state, run, reply.batch)
        if reply.warning and not self._has_warned:
            self._has_warned = True  # others would say the same
            logger.warning("%s", reply.warning)
        return reply

    async def _give_up(
        self, state: RolloutWorkerState, run: GroupAttempt, call: asyncio.Task[GroupReply]
    ) -> None:
        """Has the worker end the run, and waits until it has; what it sealed is swept."""
        outcomes = await asyncio.gather(
            self.call(state, calls.GIVE_UP_GROUP, run), call, return_exceptions=True
        )
        batch = None
        for outcome in outcomes:
            if isinstance(outcome, ArealError):  # of a group that is nobody's any more
                logger.info("given_up_group=%d failed=%r", run.group_id, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            elif outcome is not None:
                batch = outcome.batch
        self._end_run(state, run, batch)
        self.sweep_one(state)
        self.on_room()

    def _end_run(
        self, state: RolloutWorkerState, run: GroupAttempt, batch: BatchMetadata | None
    ) -> None:
        """The worker has ended the run; the shards of `batch` take its room, if there are any."""
        state.store.end(run, [] if batch is None else [s.shard_id for s in batch.shards])
        self._recount(state)
        if batch is None:
            self._background.notify()

    def _recount(self, state: RolloutWorkerState) -> None:
        """The worker's version, or a number of its groups, has changed."""
        self._loads.note(
            state.number,
            version=state.version,
            num_running=state.store.num_running,
            num_held=state.store.num_held,
        )

    def _groups_by_node(self, per_worker: int) -> dict[str, int]:
        """Groups of the longest rows that each node holds."""
        workers = [state.member.worker for state in self._states]
        num_workers = Counter(worker.node for worker in workers)
        num_groups = {node: per_worker * count for node, count in num_workers.items()}
        if self._config.node_store_bytes:
            of_node = self._config.node_store_bytes // self._group_bytes
            num_groups = {node: min(n, of_node) for node, n in num_groups.items()}
        for worker in workers:
            if room := worker.store_room_bytes:  # 0: not known
                # a limit counts shards; of the memory itself their blocks take whole pages
                fitting = room // block_span(self._group_bytes)
                num_groups[worker.node] = min(num_groups[worker.node], fitting)
        return num_groups

    def sweep(self) -> None:
        """Workers begin to forget the shards that nobody needs any more."""
        self._background.start(self._begin_in_turns(self.sweep_one), "sweeps")

    def sweep_one(self, state: RolloutWorkerState) -> bool:
        """One worker begins to, unless it is at it, or has no such shard; tells whether it did."""
        if _goes_on(state.sweep) or not state.store.has_dead:
            return False
        state.sweep = self._background.start(self._sweep(state), f"sweep {state.name}")
        return True

    @property
    def is_sweeping(self) -> bool:
        """Whether a store is about to have more room."""
        return any(_goes_on(state.sweep) or state.store.has_dead for state in self._states)

    async def _sweep(self, state: RolloutWorkerState) -> None:
        while state.store.has_dead:
            incarnation = state.member.worker.incarnation
            sweep, dead_ids = state.store.plan_sweep(incarnation)
            last_sequence = await self._fleet.call(state.member, calls.SWEEP, sweep)
            state.store.confirm_sweep(incarnation, dead_ids, last_sequence)
            self._recount(state)
            self.on_room()
            self._background.notify()

    async def _begin_in_turns(self, begin: Callable[[RolloutWorkerState], bool]) -> None:
        """Begins something at every worker, a few of them in each turn of the event loop."""
        num_begun = 0
        for state in self._states:
            num_begun += begin(state)
            if num_begun == BEGUN_PER_TURN:
                num_begun = 0
                await asyncio.sleep(0)

    def receive_weights(self, weights: WeightsReference) -> None:
        """Workers begin to update to the new version."""
        self._weights = weights
        self._are_updates_held = False
        self._begin_updates()

    def renew_weights(self, weights: WeightsReference) -> None:
        """The weights that workers update to are to be had elsewhere."""
        if self._weights is not None and self._weights.version == weights.version:
            self._weights = weights

    async def hold_updates(self) -> int:
        """Waits until no worker updates its weights; none begins before `receive_weights`.

        Returns: the oldest version that a worker holds.
        """
        self._are_updates_held = True
        await self._background.wait_until(
            lambda: not (_goes_on(self._update_round) or any(s.is_updating for s in self._states)),
            "rollout workers to update their weights",
        )
        return min(state.version for state in self._states)

    async def wait_for_weights(self) -> None:
        """Waits until every worker holds the newest version."""
        await self._background.wait_until(
            lambda: all(self._is_current(state) for state in self._states),
            "rollout workers to hold the newest weights",
        )

    @asynccontextmanager
    async def held_for_evaluation(self) -> AsyncIterator[RolloutWorkerState]:
        """A worker that keeps its weights for the while.

        It does not if it is the only one, or if weights are broadcast, which needs all of them.
        """
        state = max(self._states, key=lambda state: (state.version, -state.store.num_running))
        is_broadcast = self._config.weight_update.method == WeightUpdateMethod.collective
        is_held = len(self._states) > 1 and not is_broadcast
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

    def _begin_updates(self) -> None:
        if not self._are_updates_held:
            self._update_round = self._background.start(
                self._begin_in_turns(self._begin_update), "weight updates"
            )

    def _begin_update(self, state: RolloutWorkerState) -> bool:
        if state.is_updating or state.num_evaluations or self._is_current(state):
            return False
        state.update = self._background.start(self._update(state), f"update {state.name}")
        return True

    def _is_current(self, state: RolloutWorkerState) -> bool:
        return self._weights is None or state.version == self._weights.version

    async def _update(self, state: RolloutWorkerState) -> None:
        async with self._update_slots:
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


def _goes_on(task: asyncio.Task[None] | None) -> bool:
    return task is not None and not task.done()
