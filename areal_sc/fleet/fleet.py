"""The workers of one role, as their controller sees them: launch, liveness, calls.

consumes     replies of the workers, and news of the agents of their nodes
waits for    the reply of each call
unblocked by that reply, the call's deadline, or the loss of the worker: every call in flight to it
             fails at once with `WorkerLost`, and so does every later one

lost         a worker of which `NodeWorkers` says so. A connection that ends is made again, and its
             calls are repeated under their ids
hung         a worker that gives signs of life, and no reply before the deadline of its call. Who
             needs the reply loses it by `lose_hung`, which tells where its threads are
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from areal_sc.config.placement import Purpose
from areal_sc.config.schema import SchedulerConfig
from areal_sc.errors import (
    ArealError,
    ConfigError,
    IncarnationMismatch,
    PeerLost,
    RpcTimeout,
    WorkerLost,
)
from areal_sc.fleet.member import FoundWorkers, Member, take_found
from areal_sc.fleet.node_workers import NodeWorkers
from areal_sc.fleet.runtime import Runtime
from areal_sc.fleet.worker_life import Launching, Lives, Started, Tell
from areal_sc.nodes.spec import ROLLOUT_ROLE, LivingWorker, WorkerOrder
from areal_sc.schedulers.base import AsksForNodes, Node, Scheduler, lack_of_places, placed
from areal_sc.system.waiting import cancel_all
from areal_sc.transport.rpc.method import A, Method, R
from areal_sc.workers.calls import SHUTDOWN

logger = logging.getLogger(__name__)


class Fleet:
    """Launches, watches and calls the workers of one role.

    Args:
        unit: see `Lives`.

    Attributes:
        members: all workers, in order of their index.
        lives: where their units stand.
        tell: takes what is seen of them.
    """

    def __init__(self, scheduler: Scheduler, runtime: Runtime, tell: Tell, unit: str = "") -> None:
        self.tell = tell
        self._scheduler = scheduler
        self._runtime = runtime
        self._unit = unit
        self._nodes: dict[NodeWorkers, asyncio.Task[None]] = {}
        self._room = NodeRoom(scheduler)
        self.members: list[Member] = []
        self._forget()

    def _forget(self) -> None:
        """A further start begins with new lives."""
        self.members.clear()
        self.lives = Lives(self.config.max_deaths, self._unit)

    @property
    def config(self) -> SchedulerConfig:
        return self._scheduler.config

    @property
    def nodes(self) -> list[NodeWorkers]:
        """Where its workers are, while it has any."""
        return list(self._nodes)

    @property
    def num_bytes(self) -> int:
        """Bytes sent and received on all control sockets of the fleet, those of agents included."""
        return self._runtime.transport.num_bytes

    @property
    def coming(self) -> set[str]:
        """Names of the workers whose node is on its way."""
        nodes = (workers for workers in self._nodes if not workers.node.is_there)
        return {member.name for workers in nodes for member in workers.members}

    async def found(self, role: str) -> list[int]:
        """Numbers of the workers of a role that an earlier start of the script has left."""
        orders = (worker.order for node in await self._scheduler.nodes() for worker in node.found)
        return sorted(order.index for order in orders if order.role == role)

    async def launch(self, orders: Sequence[WorkerOrder], *, adopts: bool = False) -> None:
        """Starts all workers, those of a node by one call, and watches each from then on.

        Those on nodes that are on their way are lost ones, until `restart` has started them.

        Args:
            orders: all of one role; where they say nothing of incarnation, devices and port.
            adopts: takes over what an earlier start of the script has left of workers with the same
                orders, in place of new ones: `Member.is_adopted`. All others of the role end first.
        Raises: WorkerStartError: one did not come up; the others are stopped. ConfigError: there
            are not enough devices.
        """
        nodes = await self._scheduler.nodes()
        found = {node: take_found(node, orders, adopts=adopts) for node in nodes}
        adopted = {node: workers.adopted for node, workers in found.items()}
        names = {worker.order.name for workers in adopted.values() for worker in workers}
        new = [
            replace(order, incarnation=self._runtime.new_id())
            for order in orders
            if order.name not in names
        ]
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            used = [
                self._on(node, orders[0].role, part, found[node])
                for node, part in placed(new, nodes, adopted).items()
                if part or found[node]
            ]
            for number, node in enumerate(used, start=1):
                self._follow(node, self.config.heartbeat_interval_s * number / len(used))
            launches = [asyncio.create_task(node.launch()) for node in used]
            undo.push_async_callback(cancel_all, launches)
            await asyncio.gather(*launches)
            undo.pop_all()
        self._list_members()
        if orders[0].role == ROLLOUT_ROLE:
            await self._room.give_back(set(nodes) - {workers.node for workers in self._nodes})

    async def expect(self, orders: Sequence[WorkerOrder]) -> list[Member]:
        """Places for further workers of the role: lost ones, until `restart` has started them.

        Where the nodes have too little room, further ones are asked for.

        Raises: ConfigError: there are not enough devices, and no node with more. SchedulerSilent:
            the scheduler cannot be asked now.
        """
        nodes = await self._room.nodes_for([member.order for member in self.members], orders)
        there = {workers.node: workers for workers in self._nodes}
        living = {
            node: [LivingWorker(member.order, member.worker) for member in workers.members]
            for node, workers in there.items()
        }
        members = []
        for node, part in placed(orders, nodes, living).items():
            if part and node not in there:
                there[node] = self._on(node, part[0].role, [], FoundWorkers())
                self._follow(there[node], 0.0)
            members += [there[node].expect(order) for order in part]
        self._list_members()
        return members

    async def dismiss(self, member: Member) -> None:
        """Asks a worker to end, and ends it if it does not; the fleet has one less then.

        A node that has none left is given back, if it can be.
        """
        [(node, _)] = self._by_node([member])
        await node.dismiss(member)
        self._list_members()
        if not node.members:
            watch = self._nodes.pop(node)
            self._room.close(node.node)
            await cancel_all([watch])
            await node.close(ends_workers=False)
            await self._room.give_back([node.node])

    def _on(
        self, node: Node, role: str, orders: Sequence[WorkerOrder], found: FoundWorkers
    ) -> NodeWorkers:
        return NodeWorkers(
            node,
            role,
            orders,
            found,
            self._scheduler,
            self._runtime,
            self.lives,
            self.tell,
        )

    def _follow(self, node: NodeWorkers, first_hold_s: float) -> None:
        self._nodes[node] = asyncio.create_task(node.run(first_hold_s))

    def _list_members(self) -> None:
        members = [member for node in self._nodes for member in node.members]
        self.members = sorted(members, key=lambda member: member.index)

    async def kill(self, members: Sequence[Member]) -> None:
        """Ends what is left of the present lives; nothing that they still do counts."""
        await asyncio.gather(*(node.kill(part) for node, part in self._by_node(members)))

    @property
    def awaits_machines(self) -> bool:
        """Whether lost workers, of any role, wait for machines."""
        return bool(self._runtime.awaited)

    async def wait_for_nodes(self, members: Sequence[Member], *, are_lost: bool) -> None:
        """Returns when all nodes of these workers are there.

        Args:
            are_lost: they have lived before.
        Raises: NodeLost: the agent of one cannot be started again.
        """
        names = {member.name for member in members if are_lost}
        self._runtime.awaited.update(names)
        try:
            for node, _ in self._by_node(members):
                await node.agent.wait_until_served()
        finally:
            self._runtime.awaited.difference_update(names)

    async def restart(self, members: Sequence[Member]) -> None:
        """Starts a new life of each of the workers, lost or not, in place of the one before.

        Their members stay the same objects. Calls to the life before fail at once.

        Raises: WorkerStartError: one did not come up. None of a node's is left then; all may be
            started again. NodeLost: the agent of a node cannot be started again.
        """
        units = {member.life.unit for member in members}
        for unit in units:
            self.tell(Launching(unit))
        restarts = [node.restart(part) for node, part in self._by_node(members)]
        for outcome in await asyncio.gather(*restarts, return_exceptions=True):
            if outcome is not None:
                raise outcome
        for unit in units:
            lives = [it.worker.incarnation for it in members if it.life.unit == unit]
            self.tell(Started(unit, frozenset(lives)))

    def _by_node(self, members: Sequence[Member]) -> list[tuple[NodeWorkers, list[Member]]]:
        parts = [(node, [m for m in node.members if m in members]) for node in self._nodes]
        return [(node, part) for node, part in parts if part]

    async def call(
        self, member: Member, method: Method[A, R], args: A, *, timeout_s: float | None = None
    ) -> R:
        """Reply of one worker.

        Args:
            timeout_s: None: that of the method's declaration.
        Raises: WorkerLost: the worker is, or gets, lost. Typed errors of the method.
        """
        if member.failure:
            raise member.failure
        timeout_s = timeout_s or self._deadline_s(method)
        return await member.connection.call(method, args, timeout_s=timeout_s)

    async def call_all(
        self, method: Method[A, R], args: A, *, timeout_s: float | None = None
    ) -> list[R]:
        """Replies of all workers to the same call; see `call_each`."""
        return await self.call_each(method, [args] * len(self.members), timeout_s=timeout_s)

    async def call_each(
        self,
        method: Method[A, R],
        args: Sequence[A],
        *,
        members: Sequence[Member] | None = None,
        timeout_s: float | None = None,
    ) -> list[R]:
        """Replies of all workers, in order of their index; the first error cancels the others.

        Args:
            args: of each worker's call, in the same order.
            members: None: all workers.
        Raises: the errors of `call`.
        """
        members = self.members if members is None else members
        for member in members:
            if member.failure:
                raise member.failure
        replies = []
        for outcome in await self._outcomes(members, method, args, timeout_s, stops_at_error=True):
            if isinstance(outcome, ArealError):
                raise outcome
            replies.append(outcome)
        return replies

    async def call_living(
        self,
        method: Method[A, R],
        args: A,
        members: Sequence[Member],
        *,
        timeout_s: float | None = None,
    ) -> dict[Member, R]:
        """Replies of those of `members` that live; who is, or gets, lost is left out.

        Raises: the errors of `call`, but for losses.
        """
        living = [member for member in members if member.failure is None]
        incarnations = [member.worker.incarnation for member in living]
        outcomes = await self._outcomes(living, method, [args] * len(living), timeout_s)
        replies = {}
        for member, incarnation, outcome in zip(living, incarnations, outcomes, strict=True):
            if not isinstance(outcome, ArealError):
                replies[member] = outcome
            elif isinstance(outcome, PeerLost):  # faster than the news of its death
                self.lose(member, incarnation, f"is of no use any more: {outcome}")
            elif not isinstance(outcome, WorkerLost) and not await self.lose_hung(
                outcome, [member], "transport.call_timeout_s"
            ):
                raise outcome
        return replies

    async def _outcomes(
        self,
        members: Sequence[Member],
        method: Method[A, R],
        args: Sequence[A],
        timeout_s: float | None,
        *,
        stops_at_error: bool = False,
    ) -> list[R | ArealError]:
        """Calls workers like `Transport.call_all`; a life that another one has replaced is lost.

        Calls to many workers begin in several turns of the event loop. So a worker may be lost, and
        its next life serve at its address, before the call to it is sent.
        """
        incarnations = [member.worker.incarnation for member in members]
        outcomes = await self._runtime.transport.call_all(
            [(member.connection, its) for member, its in zip(members, args, strict=True)],
            method,
            timeout_s=timeout_s or self._deadline_s(method),
            stops_at_error=stops_at_error,
        )
        return [
            self.lose(member, incarnation, f"is of no use any more: {outcome}")
            if isinstance(outcome, IncarnationMismatch)
            else outcome
            for member, incarnation, outcome in zip(members, incarnations, outcomes, strict=True)
        ]

    def lose(
        self, member: Member, incarnation: str, cause: str, lines: Sequence[str] | None = None
    ) -> WorkerLost:
        """A life of a worker is of no use any more, whether it goes on or not: it is lost.

        Args:
            cause: why, in words that follow the worker's name.
            lines: explain it; None: the end of its log does.
        Returns: that loss, which may have been noticed before.
        """
        if member.worker.incarnation == incarnation:
            for node, _ in self._by_node([member]):
                node.lose(member, cause, lines)
        return member.failure or WorkerLost(f"worker {member.name} {cause}")

    async def lose_hung(
        self, error: Exception, members: Sequence[Member], setting: str
    ) -> WorkerLost | None:
        """A worker that gave no reply in time is lost; the log gets the stacks of all of `members`.

        Args:
            error: of a call to these workers.
            members: the worker, and those that it may wait for.
            setting: what the limit is, for the message.
        Returns: that loss, which may have been noticed before; None: the error is another one.
        """
        silent = error.silent if isinstance(error, RpcTimeout) else None
        late = next((member for member in members if member.name == silent), None)
        if late is None:
            return None
        incarnation, now_s = late.worker.incarnation, asyncio.get_running_loop().time()
        names = [member.name for member in members]
        parts = await asyncio.gather(*(node.stacks(names) for node, _ in self._by_node(members)))
        told = {stacks.name: stacks for part in parts for stacks in part}
        states, lines = [], list[str]()
        for member in sorted(members, key=lambda member: member is late):  # that one at the end
            stacks = told.get(member.name)
            does = "cannot be looked at" if stacks is None else stacks.state
            states.append(
                f"{member.name}'s process {does}, its last heartbeat is "
                f"{now_s - member.beat_s:.1f} s old"
            )
            lines += [f"{member.name}:", *(stacks.lines if stacks else ())]
        cause = f"hangs: {error} (see {setting}); {'; '.join(states)}"
        logger.error("worker=%s hangs; where its threads are:\n%s", late.name, "\n".join(lines))
        return self.lose(late, incarnation, cause, lines)

    def _deadline_s(self, method: Method[Any, Any]) -> float:
        if method.deadline_s is not None:
            return method.deadline_s
        transport = self.config.transport
        limit_s = transport.write_timeout_s if method.writes else transport.call_timeout_s
        if method.ships and not all(it.node.facts.shares_folder for it in self._nodes):
            limit_s += self.config.shipping_timeout_s
        return limit_s

    async def close(self) -> None:
        """Asks the workers to end, ends those that do not, and closes the connections.

        When a later start of the script has taken the run over, its workers go on.
        """
        await cancel_all(self._nodes.values())
        term = self._scheduler.term
        is_ours = term is None or not term.is_over
        alive = [m for node in self._nodes for m in node.members if is_ours and not m.failure]
        await asyncio.gather(
            *(self.call(member, SHUTDOWN, None) for member in alive),
            return_exceptions=True,  # a worker that does not answer is ended below
        )
        await asyncio.gather(*(node.close(ends_workers=is_ours) for node in self._nodes))
        self._nodes.clear()
        self._forget()


class NodeRoom:
    """The nodes that workers of one role may get, where a run may have more of them, or fewer.

        more workers than places ──► AsksForNodes.ask_node ──► a node that is on its way
        a node without workers   ──► AsksForNodes.give_back

    A scheduler that does not ask for nodes lends the same ones all the time.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._given_back: set[Node] = set()  # or about to be

    async def nodes_for(
        self, present: Sequence[WorkerOrder], further: Sequence[WorkerOrder]
    ) -> list[Node]:
        """The nodes of the run, with room for all of these workers.

        Raises: ConfigError: there is no such room, and none to be had. SchedulerSilent: the
            scheduler cannot be asked now.
        """
        asked: list[Node] = []
        try:
            while True:
                nodes = [it for it in await self._scheduler.nodes() if it not in self._given_back]
                lack = lack_of_places([*present, *further], nodes)
                if not lack:
                    return nodes
                if not isinstance(self._scheduler, AsksForNodes):
                    raise ConfigError(lack)
                asked.append(await self._scheduler.ask_node())
                if lack := lack_of_places(further[:1], asked[-1:]):
                    raise ConfigError(f"{asked[-1].name}: {lack}")
        except ArealError:
            await self.give_back(asked)
            raise

    def close(self, node: Node) -> None:
        """Nobody is placed there any more; `give_back` follows."""
        self._given_back.add(node)

    async def give_back(self, nodes: Iterable[Node]) -> None:
        """Nodes on which nobody works, as far as they are for rollout workers alone."""
        nodes = set(nodes)
        self._given_back |= nodes
        own = [node for node in nodes if node.purpose is Purpose.rollout]
        try:
            if isinstance(self._scheduler, AsksForNodes):
                await asyncio.gather(*map(self._scheduler.give_back, own))
        except ArealError as error:
            logger.warning("nodes may be left until the run ends: %s", error)
        finally:
            self._given_back -= nodes
