"""The rollout workers that there are: which stay, which leave, and what each of them carries.

    add ──► starts ──► has served ──► retire ──► closed ──► idle ──► remove
            no room     its store     no room    no new     nothing
                        is room       any more   groups     needed

Room is what admission counts with: a group that was admitted finds a store, whatever happens. So a
worker that leaves takes its store out of the room at once, and goes on to take groups until those
that were admitted before fit into the stores of the others. What lies in its own store counts all
the while.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from areal_sc.config.schema import RolloutConfig
from areal_sc.controller.background import Background
from areal_sc.controller.rollout.worker_choice import WorkerLoads, WorkerQueue
from areal_sc.controller.rollout.worker_state import NO_VERSION, RolloutWorkerState
from areal_sc.controller.worker_store import Needs, WorkerStore
from areal_sc.errors import ConfigError
from areal_sc.fleet.member import Member
from areal_sc.fleet.worker_life import Closed, Kept, Retired, Tell
from areal_sc.nodes.spec import WorkerReport
from areal_sc.sizing.store_room import describe_largest_group, max_group_bytes
from areal_sc.transport.shards.arena import block_span
from areal_sc.workers.calls import GroupAttempt

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
        self._max_groups = self._field_bytes = 0
        self._is_recount_due = False
        self._by_number: dict[int, RolloutWorkerState] = {}

    def track(self, members: Sequence[Member]) -> None:
        """The first workers: those that were started are up.

        Raises: ConfigError: see `check_room`; where no others are to come.
        """
        self.states[:] = [self._state_of(member) for member in members]
        if all(member.has_lived for member in members):
            self._check_room_of(self.staying)
        self.renew()

    def reserve(self, field_bytes: int) -> None:
        """Workflows add fields of so many bytes a token to the rows from now on, or of fewer."""
        if field_bytes > self._field_bytes:
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

    def check_retiring(self, states: Sequence[RolloutWorkerState]) -> None:
        """Raises: ConfigError: see `check_room`; of the workers that would be left."""
        self._check_room_of([s for s in self.staying if s not in states])

    def check_room(self) -> None:
        """Raises: ConfigError: all workers have come, and their stores do not hold a batch (any
        more, where a worker found a fuller memory when it was started again)."""
        if not self.holds_batch and all(state.life.has_served for state in self.staying):
            self._check_room_of(self.staying)

    @property
    def full_workers(self) -> set[str]:
        """The workers that take groups, if none has room or was chosen for a group; else none."""
        return {self._by_number[number].name for number in self.loads.full}

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

    def _check_room_of(self, states: Sequence[RolloutWorkerState]) -> None:
        check_room(self._room(states), self.config, self._field_bytes)


def store_room(
    workers: Sequence[WorkerReport], config: RolloutConfig, field_bytes: int = 0
) -> StoreRoom:
    """By the limits that are set, which were checked before, and by how much memory is free."""
    group_bytes = max_group_bytes(config, field_bytes)
    on_worker = max(1, config.store_bytes // group_bytes) if config.store_bytes else _NO_LIMIT
    num_workers = Counter(worker.node for worker in workers)
    on_node = {node: on_worker * count for node, count in num_workers.items()}
    if config.node_store_bytes:
        of_node = config.node_store_bytes // group_bytes
        on_node = {node: min(num, of_node) for node, num in on_node.items()}
    for worker in workers:
        if free := worker.store_room_bytes:  # 0: not known
            # a limit counts shards; of the memory itself their blocks take whole pages
            span = config.group_size * block_span(group_bytes // config.group_size)
            on_node[worker.node] = min(on_node[worker.node], free // span)
    return StoreRoom(on_worker, on_node)


def check_room(room: StoreRoom, config: RolloutConfig, field_bytes: int = 0) -> None:
    """Raises: ConfigError: the stores do not hold one training batch."""
    if room.num_groups < config.train_batch_groups:
        raise ConfigError(
            "transport.shared_memory: expected room for a batch, that is for "
            f"rollout.train_batch_groups={config.train_batch_groups} groups "
            f"({describe_largest_group(config, field_bytes)}), but what is free there, and the "
            f"limits of the stores, leave room for {room.num_groups}; give more room, a smaller "
            "rollout.max_context_tokens, smaller batches, another folder, or more workers"
        )
