"""The workers of one role, as their controller sees them: launch, liveness, calls.

consumes     replies of the workers, and news of the agents of their nodes
waits for    the reply of each call
unblocked by that reply, the call's deadline, or the loss of the worker: every call in flight to it
             fails at once with `WorkerLost`, and so does every later one

lost         a worker of which `NodeWatch` says so. A connection that ends is made again, and its
             calls are repeated under their ids
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from areal_sc.config.schema import SchedulerConfig
from areal_sc.controller.node_watch import Loss, NodeWatch
from areal_sc.controller.runtime import Runtime
from areal_sc.errors import ArealError, TransportError, WorkerLost, WorkerStartError
from areal_sc.log import log_tail
from areal_sc.run_folder import RunFolder
from areal_sc.schedulers.base import LaunchRequest, Node, Scheduler, placed
from areal_sc.transport.rpc.transport import Connection
from areal_sc.workers.spec import LAUNCH, STOP, Launch, Stop, WorkerOrder, WorkerReport

logger = logging.getLogger(__name__)

RPC_MARGIN_S = 30.0
"""What a call of an agent may take beyond the time that it says."""


@dataclass
class Member:
    """One worker of the fleet.

    Attributes:
        index: its number within its role.
        failure: why the worker is lost, once it is.
    """

    worker: WorkerReport
    index: int
    connection: Connection
    failure: WorkerLost | None = None

    @property
    def name(self) -> str:
        return self.worker.name

    @property
    def node(self) -> tuple[str, str]:
        """(node_id, node_addr), as shards name their owner."""
        return self.worker.name, self.worker.address


@dataclass(eq=False)
class _Part:
    """What the fleet has on one node."""

    node: Node
    orders: list[WorkerOrder]
    agent: Connection
    watch: NodeWatch
    watching: asyncio.Task[None] | None = None


class Fleet:
    """Launches, watches and calls the workers of one role."""

    def __init__(
        self, scheduler: Scheduler, runtime: Runtime, on_lost: Callable[[WorkerLost], None]
    ) -> None:
        self._scheduler = scheduler
        self._runtime = runtime
        self._on_lost = on_lost
        self._parts: list[_Part] = []
        self._by_name: dict[str, Member] = {}
        self.members: list[Member] = []

    @property
    def config(self) -> SchedulerConfig:
        return self._scheduler.config

    @property
    def num_bytes(self) -> int:
        """Bytes sent and received on all control sockets of the fleet, those of agents included."""
        connections = [member.connection for member in self.members]
        connections += [part.agent for part in self._parts]
        return sum(c.bytes_sent + c.bytes_received for c in connections)

    async def launch(self, requests: Sequence[LaunchRequest]) -> None:
        """Starts all workers, those of a node by one call, and watches each from then on.

        Raises: WorkerStartError: one did not come up; the others are stopped. ConfigError: there
            are not enough devices.
        """
        nodes = await self._scheduler.nodes()
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            for node, workers in placed(requests, nodes).items():
                if workers:
                    self._parts.append(self._part(node, workers))
            for number, part in enumerate(self._parts, start=1):
                hold_s = self.config.heartbeat_interval_s * number / len(self._parts)
                part.watching = asyncio.create_task(self._watch(part, hold_s))
            launches = [asyncio.create_task(self._launch(part)) for part in self._parts]
            undo.push_async_callback(_cancel_all, launches)
            await asyncio.gather(*launches)
            undo.pop_all()
        self.members.sort(key=lambda member: member.index)

    def _part(self, node: Node, workers: Sequence[tuple[LaunchRequest, list[int]]]) -> _Part:
        orders = [
            WorkerOrder(
                role=request.role,
                index=request.index,
                incarnation=self._runtime.new_id(),
                engine=request.engine,
                engine_config=request.engine_config,
                store_bytes=request.store_bytes,
                devices=devices,
            )
            for request, devices in workers
        ]
        agent = self._runtime.transport.connect(node.address, "agent", node.incarnation)
        watch = NodeWatch(orders[0].role, node, agent, self._scheduler, self._lose)
        return _Part(node, orders, agent, watch)

    async def _launch(self, part: _Part) -> None:
        timeout_s = self.config.startup_timeout_s
        try:
            launched = await part.agent.call(
                LAUNCH, Launch(part.orders, timeout_s), timeout_s=timeout_s + RPC_MARGIN_S
            )
        except TransportError as error:
            path = part.node.log_path
            raise WorkerStartError(
                f"the agent of node {part.node.name} started no workers: {error}; "
                f"its log is {path}",
                log_path=str(path),
                log_tail=log_tail(path),
            ) from error
        if launched.failure:
            raise WorkerStartError(
                launched.failure, log_path=launched.log_path, log_tail=launched.log_tail
            )
        folder = RunFolder(self.config.run_dir)
        for order, worker in zip(part.orders, launched.workers, strict=True):
            connection = self._runtime.transport.connect(
                worker.address, worker.name, worker.incarnation, keeps_trying=True
            )
            member = Member(worker, order.index, connection)
            self._by_name[worker.name] = member
            self.members.append(member)
            part.watch.add(worker, folder.log_path(order.role, order.index))
            logger.info("worker=%s pid=%d address=%s", worker.name, worker.pid, worker.address)

    async def call(
        self, member: Member, method: str, args: dict[str, Any], *, timeout_s: float | None = None
    ) -> Any:
        """Reply of one worker.

        Raises: WorkerLost: the worker is, or gets, lost. Typed errors of the method.
        """
        if member.failure:
            raise member.failure
        if timeout_s is None:
            timeout_s = self.config.transport.call_timeout_s
        return await member.connection.call(method, args, timeout_s=timeout_s)

    async def call_all(
        self,
        method: str,
        args: dict[str, Any] | Sequence[dict[str, Any]],
        *,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Replies of all workers, in order of their index; the first error cancels the others.

        Args:
            args: of each worker's call, in the same order; or the same for all.
        Raises: as `call`.
        """
        for member in self.members:
            if member.failure:
                raise member.failure
        if timeout_s is None:
            timeout_s = self.config.transport.call_timeout_s
        connections = [member.connection for member in self.members]
        each = [args] * len(connections) if isinstance(args, dict) else args
        outcomes = await self._runtime.transport.call_all(
            list(zip(connections, each, strict=True)),
            method,
            timeout_s=timeout_s,
            stops_at_error=True,
        )
        for outcome in outcomes:
            if isinstance(outcome, ArealError):
                raise outcome
        return outcomes

    async def close(self) -> None:
        """Asks the workers to end, ends those that do not, and closes the connections."""
        await _cancel_all([part.watching for part in self._parts if part.watching])
        alive = [member for member in self.members if not member.failure]
        await asyncio.gather(
            *(member.connection.call("shutdown", {}, timeout_s=2.0) for member in alive),
            return_exceptions=True,  # a worker that does not answer is ended below
        )
        await asyncio.gather(*(self._stop(part) for part in self._parts))
        for member in self.members:
            await member.connection.close()
        self._parts.clear()
        self.members.clear()
        self._by_name.clear()

    async def _stop(self, part: _Part) -> None:
        grace_s = self.config.shutdown_timeout_s / 2
        incarnations = [order.incarnation for order in part.orders]
        try:
            await part.agent.call(
                STOP, Stop(incarnations, grace_s), timeout_s=grace_s + RPC_MARGIN_S
            )
        except TransportError as error:  # its workers die with it, or of their orphan timeout
            logger.warning("node=%s its agent stopped no workers: %s", part.node.name, error)
        await part.agent.close()
        for order in part.orders:
            part.node.placement.release(order.name)

    async def _watch(self, part: _Part, first_hold_s: float) -> None:
        try:
            await part.watch.run(first_hold_s)
        except Exception as error:  # the task's end: nobody awaits it, so the members' callers hear
            logger.exception("the watch over the workers failed")
            part.watch.fail(error)

    def _lose(self, loss: Loss) -> None:
        member = self._by_name[loss.name]
        assert member.failure is None, loss
        member.failure = WorkerLost(
            f"worker {loss.cause}; its log is {loss.log_path}",
            log_path=loss.log_path,
            log_tail=loss.log_tail,
        )
        member.failure.__cause__ = loss.error
        logger.error("worker=%s lost=%r", member.name, loss.cause)
        member.connection.fail_pending(member.failure)
        self._on_lost(member.failure)


async def _cancel_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
