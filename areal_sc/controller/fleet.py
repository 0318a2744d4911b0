"""The workers of one role, as their controller sees them: launch, liveness, calls.

consumes     replies of the workers, and news of the agents of their nodes
waits for    the reply of each call
unblocked by that reply, the call's deadline, or the loss of the worker: every call in flight to it
             fails at once with `WorkerLost`, and so does every later one

lost         a worker of which `NodeWorkers` says so. A connection that ends is made again, and its
             calls are repeated under their ids
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from areal_sc.config.schema import SchedulerConfig
from areal_sc.controller.node_workers import Member, NodeWorkers, OnLost, OnSilence
from areal_sc.controller.runtime import Runtime
from areal_sc.errors import ArealError, PeerLost, WorkerLost
from areal_sc.schedulers.base import Scheduler, placed
from areal_sc.transport.rpc.method import A, Method, R
from areal_sc.workers.calls import SHUTDOWN
from areal_sc.workers.spec import WorkerOrder


class Fleet:
    """Launches, watches and calls the workers of one role.

    Attributes:
        members: all workers, in order of their index.
        on_silence: see `OnSilence`; `Recovery` sets it.
    """

    def __init__(self, scheduler: Scheduler, runtime: Runtime, on_lost: OnLost) -> None:
        self._scheduler = scheduler
        self._runtime = runtime
        self._on_lost = on_lost
        self._nodes: dict[NodeWorkers, asyncio.Task[None]] = {}
        self.members: list[Member] = []
        self.on_silence: OnSilence = lambda member: None

    @property
    def config(self) -> SchedulerConfig:
        return self._scheduler.config

    @property
    def num_bytes(self) -> int:
        """Bytes sent and received on all control sockets of the fleet, those of agents included."""
        return sum(node.num_bytes for node in self._nodes)

    async def launch(self, orders: Sequence[WorkerOrder]) -> None:
        """Starts all workers, those of a node by one call, and watches each from then on.

        Raises: WorkerStartError: one did not come up; the others are stopped. ConfigError: there
            are not enough devices.
        """
        nodes = await self._scheduler.nodes()
        orders = [replace(order, incarnation=self._runtime.new_id()) for order in orders]
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            used = [
                NodeWorkers(
                    *(node, part, self._scheduler, self._runtime, self._on_lost),
                    on_silence=lambda member: self.on_silence(member),
                )
                for node, part in placed(orders, nodes).items()
                if part
            ]
            for number, node in enumerate(used, start=1):
                hold_s = self.config.heartbeat_interval_s * number / len(used)
                self._nodes[node] = asyncio.create_task(node.run(hold_s))
            launches = [asyncio.create_task(node.launch()) for node in used]
            undo.push_async_callback(_cancel_all, launches)
            await asyncio.gather(*launches)
            undo.pop_all()
        launched = [member for node in used for member in node.members]
        self.members = sorted(launched, key=lambda member: member.index)

    async def kill(self, members: Sequence[Member]) -> None:
        """Ends what is left of the present lives; nothing that they still do counts."""
        await asyncio.gather(*(node.kill(part) for node, part in self._by_node(members)))

    async def restart(self, members: Sequence[Member]) -> None:
        """Starts a new life of each of the workers, lost or not, in place of the one before.

        Their members stay the same objects. Calls to the life before fail at once.

        Raises: WorkerStartError: one did not come up. None of a node's is left then; all may be
            started again. NodeLost: the agent of a node cannot be started again.
        """
        restarts = [node.restart(part) for node, part in self._by_node(members)]
        for outcome in await asyncio.gather(*restarts, return_exceptions=True):
            if outcome is not None:
                raise outcome

    def _by_node(self, members: Sequence[Member]) -> list[tuple[NodeWorkers, list[Member]]]:
        parts = [(node, [m for m in node.members if m in members]) for node in self._nodes]
        return [(node, part) for node, part in parts if part]

    async def call(
        self, member: Member, method: Method[A, R], args: A, *, timeout_s: float | None = None
    ) -> R:
        """Reply of one worker.

        Args:
            timeout_s: None: as the method's declaration says.
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
        Raises: as `call`.
        """
        members = self.members if members is None else members
        for member in members:
            if member.failure:
                raise member.failure
        connections = [member.connection for member in members]
        outcomes = await self._runtime.transport.call_all(
            list(zip(connections, args, strict=True)),
            method,
            timeout_s=timeout_s or self._deadline_s(method),
            stops_at_error=True,
        )
        replies = []
        for outcome in outcomes:
            if isinstance(outcome, ArealError):
                raise outcome
            replies.append(outcome)
        return replies

    async def call_living(
        self, method: Method[A, R], args: A, members: Sequence[Member]
    ) -> dict[Member, R]:
        """Replies of those of `members` that live; who is, or gets, lost is left out.

        Raises: as `call`, but for losses.
        """
        living = [member for member in members if member.failure is None]
        incarnations = [member.worker.incarnation for member in living]
        outcomes = await self._runtime.transport.call_all(
            [(member.connection, args) for member in living],
            method,
            timeout_s=self._deadline_s(method),
        )
        replies = {}
        for member, incarnation, outcome in zip(living, incarnations, outcomes, strict=True):
            if isinstance(outcome, PeerLost):  # faster than the news of its death
                self.lose(member, incarnation, f"is of no use any more: {outcome}")
            if isinstance(outcome, WorkerLost | PeerLost):
                continue
            if isinstance(outcome, ArealError):
                raise outcome
            replies[member] = outcome
        return replies

    def lose(self, member: Member, incarnation: str, cause: str) -> WorkerLost:
        """A life of a worker is of no use any more, whether it goes on or not: it is lost.

        Args:
            cause: why, in words that follow the worker's name.
        Returns: that loss, which may have been noticed before.
        """
        if member.worker.incarnation == incarnation:
            for node in self._nodes:
                if member in node.members:
                    node.lose(member, cause)
        return member.failure or WorkerLost(f"worker {member.name} {cause}")

    def _deadline_s(self, method: Method[Any, Any]) -> float:
        declared_s = method.deadline_s
        return self.config.transport.call_timeout_s if declared_s is None else declared_s

    async def close(self) -> None:
        """Asks the workers to end, ends those that do not, and closes the connections."""
        await _cancel_all(list(self._nodes.values()))
        alive = [m for node in self._nodes for m in node.members if not m.failure]
        await asyncio.gather(
            *(self.call(member, SHUTDOWN, None) for member in alive),
            return_exceptions=True,  # a worker that does not answer is ended below
        )
        await asyncio.gather(*(node.close() for node in self._nodes))
        self._nodes.clear()
        self.members.clear()


async def _cancel_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
