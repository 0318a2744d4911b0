"""The workers of one role, as their controller sees them: launch, liveness, calls.

heartbeat   every `heartbeat_interval_s` a ping renews the worker's lease on life and tells
            that it answers; between two pings its process is polled.
lost        a worker whose process ended, or that missed `MAX_MISSED_PINGS` pings. Every call
            in flight to it fails at once with `WorkerLost`, and so does every later one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_sc.config.schema import SchedulerConfig
from areal_sc.controller.runtime import Runtime
from areal_sc.errors import ArealError, PeerLost, RpcTimeout, TransportError, WorkerLost
from areal_sc.schedulers.base import LaunchRequest, RunningWorker, Scheduler, log_tail
from areal_sc.transport.rpc import Connection

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.25
MAX_MISSED_PINGS = 5
EXIT_NOTICE_S = 2.0
"""How long after a closed connection the process's exit, which says why, is waited for."""


@dataclass
class Member:
    """One worker of the fleet.

    Attributes:
        failure: why the worker is lost, once it is.
        lost: set together with `failure`.
    """

    worker: RunningWorker
    connection: Connection
    failure: WorkerLost | None = None
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    heartbeat: asyncio.Task[None] | None = field(default=None, repr=False)

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
        self.members: list[Member] = []

    @property
    def config(self) -> SchedulerConfig:
        return self._scheduler.config

    @property
    def num_bytes(self) -> int:
        """Bytes sent and received on all control sockets of the fleet."""
        return sum(m.connection.bytes_sent + m.connection.bytes_received for m in self.members)

    async def launch(self, requests: Sequence[LaunchRequest]) -> None:
        """Starts all workers concurrently and begins their heartbeats.

        Raises: WorkerStartError: one did not come up; the others are stopped.
        """
        launches = [asyncio.create_task(self._launch(request)) for request in requests]
        try:
            await asyncio.gather(*launches)
        except BaseException:
            for launch in launches:
                launch.cancel()
            await asyncio.gather(*launches, return_exceptions=True)
            await self.close()
            raise
        self.members.sort(key=lambda member: member.worker.spec.index)

    async def _launch(self, request: LaunchRequest) -> None:
        worker = await self._scheduler.launch(request)
        connection = self._runtime.transport.connect(
            worker.report.address, worker.name, worker.spec.incarnation
        )
        member = Member(worker, connection)
        member.heartbeat = asyncio.create_task(self._watch(member), name=f"heartbeat {worker.name}")
        self.members.append(member)

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
        try:
            return await member.connection.call(method, args, timeout_s=timeout_s)
        except PeerLost as error:
            if await self._answers(member):
                raise  # it is another peer that the worker lost
            # the socket notices first; the process's exit, which says why, follows
            await self._wait_for_exit(member, error)
            raise (member.failure or error) from None

    async def call_all(
        self, method: str, args: Sequence[dict[str, Any]], *, timeout_s: float | None = None
    ) -> list[Any]:
        """Replies of all workers, in order of their index; the first error cancels the others."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self.call(member, method, arg, timeout_s=timeout_s))
                    for member, arg in zip(self.members, args, strict=True)
                ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def close(self) -> None:
        """Asks the workers to end, ends those that do not, and closes the connections."""
        heartbeats = [member.heartbeat for member in self.members if member.heartbeat]
        for heartbeat in heartbeats:
            heartbeat.cancel()
        await asyncio.gather(*heartbeats, return_exceptions=True)  # a loss is the member's already
        alive = [member for member in self.members if not member.failure]
        await asyncio.gather(
            *(member.connection.call("shutdown", {}, timeout_s=2.0) for member in alive),
            return_exceptions=True,  # a worker that does not answer is ended below
        )
        await self._scheduler.stop([member.worker for member in self.members])
        for member in self.members:
            await member.connection.close()
        self.members.clear()

    async def _watch(self, member: Member) -> None:
        try:
            await self._watch_until_lost(member)
        except ArealError as error:
            self._lose(member, f"{member.name} cannot be watched: {error}")

    async def _watch_until_lost(self, member: Member) -> None:
        loop = asyncio.get_running_loop()
        missed = 0
        next_ping = loop.time()
        while True:
            status = await self._scheduler.exit_status(member.worker)
            if status:
                self._lose(member, f"{member.name} ended with {status}")
                return
            if loop.time() >= next_ping:
                next_ping = loop.time() + self.config.heartbeat_interval_s
                try:
                    await member.connection.call(
                        "ping", {}, timeout_s=self.config.heartbeat_interval_s
                    )
                    missed = 0
                except RpcTimeout:
                    missed += 1
                    logger.warning("worker=%s missed_pings=%d", member.name, missed)
                except TransportError as error:
                    missed += 1
                    logger.warning("worker=%s ping_failed=%r", member.name, error)
                if missed >= MAX_MISSED_PINGS:
                    self._lose(
                        member,
                        f"{member.name} missed {missed} heartbeats of "
                        f"{self.config.heartbeat_interval_s:g} s",
                    )
                    return
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _answers(self, member: Member) -> bool:
        if member.failure:
            return False
        try:
            await member.connection.call("ping", {}, timeout_s=self.config.heartbeat_interval_s)
        except TransportError:
            return False
        return True

    def _lose(self, member: Member, cause: str) -> None:
        if member.failure:
            return
        log_path = member.worker.spec.log_path
        member.failure = WorkerLost(
            f"worker {cause}; its log is {log_path}",
            log_path=str(log_path),
            log_tail=log_tail(log_path),
        )
        member.lost.set()
        logger.error("worker=%s lost=%r", member.name, cause)
        member.connection.fail_pending(member.failure)
        self._on_lost(member.failure)

    async def _wait_for_exit(self, member: Member, error: PeerLost) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_NOTICE_S):
                await member.lost.wait()
        if not member.failure:
            self._lose(member, f"{member.name} closed its connection ({error})")
