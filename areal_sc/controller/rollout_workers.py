"""The rollout workers, as their controller tracks them: load, policy version, stored shards.

groups       each is one call of the worker that was chosen for it. A run whose caller is cancelled
             goes on in the background until the worker, which is told to end it, has replied: only
             then nothing more can be sealed in its room
stores       a group reserves its worst-case bytes in a worker's store and in its node's memory
             until nothing of it is left there (`worker_store`): a full store means that admission
             waits, not that a put fails. Shards that nobody needs are swept beside everything else
weights      see `weight_updates`
deaths       a worker that is lost, or of no use any more, is left out of everything until it has
             been started again: with the shards that outlived it, a new engine and the newest
             weights, in this order. Its runs end with `WorkerLost`
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from areal_sc.config.store_room import describe_largest_group, max_group_bytes
from areal_sc.controller.background import Background
from areal_sc.controller.fleet import Fleet
from areal_sc.controller.group import Group, RolloutSource
from areal_sc.controller.node_workers import Member
from areal_sc.controller.weight_updates import (
    NO_VERSION,
    RPC_MARGIN_S,
    RolloutWorkerState,
    WeightUpdates,
    begin_in_turns,
    goes_on,
)
from areal_sc.controller.worker_choice import WorkerLoads, WorkerQueue
from areal_sc.controller.worker_store import Needs, WorkerStore
from areal_sc.engines.handle_base import GeneratorHandle
from areal_sc.errors import ArealError, ConfigError, PeerLost, RpcTimeout, WorkerError, WorkerLost
from areal_sc.metadata import BatchMetadata
from areal_sc.transport.rpc.method import A, Method, R
from areal_sc.transport.shards.arena import block_span
from areal_sc.workers import calls
from areal_sc.workers.calls import GroupAttempt, GroupReply

logger = logging.getLogger(__name__)

REPORT_TIMEOUT_S: Final = 5.0
"""A worker whose event loop turns tells at once what its episodes do."""


class RolloutWorkers:
    """Chooses, calls, sweeps and brings up the workers of one RolloutController.

    Args:
        needs: whose shards stay.

    Attributes:
        updates: the weights of the workers.
        on_room: called whenever room in a store is free again.
        on_progress: called with each worker that has given rows, or an evaluated episode.
        is_ready: whether a worker gives signs of life; one that does not gets no new groups.
        on_rows_lost: called with the runs whose shards are gone with a worker.
    """

    def __init__(
        self, engine: GeneratorHandle, fleet: Fleet, background: Background, needs: Needs
    ) -> None:
        self.on_room: Callable[[], None] = lambda: None
        self.on_progress: Callable[[Member], None] = lambda member: None
        self.is_ready: Callable[[Member], bool] = lambda member: True
        self.on_rows_lost: Callable[[Sequence[GroupAttempt]], None] = lambda runs: None
        self._engine = engine
        self._config = config = engine.config
        self._fleet = fleet
        self._background = background
        self._needs = needs
        self._states: list[RolloutWorkerState] = []
        self._loads = WorkerLoads([], 0, {})
        self._queue = WorkerQueue(self._loads, background)
        self.updates = WeightUpdates(engine, fleet, background, self._recount)
        self._is_paused = False
        self._is_recount_due = False
        self._has_warned = False
        self._group_bytes = max_group_bytes(config)

    def track(self, members: Iterable[Member]) -> None:
        """The workers are up."""
        self._states = [
            RolloutWorkerState(member, number, WorkerStore(self._needs))
            for number, member in enumerate(members)
        ]
        self.updates.states = self._states
        nodes = [state.member.worker.node for state in self._states]
        per_worker = max(1, self._config.store_bytes // self._group_bytes)
        self._loads = WorkerLoads(nodes, per_worker, self._groups_by_node(per_worker))
        self._queue = WorkerQueue(self._loads, self._background)

    async def initialize(self) -> None:
        """Workers build their engines, which start what they need."""
        await self._fleet.call_all(
            calls.INITIALIZE_ENGINE, None, timeout_s=self._initialize_timeout_s
        )

    def note_loss(self, member: Member) -> None:
        """The worker is left out of everything until `bring_up`; what it runs fails by itself."""
        for state in self._states:
            if state.member is member:
                state.is_up = state.are_rows_known = False
                state.version = NO_VERSION
                state.holds.clear()
                if state.update is not None:
                    state.update.cancel()
                self._recount(state)
        self._background.notify()

    async def bring_up(self, members: Sequence[Member]) -> None:
        """Workers that were started again do their work again when this returns."""
        await asyncio.gather(*(self._bring_up(s) for s in self._states if s.member in members))

    async def _bring_up(self, state: RolloutWorkerState) -> None:
        try:
            await self._bring_back(state)
        except BaseException:  # it is killed, and started again
            self.note_loss(state.member)
            raise

    async def _bring_back(self, state: RolloutWorkerState) -> None:
        member = state.member
        held = await self._fleet.call(member, calls.ADOPTED_SHARDS, None)
        lost = state.store.note_adopted(held)
        state.are_rows_known = True
        self._recount(state)
        self.on_rows_lost(lost)
        self._background.notify()
        await self._fleet.call(
            member, calls.INITIALIZE_ENGINE, None, timeout_s=self._initialize_timeout_s
        )
        is_paused = False
        while is_paused != self._is_paused:
            is_paused = self._is_paused
            await self._fleet.call(member, calls.PAUSE if is_paused else calls.RESUME, None)
        state.is_up = True
        self.sweep_one(state)
        await self.updates.bring_to_newest(state)

    @property
    def _initialize_timeout_s(self) -> float:
        return self._fleet.config.transport.call_timeout_s + self._engine.start_timeout_s

    @property
    def up_members(self) -> list[Member]:
        """The workers that can be called."""
        return [state.member for state in self._states if state.is_up]

    async def pause(self, is_paused: bool) -> None:
        """Generation stops, also that of workers that come up later, or goes on."""
        self._is_paused = is_paused
        method = calls.PAUSE if is_paused else calls.RESUME
        await self._fleet.call_living(method, None, self.up_members)

    def are_rows_known(self, *workers: str | None) -> bool:
        """Whether it is certain that the rows are there which these workers hold.

        It is not while one is being started again, until it has told which ones outlived it.
        """
        return all(state.are_rows_known for state in self._states if state.name in workers)

    async def notice_losses(self, workers: Collection[str]) -> None:
        """Returns when each of these workers has answered, or is known to be lost."""
        states = [state for state in self._states if state.name in workers]
        pings = (self._call(state, calls.PING, None) for state in states)
        for outcome in await asyncio.gather(*pings, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, WorkerLost):
                raise outcome

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
                f"of the stores, leave room for {self._loads.max_groups}; give more room, a "
                "smaller rollout.max_context_tokens, smaller batches, or another folder"
            )

    async def take(self, version: int) -> RolloutWorkerState:
        """As `WorkerQueue.take`. Whoever takes it calls `run_group` before the next await."""
        return self._states[await self._queue.take(version)]

    async def call(self, state: RolloutWorkerState, method: Method[A, R], args: A) -> R:
        """Reply of a call that may take as long as a group.

        Raises: WorkerLost: the worker is lost. So it is when its engine failed, or when it does not
            answer: it is of no use any more. Typed errors of the method.
        """
        return await self._call(state, method, args, self._config.group_timeout_s + RPC_MARGIN_S)

    async def _call(
        self,
        state: RolloutWorkerState,
        method: Method[A, R],
        args: A,
        timeout_s: float | None = None,
    ) -> R:
        member, incarnation = state.member, state.member.worker.incarnation
        try:
            return await self._fleet.call(member, method, args, timeout_s=timeout_s)
        except (PeerLost, RpcTimeout, WorkerError) as error:
            loss = self._fleet.lose(member, incarnation, f"is of no use any more: {error}")
            if loss is error:
                raise
            raise loss from error

    async def episode_reports(self) -> dict[str, calls.EpisodesReport | None]:
        """What the episodes of each worker do, by its name; None: it does not answer in time.

        Workers that are being started again are left out.
        """

        async def ask(state: RolloutWorkerState) -> calls.EpisodesReport | None:
            try:
                return await self._fleet.call(
                    state.member, calls.EPISODES, None, timeout_s=REPORT_TIMEOUT_S
                )
            except ArealError as error:
                logger.info("worker=%s no report of episodes: %s", state.name, error)
                return None

        up = [state for state in self._states if state.is_up]
        reports = await asyncio.gather(*map(ask, up))
        return {state.name: report for state, report in zip(up, reports, strict=True)}

    async def run_group(
        self, state: RolloutWorkerState, group: Group, source: RolloutSource
    ) -> GroupReply:
        """Plays the group's episodes on the worker. Cancelled, the run is given up.

        Raises: WorkerLost: as of `call`; nothing has come of the run, and nothing will.
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
            self._played(state, request, run), f"run of group {run.group_id}"
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
        if reply.batch is not None:
            self.on_progress(state.member)
        if reply.warning and not self._has_warned:
            self._has_warned = True  # others would say the same
            logger.warning("%s", reply.warning)
        return reply

    async def _played(
        self, state: RolloutWorkerState, request: calls.RunGroup, run: GroupAttempt
    ) -> GroupReply:
        incarnation = state.member.worker.incarnation
        reply = await self.call(state, calls.RUN_GROUP, request)
        if reply.run != run:
            cause = f"answered for {reply.run}, asked for {run}"
            raise self._fleet.lose(state.member, incarnation, cause)
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

    def recount_soon(self) -> None:
        """Some workers give signs of life again, or none any more; of many that is told at once."""
        if not self._is_recount_due:
            self._is_recount_due = True
            asyncio.get_running_loop().call_soon(self._recount_all)

    def _recount_all(self) -> None:
        self._is_recount_due = False
        for state in self._states:
            self._recount(state)
        self._background.notify()

    def _recount(self, state: RolloutWorkerState) -> None:
        """The worker's version, or a number of its groups, has changed."""
        self._loads.note(
            state.number,
            version=state.version if self.is_ready(state.member) else NO_VERSION,
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
        self._background.start(begin_in_turns(self._states, self.sweep_one), "sweeps")

    def sweep_one(self, state: RolloutWorkerState) -> bool:
        """One worker begins to, unless it is at it, or has no such shard; tells whether it did."""
        if not state.is_up or goes_on(state.sweep) or not state.store.has_dead:
            return False
        state.sweep = self._background.start(self._sweep(state), f"sweep {state.name}")
        return True

    @property
    def is_sweeping(self) -> bool:
        """Whether a store is about to have more room."""
        return any(goes_on(state.sweep) or state.store.has_dead for state in self._states)

    async def _sweep(self, state: RolloutWorkerState) -> None:
        while state.store.has_dead:
            incarnation = state.member.worker.incarnation
            sweep, dead_ids = state.store.plan_sweep(incarnation)
            try:
                last_sequence = await self._call(state, calls.SWEEP, sweep)
            except WorkerLost:
                return  # its next life is told anew
            state.store.confirm_sweep(incarnation, dead_ids, last_sequence)
            self._recount(state)
            self.on_room()
            self._background.notify()
