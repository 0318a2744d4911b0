"""The workers of one role, as their controller sees them: launch, liveness, calls.

consumes     replies of the workers, their heartbeats, the ends of their processes
waits for    the reply of each call
unblocked by that reply, the call's deadline, or the loss of the worker: every call in flight to it
             fails at once with `WorkerLost`, and so does every later one

lost         a worker whose process ended (one poll for all), or that `Heartbeats` gives up. A
             connection that ends is made again, and its calls are repeated under their ids
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from areal_sc.config.schema import SchedulerConfig
from areal_sc.controller.heartbeats import Heartbeats
from areal_sc.controller.runtime import Runtime
from areal_sc.errors import ArealError, WorkerLost
from areal_sc.schedulers.base import LaunchRequest, RunningWorker, Scheduler, log_tail
from areal_sc.transport.rpc.method import A, Method, R
from areal_sc.transport.rpc.transport import Connection
from areal_sc.workers.calls import SHUTDOWN

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.25


@dataclass
class Member:
    """One worker of the fleet.

    Attributes:
        failure: why the worker is lost, once it is.
    """

    worker: RunningWorker
    connection: Connection
    failure: WorkerLost | None = None

    @property
    def name(self) -> str:
        return self.worker.name

    @property
    def node(self) -> tuple[str, str]:
        """(node_id, node_addr), as shards name their owner."""
        return self.worker.name, self.worker.report.address


class Fleet:
    """Launches, watches and calls the workers of one role."""

    def __init__(
        self, scheduler: Scheduler, runtime: Runtime, on_lost: Callable[[WorkerLost], None]
    ) -> None:
        self._scheduler = scheduler
        self._runtime = runtime
        self._on_lost = on_lost
        self._heartbeats = Heartbeats(runtime.transport, scheduler.config, self._lose_named)
        self._watches: list[asyncio.Task[None]] = []
        self._watch_error: Exception | None = None
        self._by_name: dict[str, Member] = {}
        self.members: list[Member] = []

    @property
    def config(self) -> SchedulerConfig:
        return self._scheduler.config

    @property
    def num_bytes(self) -> int:
        """Bytes sent and received on all control and heartbeat sockets of the fleet."""
        controls = (m.connection.bytes_sent + m.connection.bytes_received for m in self.members)
        return sum(controls) + self._heartbeats.num_bytes

    async def launch(self, requests: Sequence[LaunchRequest]) -> None:
        """Starts all workers concurrently, and watches each from then on.

        Raises: WorkerStartError: one did not come up; the others are stopped.
        """
        self._watches = [
            asyncio.create_task(self._guard(self._heartbeats.run()), name="heartbeats"),
            asyncio.create_task(self._guard(self._watch_processes()), name="ends of processes"),
        ]
        launches = [asyncio.create_task(self._launch(request)) for request in requests]
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            undo.push_async_callback(_cancel_all, launches)
            await asyncio.gather(*launches)
            undo.pop_all()
        self.members.sort(key=lambda member: member.worker.spec.index)

    async def _launch(self, request: LaunchRequest) -> None:
        worker = await self._scheduler.launch(request)
        connection = self._runtime.transport.connect(
            worker.report.address, worker.name, worker.spec.incarnation, keeps_trying=True
        )
        member = self._by_name[worker.name] = Member(worker, connection)
        self.members.append(member)
        self._heartbeats.watch(worker)
        if self._watch_error is not None:
            self._lose_unwatched(member, self._watch_error)

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
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await self._heartbeats.close()
        alive = [member for member in self.members if not member.failure]
        await asyncio.gather(
            *(self.call(member, SHUTDOWN, None) for member in alive),
            return_exceptions=True,  # a worker that does not answer is ended below
        )
        await self._scheduler.stop([member.worker for member in self.members])
        for member in self.members:
            await member.connection.close()
        self.members.clear()
        self._by_name.clear()

    async def _guard(self, watch: Coroutine[Any, Any, None]) -> None:
        try:
            await watch
        except Exception as error:  # the task's end: nobody awaits it, so the members' callers hear
            logger.exception("the watch over the workers failed")
            self._watch_error = error
            for member in self.members:
                self._lose_unwatched(member, error)

    async def _watch_processes(self) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            members = [member for member in self.members if not member.failure]
            if not members:
                continue
            try:
                ended = await self._scheduler.exit_statuses([m.worker for m in members])
                causes = {name: f"{name} ended with {status}" for name, status in ended.items()}
            except ArealError as error:
                causes = {m.name: f"{m.name} cannot be watched: {error}" for m in members}
            for name, cause in causes.items():
                self._lose_named(name, cause)

    def _lose_named(self, name: str, cause: str) -> None:
        member = self._by_name.get(name)
        if member is not None:
            self._lose(member, cause)

    def _lose_unwatched(self, member: Member, error: Exception) -> None:
        self._lose(member, f"{member.name} cannot be watched any more: {error!r}", error)

    def _lose(self, member: Member, cause: str, error: Exception | None = None) -> None:
        if member.failure:
            return
        self._heartbeats.forget(member.worker)
        log_path = member.worker.spec.log_path
        member.failure = WorkerLost(
            f"worker {cause}; its log is {log_path}",
            log_path=str(log_path),
            log_tail=log_tail(log_path),
        )
        member.failure.__cause__ = error
        logger.error("worker=%s lost=%r", member.name, cause)
        member.connection.fail_pending(member.failure)
        self._on_lost(member.failure)


async def _cancel_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
