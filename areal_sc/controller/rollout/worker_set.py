"""The rollout workers that there are: which stay, which leave, and what each of them carries.

    add ──► starts ──► has served ──► retire ──► closed ──► idle ──► remove
            no room     its store     no room    no new     nothing
                        is room       any more   groups     needed

Room is what admission counts with: a group that was admitted finds a store, whatever happens. So a
worker that leaves takes its store out of the room at once, and goes on to take groups until those
that were admitted before fit into the stores of the others. What lies in its own store counts all
the while.

consumes     groups that wait for a worker, each with the oldest policy version that it may start on
waits for    a worker that holds that version and has room
unblocked by every change that `Background` tells of: a weight update, a group's end, a sweep

All groups of a step may be admitted at the moment at which a version exists, and some worker is the
first that holds it. So while others are about to, nobody gets more than its share of the groups.
A group that has room in a store already, since an earlier attempt has left episodes there, goes to
that worker, whoever waits before it: its room is of no use to others.

A step hands hundreds of groups to thousands of workers. So the workers' counts lie in arrays that
are compared at once, and one task serves all groups: if each looked for itself, every change would
wake hundreds of them.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from areal_sc.config.schema import RolloutConfig
from areal_sc.controller.background import Background
from areal_sc.controller.worker_store import Needs, WorkerStore
from areal_sc.errors import ConfigError
from areal_sc.fleet.member import Member
from areal_sc.fleet.worker_life import Closed, Kept, Life, Retired, Tell
from areal_sc.nodes.spec import WorkerReport
from areal_sc.sizing.store_room import describe_largest_group, max_group_bytes
from areal_sc.token_fields import NO_FIELDS, FieldBytes
from areal_sc.transport.shards.arena import block_span
from areal_sc.workers.calls import GroupAttempt

NO_VERSION: Final = -1
"""Version of a worker that can get no groups: it is below the version of every group."""


@dataclass(eq=False)
class RolloutWorkerState:
    """One rollout worker, through all its lives.

    Attributes:
        number: its index within its role; no other worker has it as long as this one is there.
        store: the groups that take room in its store.
        built_with: the policy version of its engine as it was built, or NO_VERSION.
        version: the policy version that its engine holds; NO_VERSION: it must get one first.
        are_rows_known: it is known which shards its present life holds.
        num_calls: of groups and evaluations, that it has not answered.
        holds: evaluations that it skips publications for.
        update: the weight update that goes on, or the last one.
        sweep: the sweep of its store that goes on, or the last one.
        has_memory: it has memory of its device, or takes some, as far as is known.
        is_building: it builds its engine.
    """

    member: Member
    number: int
    store: WorkerStore[GroupAttempt]
    built_with: int = 0
    version: int = 0
    are_rows_known: bool = True
    num_calls: int = 0
    holds: set[object] = field(default_factory=set)
    update: asyncio.Task[None] | None = None
    sweep: asyncio.Task[None] | None = None
    has_memory: bool = False
    is_building: bool = False

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def life(self) -> Life:
        """Whether it is up, and whether it leaves."""
        return self.member.life

    @property
    def is_updating(self) -> bool:
        return goes_on(self.update)


def goes_on(task: asyncio.Task[None] | None) -> bool:
    return task is not None and not task.done()


GROUPS_PER_TURN: Final = 32
"""Most groups that get a worker in one turn of the event loop; that takes some milliseconds."""


class WorkerLoads:
    """Counts of groups, by the worker's number.

    Args:
        nodes: each worker's node; "": there is no worker of that number.
        max_on_worker: groups that one store holds.
        max_on_node: node -> groups that its stores hold together.
        promised: groups that each worker was chosen for, as `promise` says; None: none.

    Attributes:
        num_stored: groups that take room in a store, on all workers together: running ones, and
            those whose rows lie there.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        max_on_worker: int,
        max_on_node: Mapping[str, int],
        promised: Mapping[int, int] | None = None,
    ) -> None:
        self.num_stored = 0
        max_on_node = {**max_on_node, "": 0}
        number = {node: i for i, node in enumerate(max_on_node)}
        self._node = np.array([number[node] for node in nodes], np.intp)
        self.max_on_worker = max_on_worker
        self._max_on_node = np.array(list(max_on_node.values()), np.int64)
        self._on_node = np.zeros(len(number), np.int64)
        self._version, self._running, self._held, self._promised = np.zeros(
            (4, len(nodes)), np.int64
        )
        self._gets_newest = np.zeros(len(nodes), np.bool_)
        self._takes_groups = np.zeros(len(nodes), np.bool_)
        for worker, num_groups in (promised or {}).items():
            self.promise(worker, num_groups)

    def note_load(
        self,
        worker: int,
        *,
        version: int,
        num_running: int,
        num_held: int,
        gets_newest: bool = False,
    ) -> None:
        """The worker's counts are these now.

        Args: gets_newest: it will soon hold the newest version, if it does not yet.
        """
        num_new = num_running + num_held - int(self._running[worker] + self._held[worker])
        self._on_node[self._node[worker]] += num_new
        self.num_stored += num_new
        self._version[worker] = version
        self._running[worker] = num_running
        self._held[worker] = num_held
        self._gets_newest[worker] = gets_newest
        self._takes_groups[worker] = version >= 0

    def promise(self, worker: int, num_groups: int) -> None:
        """The worker was chosen for groups that do not run yet, or, negative, no longer."""
        self._promised[worker] += num_groups
        self._on_node[self._node[worker]] += num_groups

    @property
    def promised(self) -> dict[int, int]:
        """Groups that workers were chosen for, and that do not run yet."""
        return {int(worker): int(self._promised[worker]) for worker in self._promised.nonzero()[0]}

    def least_loaded(self, version: int, num_waiting: int = 1) -> int | None:
        """The worker that holds `version` or a later one, has room, and runs the fewest groups.

        Args:
            num_waiting: groups that are to be shared out.
        Returns: of several the first; None: there is no such worker, or it has its share.
        """
        if not len(self._node):
            return None
        busy, has_room = self._running + self._promised, self._has_room
        is_able = has_room & (self._version >= version)
        worker = int(np.where(is_able, busy, np.iinfo(np.int64).max).argmin())
        if not is_able[worker]:
            return None
        shares = is_able | (has_room & self._gets_newest)
        num_groups = int(busy[shares].sum()) + num_waiting
        return worker if busy[worker] * int(shares.sum()) < num_groups else None

    def takes(self, worker: int, version: int) -> bool:
        """Whether the worker takes groups, and holds `version` or a later one."""
        return bool(self._takes_groups[worker] and self._version[worker] >= version)

    @property
    def full(self) -> list[int]:
        """Workers that take groups; none if any of them has room, or was chosen for a group."""
        takes = self._takes_groups
        is_any_free = (takes & (self._has_room | (self._promised > 0))).any()
        return [] if is_any_free else [int(worker) for worker in takes.nonzero()[0]]

    @property
    def _has_room(self) -> NDArray[np.bool_]:
        has_room = self._running + self._promised + self._held < self.max_on_worker
        return has_room & (self._on_node < self._max_on_node)[self._node]


