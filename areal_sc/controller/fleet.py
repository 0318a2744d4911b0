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
from areal_sc.controller.node_watch import NodeWatch
from areal_sc.controller.runtime import Runtime
from areal_sc.errors import ArealError, TransportError, WorkerLost, WorkerStartError
from areal_sc.log import log_tail
from areal_sc.run_folder import RunFolder
from areal_sc.schedulers.base import LaunchRequest, Node, Scheduler, placed
from areal_sc.transport.rpc.method import A, Method, R
from areal_sc.transport.rpc.transport import Connection
from areal_sc.workers.calls import SHUTDOWN
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


class Fleet:
    """Launches, watches and calls the workers of one role."""

    def __init__(
        self, scheduler: Scheduler, runtime: Runtime, on_lost: Callable[[WorkerLost], None]
    ) -> None:
        self._scheduler = scheduler
        self._runtime = runtime
        self._on_lost = on_lost
        self._watches: dict[NodeWatch, asyncio.Task[None]] = {}
        self._by_name: dict[str, Member] = {}
        self.members: list[Member] = []

    @property
    def config(self) -> SchedulerConfig:
        return self._scheduler.config

    @property
    def num_bytes(self) -> int:
        """Bytes sent and received on all control sockets of the fleet, those of agents included."""
        connections = [member.connection for member in self.members]
        connections += [watch.agent for watch in self._watches]
        return sum(c.bytes_sent + c.bytes_received for c in connections)

    async def launch(self, requests: Sequence[LaunchRequest]) -> None:
        """Starts all workers, those of a node by one call, and watches each from then on.

        Raises: WorkerStartError: one did not come up; the others are stopped. ConfigError: there
            are not enough devices.
        """
        nodes = await self._scheduler.nodes()
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            watches = [self._watch(*part) for part in placed(requests, nodes).items() if part[1]]
            for number, watch in enumerate(watches, start=1):
                hold_s = self.config.heartbeat_interval_s * number / len(watches)
                self._watches[watch] = asyncio.create_task(watch.run(hold_s))
            launches = [asyncio.create_task(self._launch(watch)) for watch in watches]
            undo.push_async_callback(_cancel_all, launches)
            await asyncio.gather(*launches)
            undo.pop_all()
        self.members.sort(key=lambda member: member.index)

    def _watch(self, node: Node, workers: Sequence[tuple[LaunchRequest, list[int]]]) -> NodeWatch:
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
        return NodeWatch(node, orders, agent, self._scheduler, self._lose)

    async def _launch(self, watch: NodeWatch) -> None:
        timeout_s = self.config.startup_timeout_s
        try:
            launched = await watch.agent.call(
                LAUNCH, Launch(watch.orders, timeout_s), timeout_s=timeout_s + RPC_MARGIN_S
            )
        except TransportError as error:
            path = watch.node.log_path
            raise WorkerStartError(
                f"the agent of node {watch.node.name} started no workers: {error}; "
                f"its log is {path}",
                log_path=str(path),
                log_tail=log_tail(path),
            ) from error
        if launched.failure:
            raise WorkerStartError(
                launched.failure, log_path=launched.log_path, log_tail=launched.log_tail
            )
        folder = RunFolder(self.config.run_dir)
        for order, worker in zip(watch.orders, launched.workers, strict=True):
            connection = self._runtime.transport.connect(
                worker.address, worker.name, worker.incarnation, keeps_trying=True
            )
            member = Member(worker, order.index, connection)
            self._by_name[worker.name] = member
            self.members.append(member)
            watch.add(worker, folder.log_path(order.role, order.index))
            logger.info("worker=%s pid=%d address=%s", worker.name, worker.pid, worker.address)

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
        self, method: Method[A, R], args: Sequence[A], *, timeout_s: float | None = None
    ) -> list[R]:
        """Replies of all workers, in order of their index; the first error cancels the others.

        Args:
            args: of each worker's call, in the same order.
        Raises: as `call`.
        """
        for member in self.members:
            if member.failure:
                raise member.failure
        connections = [member.connection for member in self.members]
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

    def _deadline_s(self, method: Method[Any, Any]) -> float:
        declared_s = method.deadline_s
        return self.config.transport.call_timeout_s if declared_s is None else declared_s

    async def close(self) -> None:
        """Asks the workers to end, ends those that do not, and closes the connections."""
        await _cancel_all(list(self._watches.values()))
        alive = [member for member in self.members if not member.failure]
        await asyncio.gather(
            *(self.call(member, SHUTDOWN, None) for member in alive),
            return_exceptions=True,  # a worker that does not answer is ended below
        )
        await asyncio.gather(*(self._stop(watch) for watch in self._watches))
        for member in self.members:
            await member.connection.close()
        self._watches.clear()
        self.members.clear()
        self._by_name.clear()

    async def _stop(self, watch: NodeWatch) -> None:
        grace_s = self.config.shutdown_timeout_s / 2
        incarnations = [order.incarnation for order in watch.orders]
        try:
            await watch.agent.call(
                STOP, Stop(incarnations, grace_s), timeout_s=grace_s + RPC_MARGIN_S
            )
        except TransportError as error:  # its workers die with it, or of their orphan timeout
            logger.warning("node=%s its agent stopped no workers: %s", watch.node.name, error)
        await watch.agent.close()
        for order in watch.orders:
            watch.node.placement.release(order.name)

    def _lose(self, name: str, failure: WorkerLost) -> None:
        member = self._by_name[name]
        assert member.failure is None, failure
        member.failure = failure
        member.connection.fail_pending(failure)
        self._on_lost(failure)


async def _cancel_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
