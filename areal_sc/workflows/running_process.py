"""One reward process, as the pool that started it sees it.

consumes     calls that the pool gives it, one at a time
waits for    the process's start; then its reply, its end, or the time limit of the call
unblocked by the process, the kernel (end of file), or the event loop's clock
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from areal_sc.errors import RewardError, WorkerError, WorkerStartError
from areal_sc.workflows.base import RewardDeclaration
from areal_sc.workflows.reward_process import make_unpacker, pack

if TYPE_CHECKING:
    from areal_sc.workflows.rewards import RewardPool

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 120.0
"""Bound of importing the user's module, which is no part of a call's time."""

START_TIMEOUT_S = 60.0
_MAX_ATTEMPTS = 2
_EXIT_WAIT_S = 2.0


class Forked(Protocol):
    """A process.

    Attributes:
        ended: done when it has ended.
        how: `exit code 1`, `signal 9 (SIGKILL)`, or `unknown exit status` while it runs.
    """

    pid: int
    ended: asyncio.Future[int]

    @property
    def how(self) -> str: ...


class ProcessSource(Protocol):
    """Where processes come from; `ForkServer` is one."""

    async def spawn(
        self, spec: Mapping[str, Any], log_path: Path | str, *, fds: Sequence[int]
    ) -> Forked: ...

    def kill(self, child: Any) -> None: ...


@dataclass
class RewardCall:
    """One call of a sync reward, from `score` until its future is done."""

    key: int
    name: str
    request: bytes
    future: asyncio.Future[float]
    declaration: RewardDeclaration | None
    num_attempts: int = 0

    def succeed(self, reward: float) -> None:
        if not self.future.done():
            self.future.set_result(reward)

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class RunningProcess(asyncio.Protocol):
    """One process of a pool: starting, then idle or running a call, then ended for good."""

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool
        self._child: Forked | None = None
        self._transport: asyncio.Transport | None = None
        self._unpacker = make_unpacker()
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loaded: set[int] = set()
        self._call: RewardCall | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0
        self._cpu_limit_s = 0.0
        self._has_ended = False

    @property
    def _pid(self) -> int | None:
        return self._child.pid if self._child else None

    @property
    def is_ready(self) -> bool:
        return self._started.done() and not self._has_ended

    @property
    def is_idle(self) -> bool:
        return self.is_ready and self._call is None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        mine, theirs = socket.socketpair()
        try:
            with theirs:
                self._child = await self._pool.source.spawn(
                    {}, self._pool.log_path, fds=[theirs.fileno()]
                )
            self._transport, _ = await loop.create_connection(lambda: self, sock=mine)
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._started
        except (WorkerError, TimeoutError) as error:
            if self._transport is None:
                mine.close()
            failure = (
                error
                if isinstance(error, WorkerError)
                else WorkerStartError(
                    f"a reward process was not ready within {START_TIMEOUT_S:g} s; "
                    f"see {self._pool.log_path}"
                )
            )
            if not self._has_ended:
                self._has_ended = True
                self._pool.note_failed_start(self, failure)
            await self._kill()
            return
        if self._has_ended:  # the pool was closed meanwhile
            await self._kill()
        else:
            self._pool.note_started()

    def run(self, call: RewardCall) -> None:
        assert self.is_idle
        assert self._transport is not None
        self._call = call
        call.num_attempts += 1
        if call.key in self._loaded:
            self._send_call(call)
        else:
            self._set_timer(LOAD_TIMEOUT_S, self._on_slow_load)
            self._transport.write(pack(["load", call.key, self._pool.references[call.key]]))

    def abandon(self, error: Exception | None) -> None:
        """Kills the process; its call, if it runs one that is not done, fails with `error`."""
        log.info("reward_process pid=%s killed: %s", self._pid, error)
        call = self._end()
        if call is not None and error is not None:
            call.fail(error)
        if self._started.done():  # otherwise `start` sees to it
            self._pool.create_task(self._kill())
        self._pool.note_ended(self, None)

    def data_received(self, received: bytes) -> None:
        self._unpacker.feed(received)
        for message in self._unpacker:
            if message[0] == "ready":
                if not self._started.done():  # its start may have been given up
                    self._started.set_result(None)
            elif not self._has_ended:
                self._on_reply(message)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._started.done():
            self._started.set_exception(
                WorkerStartError(f"a reward process ended at once; see {self._pool.log_path}")
            )
            return
        if self._has_ended:
            return
        call = self._end()
        is_to_blame = call is not None and call.num_attempts >= _MAX_ATTEMPTS
        self._pool.create_task(self._mourn(call if is_to_blame else None))
        self._pool.note_ended(self, None if is_to_blame else call)

    def _on_reply(self, message: list[Any]) -> None:
        kind, *rest = message
        call = self._call
        assert call is not None, message
        if kind == "loaded":
            self._loaded.add(call.key)
            self._send_call(call)
            return
        self._call = None
        self._cancel_timer()
        if kind == "value":
            call.succeed(rest[0])
        else:
            what, remote_traceback = rest
            call.fail(RewardError(f"reward {call.name}: {what}\n{remote_traceback}"))
        self._pool.dispatch()

    def _send_call(self, call: RewardCall) -> None:
        assert self._transport is not None
        timeout_s = self._pool.timeout_s
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        if call.declaration is not None:
            timeout_s = min(call.declaration.late_after_s, timeout_s / 2)
            self._cpu_limit_s = self._cpu_seconds() + timeout_s
        self._set_timer(timeout_s, self._on_slow_call)
        self._transport.write(call.request)

    def _set_timer(self, limit_s: float, on_timeout: Callable[[RewardCall], None]) -> None:
        self._cancel_timer()
        assert self._call is not None
        self._timer = asyncio.get_running_loop().call_later(limit_s, on_timeout, self._call)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_slow_load(self, call: RewardCall) -> None:
        self.abandon(took_too_long(call.name, LOAD_TIMEOUT_S, "importing its module "))

    def _on_slow_call(self, call: RewardCall) -> None:
        """A declared limit counts CPU seconds, because on a busy machine anything takes long."""
        remaining_s = self._deadline - asyncio.get_running_loop().time()
        if call.declaration is not None:
            cpu_remaining_s = self._cpu_limit_s - self._cpu_seconds()
            if cpu_remaining_s <= 0:
                call.succeed(call.declaration.late_reward)
            elif remaining_s > 0:
                self._set_timer(min(cpu_remaining_s, remaining_s), self._on_slow_call)
                return
        self.abandon(took_too_long(call.name, self._pool.timeout_s))

    def _cpu_seconds(self) -> float:
        """CPU seconds that the process has used; 0 if it is gone."""
        try:
            stat = Path(f"/proc/{self._pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return 0.0
        ticks = map(int, stat.rpartition(")")[2].split()[11:13])
        return sum(ticks) / os.sysconf("SC_CLK_TCK")

    def _end(self) -> RewardCall | None:
        """Leaves the pool's service; returns the call that was running."""
        self._has_ended = True
        self._cancel_timer()
        call, self._call = self._call, None
        return call

    async def _mourn(self, culprit: RewardCall | None) -> None:
        """Finds out how a process ended that nobody asked to end, and fails the call to blame."""
        status = "unknown exit status"
        if self._child is not None:
            await asyncio.wait([self._child.ended], timeout=_EXIT_WAIT_S)
            status = self._child.how
        log.warning("reward_process pid=%s ended by itself: %s", self._pid, status)
        if culprit is not None:
            culprit.fail(
                RewardError(
                    f"reward {culprit.name}: its process ended {culprit.num_attempts} times while "
                    f"it ran ({status}); see {self._pool.log_path}"
                )
            )

    async def _kill(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        if self._child is None:
            return
        self._pool.source.kill(self._child)
        await asyncio.wait([self._child.ended], timeout=_EXIT_WAIT_S)
        if not self._child.ended.done():
            log.error("reward_process pid=%d did not die of SIGKILL", self._child.pid)


def took_too_long(name: str, limit_s: float, doing: str = "") -> RewardError:
    return RewardError(
        f"reward {name}: {doing}took longer than {limit_s:g} s; make it faster, "
        "or raise rollout.reward_timeout_s"
    )