_Waiter = asyncio.Future[tuple[int, int]]
"""Gets the number of a worker, and how many groups were promised to it."""


class WorkerQueue:
    """Hands out workers, to groups of the oldest version first.

    Attributes:
        loads: of the workers that there are now.
    """

    def __init__(self, loads: WorkerLoads, background: Background) -> None:
        self.loads = loads
        self._background = background
        self._waiting: dict[int, deque[_Waiter]] = {}
        self._homes: dict[_Waiter, tuple[int, Callable[[], Sequence[int]]]] = {}
        self._serving: asyncio.Task[None] | None = None

    async def take_worker(self, version: int, homes: Callable[[], Sequence[int]] = list) -> int:
        """The number of the least loaded worker that holds `version` or a later one and has room.

        Args:
            homes: workers that have room for this group, the one to be preferred first.
        Raises: WaitTimeout: nothing changed for too long. The failure of background work.
        """
        waiter: _Waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(version, deque()).append(waiter)
        if homes():
            self._homes[waiter] = version, homes
        if self._serving is None or self._serving.done():
            self._serving = self._background.hold(self._serve_all(), "workers for groups")
        try:
            worker, _ = await waiter
            return worker
        except asyncio.CancelledError:
            self._background.notify()  # the worker, if there was one, is free for another
            raise
        finally:
            self._homes.pop(waiter, None)
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                worker, num_promised = waiter.result()
                self.loads.promise(worker, -num_promised)  # the caller counts it from here on

    async def _serve_all(self) -> None:
        try:
            while True:
                num_served = self._serve_some()
                if not self._waiting:
                    return
                if num_served == GROUPS_PER_TURN:
                    await asyncio.sleep(0)
                    continue
                self._background.raise_failure()
                await self._background.wait(
                    f"a rollout worker with policy version {min(self._waiting)} or later, and room "
                    "in its store"
                )
        except Exception as error:  # the task's end: whoever waits is told
            waiting, self._waiting = self._waiting, {}
            for waiter in (waiter for waiters in waiting.values() for waiter in waiters):
                if not waiter.done():
                    waiter.set_exception(error)

    def _serve_some(self) -> int:
        """How many groups got a worker; none does in a paused run."""
        if self._background.standstill.is_on:
            return 0
        num_served = 0
        for waiter, (version, homes) in list(self._homes.items()):
            home = next((it for it in homes() if self.loads.takes(it, version)), None)
            if home is not None and not waiter.done():
                waiter.set_result((home, 0))  # the group's shards there count all the while
        num_waiting = sum(map(len, self._waiting.values()))
        for version in sorted(self._waiting):
            waiters = self._waiting[version]
            while waiters:
                if waiters[0].done():
                    waiters.popleft()  # cancelled
                    continue
                if num_served == GROUPS_PER_TURN:
                    return num_served
                worker = self.loads.least_loaded(version, num_waiting - num_served)
                if worker is None:
                    return num_served  # nor is there one for later versions
                self.loads.promise(worker, 1)
                waiters.popleft().set_result((worker, 1))
                num_served += 1
            del self._waiting[version]
        return num_served


