"""The rollout workers, as their controller tracks them: load, policy version, stored shards.

set          which workers there are, and who of them takes a group: see `worker_set`
groups       each is one run on the worker that was chosen for it, and awaited by as many calls as
             it takes. A run whose caller is cancelled
             goes on in the background until the worker, which is told to end it, has replied: only
             then nothing more can be sealed in its room
stores       a group reserves its worst-case bytes in a worker's store and in its node's memory
             until nothing of it is left there (`worker_store`): a full store means that admission
             waits, not that a put fails. Shards that nobody needs any more are swept, one sweep a
             worker at a time, beside everything else, once the journal says that nobody does
weights      see `weights/updates.py`
deaths       a worker that is lost, or of no use any more, is left out of everything until it has
             been started again: with the shards that outlived it, a new engine and the newest
             weights, in this order. Its runs end with `WorkerLost`; where it is not back soon, its
             rows are taken for lost
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

from areal_sc.config.parallel_settings import Placement
from areal_sc.controller.background import Background
from areal_sc.controller.events import Hear, RoomFreed, RowsLost
from areal_sc.controller.ledger.group import Group, RolloutSource
from areal_sc.controller.ledger.ledger import Ledger
from areal_sc.controller.rollout.kept_episodes import KeptEpisodes
from areal_sc.controller.rollout.rollout_takeover import FoundRuns, find_runs
from areal_sc.controller.rollout.worker_set import RolloutWorkerState, WorkerSet, goes_on
from areal_sc.controller.shared_card import SharedCard, Side
from areal_sc.controller.worker_store import Needs
from areal_sc.engines.base import Completion
from areal_sc.engines.handle_base import GeneratorHandle
from areal_sc.errors import ArealError, PeerLost, RpcTimeout, StoreFull, WorkerError, WorkerLost
from areal_sc.fleet.fleet import Fleet
from areal_sc.fleet.member import Member
from areal_sc.fleet.worker_life import Built, Dismissed, Progressed
from areal_sc.metadata import BatchMetadata
from areal_sc.transport.rpc.method import A, Method, R
from areal_sc.weights.channel import YieldMemory
from areal_sc.weights.tree import RPC_MARGIN_S
from areal_sc.weights.updates import WeightUpdates, begin_in_turns
from areal_sc.workers import calls
from areal_sc.workers.calls import GroupAttempt, GroupReply

logger = logging.getLogger(__name__)

REPORT_TIMEOUT_S: Final = 5.0
"""A worker whose event loop turns tells at once what its episodes do."""

DEATHS_OF_A_CALL: Final = 3
"""A completion that so many workers have died of is given up."""
ROWS_AWAITED_S: Final = 60.0
"""A lost worker's next life tells in time which rows are left, or they are generated again: its
machine may be gone, and another one in place of it be waited for."""


class RolloutWorkers:
    """Calls, sweeps and brings up the workers of one RolloutController.

    Args:
        needs: whose shards stay.
        card: that the workers may share with training.

    Attributes:
        config: of each of them.
        background: work that nobody awaits.
        durable: returns when all changes of the ledger until now are on the disk; see `Journal`.
        hear: takes what becomes of rows, and of their room.
        set: the workers.
        kept: episodes of groups that have to run again.
        updates: their weights.
        card: as given.
        is_tracked: the first workers are known; before that none was started.
        yield_memory: of the model whose weights the workers get.
    """

    def __init__(
        self,
        engine: GeneratorHandle,
        fleet: Fleet,
        background: Background,
        needs: Needs[GroupAttempt],
        durable: Callable[[], Awaitable[None]],
        hear: Hear,
        card: SharedCard,
    ) -> None:
        self.yield_memory: YieldMemory = _has_nothing_to_spare
        self.is_tracked = asyncio.Event()
        self.is_tracked.set()
        self.kept = KeptEpisodes()
        self._engine = engine
        self.config = engine.config
        self._fleet = fleet
        self.background = background
        self.hear = hear
        self.set = WorkerSet(engine.config, background, needs, fleet.tell)
        self.updates = WeightUpdates(engine, fleet, background, self.set.recount)
        self.updates.states = self.set.states
        self.durable = durable
        self.card = card
        if engine.config.placement is Placement.turns:
            card.share()
        card.join(Side.generation, enter=self._enter, leave=self._leave)
        self._is_ledger_known = True
        self._is_paused = False
        self._has_warned = False

    def track(self, members: Sequence[Member]) -> None:
        """The first workers. If an earlier start has left some, `take_over` follows.

        Raises: ConfigError: see `check_room`.
        """
        self._is_ledger_known = not any(member.is_adopted for member in members)
        self.set.track(members)
        if self.card.is_shared and not self._is_ledger_known:
            self.updates.await_takeover()
        for state in self._states:
            state.has_memory = state.member.is_adopted
        self.is_tracked.set()

    async def take_over(self, ledger: Ledger, *, goes_on: bool) -> FoundRuns:
        """Finds out what workers of an earlier start do and hold; `sweep` follows.

        Args:
            goes_on: see `RolloutController.take_over_async`.
        """
        self.updates.take_over(ledger.version, goes_on=goes_on)
        found = await find_runs(self._states, self._fleet, ledger, self.kept)
        for state in self._states:
            self._limit_kept(state)
        self._is_ledger_known = True
        self.set.recount_soon()
        return found

    async def initialize(self) -> None:
        """Workers build their engines, which start what they need.

        Raises: WorkerError, ModelError: one cannot start. One of an earlier start may be lost.
        """
        adopted = [member for member in self._fleet.members if member.is_adopted]
        new = [it for it in self._fleet.members if it.has_lived and not it.is_adopted]
        method, limit_s = calls.INITIALIZE_ENGINE, self._initialize_timeout_s
        built = [state for state in self._states if state.member.has_lived]
        async with self._building(built):
            await asyncio.gather(
                self._fleet.call_each(method, [None] * len(new), members=new, timeout_s=limit_s),
                self._fleet.call_living(method, None, adopted, timeout_s=limit_s),
            )

    @asynccontextmanager
    async def _building(self, states: Sequence[RolloutWorkerState]) -> AsyncIterator[None]:
        """Within it, which is in the turn of generation, workers build their engines."""
        async with self.card.held(Side.generation):
            for state in states:
                state.has_memory = state.is_building = True
            try:
                yield
            finally:
                for state in states:
                    state.is_building = False
                self.background.notify()

    def _enter(self) -> None:
        for state in self._states:
            state.has_memory |= state.life.is_up
        self.updates.go_on()

    async def _leave(self) -> None:
        """The workers give up the card's memory. Those that cannot are started again.

        Returns: when the memory is free.
        """
        await self.is_tracked.wait()
        await self.updates.stop()
        while any(state.has_memory for state in self._states):
            able = [it for it in self._states if it.has_memory and not it.is_building]
            await asyncio.gather(*map(self._take_memory, able))
            if any(state.has_memory for state in self._states):
                await self.background.wait("rollout workers to give the card's memory up")
                self.background.raise_failure()

    async def _take_memory(self, state: RolloutWorkerState) -> None:
        """The worker sleeps; one that is lost is killed before its next life begins."""
        member, incarnation = state.member, state.member.worker.incarnation
        if member.failure is None:
            with suppress(WorkerLost):
                await self.call(state, calls.SLEEP, None)
        if member.failure is not None and member.is_adopted:  # maybe nobody starts it again yet
            await self._fleet.kill([member])
        elif member.failure is not None:
            return
        if member.worker.incarnation == incarnation:
            state.has_memory = False

    def leave_out(self, unit: str) -> None:
        """A lost worker is left out of everything until `bring_up`; what it runs fails by itself.

        One that has had no life yet is left out anyway.
        """
        for state in self._states:
            if state.name == unit and state.member.has_lived:
                state.are_rows_known = False
                self.updates.leave_out(state)
                self.set.recount(state)
                self.background.start(self._give_up_rows(state), f"rows of {state.name}")
        self.background.notify()

    async def _give_up_rows(self, state: RolloutWorkerState) -> None:
        life = state.member.worker
        await asyncio.sleep(ROWS_AWAITED_S)
        is_there = state in self._states and state.member.worker is life
        if is_there and not state.are_rows_known:
            logger.warning("worker=%s is not back: its rows are taken for lost", state.name)
            self._note_rows(state, ())  # whatever turns up later

    def _note_rows(self, state: RolloutWorkerState, held: tuple[calls.HeldShard, ...]) -> None:
        runs = self.kept.note_held(state.name, state.member.worker.address, held)
        lost = state.store.note_adopted(runs)
        self._limit_kept(state)
        state.are_rows_known = True
        self.set.recount(state)
        self.hear(RowsLost(lost))
        self.background.notify()

    def _limit_kept(self, state: RolloutWorkerState) -> None:
        """A store may have less room than in its worker's life before."""
        excess = state.store.num_needed - self.set.loads.max_on_worker
        if excess > 0:
            state.store.hold_for(self.kept.give_up(state.name, excess))

    async def bring_up(self, unit: str) -> None:
        """A worker that was started again does its work again when this returns."""
        state = next(state for state in self._states if state.name == unit)
        member, state.has_memory = state.member, False  # the life before is killed by now
        self.background.notify()
        what = "the start to read what an earlier one has left, and which rows it needs"
        await self.background.wait_until(lambda: self._is_ledger_known, what)
        groups = self.kept.open_groups()
        self._note_rows(state, await self._fleet.call(member, calls.ADOPTED_SHARDS, groups))
        async with self._building([state]):
            await self._fleet.call(
                member, calls.INITIALIZE_ENGINE, None, timeout_s=self._initialize_timeout_s
            )
        is_paused = False
        while is_paused != self._is_paused:
            is_paused = self._is_paused
            await self._fleet.call(member, calls.PAUSE if is_paused else calls.RESUME, None)
        self._fleet.tell(Built(unit))
        self.set.renew()
        self.begin_sweep(state)
        await self.updates.bring_to_newest(state)

    @property
    def _states(self) -> Sequence[RolloutWorkerState]:
        return self.set.states

    @property
    def _initialize_timeout_s(self) -> float:
        return self._fleet.config.transport.call_timeout_s + self._engine.start_timeout_s

    @property
    def _group_limit_s(self) -> float:
        return self.config.group_timeout_s + RPC_MARGIN_S

    @property
    def up_members(self) -> list[Member]:
        return [state.member for state in self._states if state.life.is_up]

    async def pause(self, is_paused: bool) -> None:
        """Generation stops, also that of workers that come up later, or goes on."""
        self._is_paused = is_paused
        method = calls.PAUSE if is_paused else calls.RESUME
        await self._fleet.call_living(method, None, self.up_members)

    async def take_worker(self, group: Group) -> RolloutWorkerState:
        """Takes a worker for the group's next attempt: by preference one with episodes of it.

        What its last attempt has left is waited for; see `WorkerSet.take_worker`. Where that are
        sessions of agents outside, no other worker can go on with them.
        """
        if lost_with := self.kept.lost_with(group.group_id):
            what = f"{', '.join(lost_with)} to tell which episodes are still there"
            await self.background.wait_until(lambda: self.are_rows_known(*lost_with), what)

        def homes() -> Counter[str]:
            of_sessions = self.kept.homes(group.group_id, of_sessions=True)
            return of_sessions or self.kept.homes(group.group_id)

        while True:
            what = "the worker of a session to take groups again"
            await self.background.wait_until(lambda: self._can_go_on(group), what)
            worker = await self.set.take_worker(group.admitted_version, homes)
            if self._can_go_on(group, on=worker):
                return worker
            self.background.notify()  # it is free for another

    def _can_go_on(self, group: Group, on: RolloutWorkerState | None = None) -> bool:
        """Whether a worker, or this one, takes the group with its sessions, or it has none."""
        names, takes = self.kept.homes(group.group_id, of_sessions=True), self.set.loads.takes
        homes = [it for it in self._states if it.name in names and not it.life.is_closed]
        if not homes or on in homes:
            return True
        return on is None and any(takes(it.number, group.admitted_version) for it in homes)

    def are_rows_known(self, *workers: str | None) -> bool:
        """Whether it is certain that the rows are there which these workers hold.

        Of one that is being started again, it is not yet.
        """
        return all(state.are_rows_known for state in self._states if state.name in workers)

    @property
    def unknown(self) -> list[str]:
        """Workers of which it is not certain."""
        return [state.name for state in self._states if not state.are_rows_known]

    async def notice_losses(self, workers: Collection[str]) -> None:
        """Returns when each of these workers has answered, or is known to be lost."""
        states = [state for state in self._states if state.name in workers]
        pings = (self.call(state, calls.PING, None) for state in states)
        for outcome in await asyncio.gather(*pings, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, WorkerLost):
                raise outcome

    def may_leave(self, state: RolloutWorkerState, num_queued: int) -> bool:
        """Whether nobody misses a worker that is to leave; `num_queued` groups wait for one."""
        if not state.are_rows_known and self.kept.is_awaited(state.name):
            return False  # its next life has finished episodes, maybe
        is_idle = self._is_ledger_known and self.set.is_idle(state, num_queued)
        return is_idle and self.updates.may_leave(state)

    def let_go(self, state: RolloutWorkerState) -> None:
        """The worker leaves, and is none of these any more."""
        self._fleet.tell(Dismissed(state.life.unit))
        self.updates.leave_out(state)
        self.set.remove(state)

    async def call_named(self, name: str, method: Method[A, R], args: A) -> R:
        """Reply of the worker of that name. Raises: WorkerLost: it does no work. As `call`."""
        member = next((member for member in self.up_members if member.name == name), None)
        if member is None:
            raise WorkerLost(f"worker {name} is being started again, or has left")
        return await self._fleet.call(member, method, args)

    async def evaluate(
        self, state: RolloutWorkerState, episode: calls.RunEvaluation
    ) -> calls.EvaluationReply:
        """Plays an episode that is no run of a group; raises as `call`."""
        return await self._own_call(state, calls.RUN_EVALUATION, episode)

    async def generate(self, wanted: calls.Generate, version: int) -> Completion:
        """What a worker with this policy version, or a later one, writes.

        Raises: WorkerLost: `DEATHS_OF_A_CALL` workers died of it. WorkflowError: the engine does
            not take the prompt.
        """

        def usable() -> list[RolloutWorkerState]:
            staying = (it for it in self._states if it.life.is_up and not it.life.is_leaving)
            return [it for it in staying if it.version >= version]

        for number in itertools.count(1):
            what = f"a rollout worker with version {version}"
            await self.background.wait_until(lambda: bool(usable()), what)
            try:
                state = min(usable(), key=lambda it: it.num_calls)
                found = await self._own_call(state, calls.GENERATE, wanted)
                self.note_progress(state)
                return found
            except WorkerLost:
                if number == DEATHS_OF_A_CALL:
                    raise
        raise AssertionError("numbers do not end")

    async def _own_call(self, state: RolloutWorkerState, method: Method[A, R], args: A) -> R:
        """A call that is no run of a group."""
        state.num_calls += 1
        try:
            return await self.call(state, method, args, self._group_limit_s)
        finally:
            state.num_calls -= 1

    async def call(
        self,
        state: RolloutWorkerState,
        method: Method[A, R],
        args: A,
        timeout_s: float | None = None,
    ) -> R:
        """Reply of a worker.

        Raises: WorkerLost: the worker is lost. So it is when its engine failed, or when it does not
            answer: it is of no use any more. Typed errors of the method.
        """
        member, incarnation = state.member, state.member.worker.incarnation
        try:
            return await self._fleet.call(member, method, args, timeout_s=timeout_s)
        except (PeerLost, RpcTimeout, WorkerError) as error:
            setting = "rollout.group_timeout_s, transport.call_timeout_s"
            if hung := await self._fleet.lose_hung(error, [member], setting):
                raise hung from error
            loss = self._fleet.lose(member, incarnation, f"is of no use any more: {error}")
            if loss is error:
                raise
            raise loss from error

    def begin_sweeps(self) -> None:
        """Workers begin to forget the shards that nobody needs any more."""
        self.background.start(begin_in_turns(list(self._states), self.begin_sweep), "sweeps")

    def begin_sweep(self, state: RolloutWorkerState) -> bool:
        """One worker begins to, unless it is at it, or has no such shard; tells whether it did."""
        if not state.life.is_up or goes_on(state.sweep) or not state.store.has_dead:
            return False
        state.sweep = self.background.start(self._sweep(state), f"sweep {state.name}")
        return True

    @property
    def are_sweeps_due(self) -> bool:
        """Whether a store is about to have more room."""
        return any(goes_on(it.sweep) or it.store.has_dead for it in self._states)

    async def _sweep(self, state: RolloutWorkerState) -> None:
        while state.store.has_dead:
            incarnation = state.member.worker.incarnation
            sweep, dead_ids = state.store.plan_sweep(incarnation)
            await self.durable()  # else a later start would look for these rows
            if state.member.worker.incarnation != incarnation:
                continue
            try:
                last_sequence = await self.call(state, calls.SWEEP, sweep)
            except WorkerLost:
                return  # its next life is told anew
            state.store.confirm_sweep(incarnation, dead_ids, last_sequence)
            self.set.recount(state)
            self.hear(RoomFreed())
            self.background.notify()

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

        up = [state for state in self._states if state.life.is_up]
        reports = await asyncio.gather(*map(ask, up))
        return {state.name: report for state, report in zip(up, reports, strict=True)}

    async def run_group(
        self, state: RolloutWorkerState, group: Group, source: RolloutSource | None
    ) -> GroupReply:
        """Plays the group's episodes on the worker. Cancelled, the run is given up.

        When the controller ends, no run is: its worker ends with it, or belongs to a later start of
        the script, which joins the run.

        Args:
            source: None: the worker has begun the run, which is joined.
        Raises: WorkerLost: see `call`; nothing has come of the run, and nothing will.
        """
        run = GroupAttempt(group.group_id, group.attempt)
        incarnation = state.member.worker.incarnation
        kept = self.kept.of_group(group.group_id)
        state.store.begin(run, self.kept.hand_over(group.group_id, state.name))
        self.set.recount(state)
        request = calls.RunGroup(
            group.group_id,
            group.attempt,
            group.admitted_version,
            group.prompt,
            source.workflow if source is not None else 0,
            self.config.group_size,
            kept,
        )
        try:
            while True:
                call = self.background.hold(
                    self.call(state, calls.RUN_GROUP, request, self._group_limit_s),
                    f"run of group {run.group_id}",
                )
                reply = await asyncio.shield(call)
                if not reply.goes_on:
                    break
                self.background.notify()  # who waits for a batch waits for agents outside
            if reply.run != run:
                cause = f"answered for {reply.run}, asked for {run}"
                raise self._fleet.lose(state.member, incarnation, cause)
        except asyncio.CancelledError:
            if not self.background.is_closing:
                end = self._give_up(state, run, call)
                self.background.start(end, f"end of group {run.group_id}")
            raise
        except ArealError:
            self._end_run(state, run, None)
            self.begin_sweep(state)
            raise
        self._end_run(state, run, reply.batch)
        if reply.batch is not None:
            self.note_progress(state)
        if reply.warning and not self._has_warned:
            self._has_warned = True  # others would say the same
            logger.warning("%s", reply.warning)
        return reply

    def note_progress(self, state: RolloutWorkerState) -> None:
        """The worker has done something useful: it gave rows, or an evaluated episode."""
        self._fleet.tell(Progressed(state.life.unit))

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
        self.begin_sweep(state)
        self.hear(RoomFreed())

    def _end_run(
        self, state: RolloutWorkerState, run: GroupAttempt, batch: BatchMetadata | None
    ) -> None:
        """The worker has ended the run; the shards of `batch` take its room, if there are any."""
        state.store.end(run, [] if batch is None else [s.shard_id for s in batch.shards])
        self.set.recount(state)
        if batch is None:
            self.background.notify()


async def _has_nothing_to_spare(error: StoreFull) -> bool:
    return False