_NO_LIMIT: Final = 1 << 40
"""More groups than there ever are, also where thousands of stores are added up."""


class StoreRoom(NamedTuple):
    """Groups that fit.

    Attributes:
        on_worker: into one store.
        on_node: node -> into its stores together.
    """

    on_worker: int
    on_node: dict[str, int]

    @property
    def num_groups(self) -> int:
        """Number of groups that all stores hold."""
        return sum(self.on_node.values())


@dataclass(eq=False)
class WorkerSet:
    """The workers of one RolloutController, and who of them takes the next group.

    Args:
        needs: whose shards stay.
        tell: takes which of them leave.

    Attributes:
        states: of all workers, by ascending number; it stays the same list.
        loads: what they carry.
    """

    config: RolloutConfig
    background: Background
    needs: Needs[GroupAttempt]
    tell: Tell

    def __post_init__(self) -> None:
        self.states: list[RolloutWorkerState] = []
        self.loads = WorkerLoads([], 0, {})
        self._queue = WorkerQueue(self.loads, self.background)
        self._max_groups, self._field_bytes = 0, NO_FIELDS
        self._is_recount_due = False
        self._by_number: dict[int, RolloutWorkerState] = {}

    def track(self, members: Sequence[Member]) -> None:
        """The first workers: those that were started are up.

        Raises: ConfigError: see `check_room`; where no others are to come.
        """
        self.states[:] = [self._state_of(member) for member in members]
        if all(member.has_lived for member in members):
            self.check_room_of(self.staying)
        self.renew()

    def reserve(self, field_bytes: FieldBytes) -> None:
        """Workflows add fields of so many bytes to the rows from now on, or of fewer."""
        if field_bytes != self._field_bytes:
            self._field_bytes = field_bytes
            self.renew()

    @property
    def staying(self) -> list[RolloutWorkerState]:
        """Workers that are not to leave, those included that are being started."""
        return [state for state in self.states if not state.life.is_leaving]

    @property
    def leaving(self) -> list[RolloutWorkerState]:
        return [state for state in self.states if state.life.is_leaving]

    def add(self, member: Member) -> RolloutWorkerState:
        """A further worker, which is being started."""
        state = self._state_of(member)
        self.states.append(state)
        self.states.sort(key=lambda state: state.number)
        self.renew()
        return state

    def _state_of(self, member: Member) -> RolloutWorkerState:
        state = RolloutWorkerState(member, member.index, WorkerStore(self.needs))
        if self.config.waits_for_weights:
            state.built_with = state.version = NO_VERSION
        if not member.has_lived:
            state.version = NO_VERSION
        return state

    @property
    def holds_batch(self) -> bool:
        """Whether the stores of the workers that came, and stay, have room for a batch."""
        return self._max_groups >= self.config.train_batch_groups

    def check_room(self) -> None:
        """Raises: ConfigError: all workers have come, and their stores do not hold a batch (any
        more, where a worker found a fuller memory when it was started again)."""
        if not self.holds_batch and all(state.life.has_served for state in self.staying):
            self.check_room_of(self.staying)

    def retire(self, state: RolloutWorkerState) -> None:
        """The worker is to leave."""
        self.tell(Retired(state.life.unit))
        self.renew()

    def keep(self, state: RolloutWorkerState) -> None:
        """A worker that was to leave stays after all."""
        self.tell(Kept(state.life.unit))
        self.renew()

    def remove(self, state: RolloutWorkerState) -> None:
        """The worker is not there any more."""
        self.states.remove(state)
        self.renew()

    def is_idle(self, state: RolloutWorkerState, num_queued: int) -> bool:
        """Whether nothing counts on a worker that leaves: it runs nothing, and no rows of it are
        needed. One that can still get groups is not idle.

        Args:
            num_queued: groups that were admitted, and wait for a worker.
        """
        are_held = self.loads.num_stored + num_queued <= self._max_groups
        if not state.life.is_closed and are_held:
            self.tell(Closed(state.life.unit))
            self.recount(state)
        is_busy = state.store.num_running or state.num_calls or state.store.needs_any
        return state.life.is_closed and not is_busy and state.number not in self.loads.promised

    def has_room(self, num_queued: int) -> bool:
        """Whether the stores hold one more group at its worst-case size beside the queued ones."""
        return num_queued + self.loads.num_stored < self._max_groups

    async def take_worker(
        self, version: int, homes: Callable[[], Mapping[str, int]] = dict
    ) -> RolloutWorkerState:
        """Takes a worker that may run a group; call its `run_group` before the next await.

        Args:
            homes: workers, by name, in whose stores the group has room already: the one with most
                of it is taken as soon as it takes groups, if no other one was before.
        """

        def homes_by_number() -> list[int]:
            sizes = homes()
            found = [state for state in self.states if state.name in sizes] if sizes else []
            return [it.number for it in sorted(found, key=lambda it: -sizes[it.name])]

        number = await self._queue.take_worker(version, homes_by_number)
        return self._by_number[number]  # of now: meanwhile there may be others

    def renew(self) -> None:
        """Workers have come, or go, or tell of other memory than before."""
        served = [state for state in self.states if state.life.has_served]
        self._max_groups = self._room([s for s in served if not s.life.is_leaving]).num_groups
        self._by_number = {state.number: state for state in self.states}
        nodes = [""] * (1 + max(self._by_number, default=-1))
        for state in self.states:
            nodes[state.number] = state.member.worker.node
        room = self._room(self.states)
        self.loads = self._queue.loads = WorkerLoads(nodes, *room, self.loads.promised)
        self._recount_all()

    def recount_soon(self) -> None:
        """Some workers give signs of life again, or none any more; of many that is told at once."""
        if not self._is_recount_due:
            self._is_recount_due = True
            asyncio.get_running_loop().call_soon(self._recount_all)

    def _recount_all(self) -> None:
        self._is_recount_due = False
        for state in self.states:
            self.recount(state)
        self.background.notify()

    def recount(self, state: RolloutWorkerState) -> None:
        """The worker's version, or a number of its groups, has changed."""
        if self._by_number.get(state.number) is not state:
            return  # it has left
        takes_groups = state.life.is_ready and not state.life.is_closed
        self.loads.note_load(
            state.number,
            version=state.version if takes_groups else NO_VERSION,
            num_running=state.store.num_running,
            num_held=state.store.num_held,
            gets_newest=takes_groups and state.version != NO_VERSION and not state.holds,
        )

    def _room(self, states: Sequence[RolloutWorkerState]) -> StoreRoom:
        workers = [state.member.worker for state in states]
        return store_room(workers, self.config, self._field_bytes)

    def check_room_of(self, states: Sequence[RolloutWorkerState]) -> None:
        """Raises: ConfigError: the stores of these workers do not hold a batch."""
        check_room(self._room(states), self.config, self._field_bytes)


def store_room(
    workers: Sequence[WorkerReport], config: RolloutConfig, field_bytes: FieldBytes = NO_FIELDS
) -> StoreRoom:
    """By the limits that are set, which were checked before, and by how much memory is free."""
    group_bytes = max_group_bytes(config, field_bytes)
    on_worker = max(1, config.store_bytes // group_bytes) if config.store_bytes else _NO_LIMIT
    num_workers = Counter(worker.node for worker in workers)
    on_node = {node: on_worker * count for node, count in num_workers.items()}
    for worker in workers:
        if free := worker.store_room_bytes:  # 0: not known
            # a limit counts shards; of the memory itself their blocks take whole pages
            span = config.group_size * block_span(group_bytes // config.group_size)
            on_node[worker.node] = min(on_node[worker.node], free // span)
    return StoreRoom(on_worker, on_node)


def check_room(room: StoreRoom, config: RolloutConfig, field_bytes: FieldBytes = NO_FIELDS) -> None:
    """Raises: ConfigError: the stores do not hold one training batch."""
    if room.num_groups < config.train_batch_groups:
        raise ConfigError(
            "transport.shared_memory: expected room for a batch, that is for "
            f"rollout.train_batch_groups={config.train_batch_groups} groups "
            f"({describe_largest_group(config, field_bytes)}), but what is free there, and the "
            f"limits of the stores, leave room for {room.num_groups}; give more room, a smaller "
            "rollout.max_context_tokens, smaller batches, another folder, or more workers"
        )
