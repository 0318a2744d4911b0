"""Rewards: async ones on the event loop, the others in processes that can be killed.

A thread cannot be stopped, so a reward that hangs, in a regular expression for example, would
hang its worker. Here it runs in a process of its own, and passing its time limit means SIGKILL.

    consumes     calls of `score`
    waits for    an idle process; then its reply, its end, or the time limit of the running call
    unblocked by the reward process, the kernel (end of file), or the event loop's clock

Each process runs one call at a time, so a call's time starts when it begins to execute. A process
that ends by itself is an infrastructure failure: its call runs once more on a fresh process. Only
a call that ends two processes is blamed on the reward.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import inspect
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from areal_sc.errors import RewardError, WorkerError, WorkerLost, WorkerStartError, WorkflowError
from areal_sc.workflows.base import RewardFunction
from areal_sc.workflows.reference import reference_of
from areal_sc.workflows.reward_process import (
    describe,
    finite_reward,
    make_unpacker,
    pack,
    short_traceback,
)

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 120.0
"""Bound of importing the user's module, which is no part of a call's time."""

START_TIMEOUT_S = 60.0
_MAX_ATTEMPTS = 2
_MAX_FAILED_STARTS = 3
_EXIT_WAIT_S = 2.0


class ProcessSource(Protocol):
    """Where processes come from; `ForkServerClient` is one. Blocking, bounded, thread-safe."""

    def spawn(
        self, entry: str, spec: Mapping[str, Any], log_path: Path | str, *, fds: Sequence[int]
    ) -> int: ...

    def kill(self, pid: int, signum: int) -> bool: ...

    def wait(self, pid: int, timeout_s: float) -> int | None: ...


class RewardPool:
    """Scores completions with the user's functions.

    Args:
        processes: forks the reward processes.
        num_processes: how many sync rewards run at a time.
        timeout_s: limit of one call, from the moment it begins to execute; of async rewards too.
        log_path: file that the reward processes' own output is appended to.
    """

    def __init__(
        self,
        processes: ProcessSource,
        *,
        num_processes: int,
        timeout_s: float,
        log_path: Path | str,
    ) -> None:
        if num_processes < 1 or timeout_s <= 0:
            raise ValueError(
                f"expected num_processes >= 1 and timeout_s > 0, got {num_processes}, {timeout_s}"
            )
        self.source = processes
        self.timeout_s = timeout_s
        self.log_path = log_path
        self.references: list[dict[str, Any]] = []
        self._num_processes = num_processes
        self._processes: list[_RewardProcess] = []
        self._waiting: collections.deque[_Call] = collections.deque()
        self._keys: dict[int, int] = {}
        self._rewards: list[RewardFunction] = []  # keeps the ids in `_keys` from being reused
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_failed_starts = 0
        self._broken: WorkerError | None = None

    async def score(
        self, reward: RewardFunction, prompt: Mapping[str, Any], completion: str, **extra: Any
    ) -> float:
        """The reward's finite number.

        Raises:
            RewardError: it raised, returned no finite number, passed its time limit, or ended two
                processes.
            WorkflowError: the function or its arguments cannot be given to another process.
            WorkerError: reward processes cannot be had; says nothing about the completion.
        """
        if _is_async(reward):
            return await self._score_on_loop(reward, prompt, completion, extra)
        if self._broken is not None:
            raise self._broken
        key = self._key_of(reward)
        try:
            request = pack(["call", key, dict(prompt), completion, extra])
        except (TypeError, ValueError, OverflowError) as error:
            raise WorkflowError(
                f"reward {_name_of(reward)}: its prompt or arguments cannot be given to a reward "
                f"process: {error}; use numbers, strings, lists and dicts"
            ) from error
        call = _Call(key, _name_of(reward), request, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self.dispatch()
        return await call.future

    async def close(self) -> None:
        """Kills all processes; calls that still run end with WorkerLost. Bounded."""
        self._give_up(WorkerLost("the reward pool was closed"))
        for process in list(self._processes):
            process.abandon(self._broken)
        while self._tasks:  # each is bounded, and only a start that still runs adds another
            await asyncio.wait(self._tasks)

    def dispatch(self) -> None:
        """Gives waiting calls to idle processes, and starts processes for the others."""
        for process in self._processes:
            while self._waiting and self._waiting[0].future.done():
                self._waiting.popleft()  # the task that asked was cancelled
            if self._waiting and process.is_idle:
                process.run(self._waiting.popleft())
        num_starting = sum(not process.is_ready for process in self._processes)
        while len(self._processes) < self._num_processes and len(self._waiting) > num_starting:
            process = _RewardProcess(self)
            self._processes.append(process)
            self.create_task(process.start())
            num_starting += 1

    def create_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def note_started(self) -> None:
        self._num_failed_starts = 0
        self.dispatch()

    def note_failed_start(self, process: _RewardProcess, error: WorkerError) -> None:
        """Gives up after several in a row, or at once where the fork server is gone."""
        self._processes.remove(process)
        self._num_failed_starts += 1
        log.warning("reward_process_failed_starts=%d: %s", self._num_failed_starts, error)
        if isinstance(error, WorkerLost) or self._num_failed_starts >= _MAX_FAILED_STARTS:
            self._give_up(error)
        self.dispatch()

    def note_ended(self, process: _RewardProcess, interrupted: _Call | None) -> None:
        """A process is gone; the call that it ran, if any, goes first to the next one."""
        self._processes.remove(process)
        if interrupted is not None:
            self._waiting.appendleft(interrupted)
        if self._broken is not None:
            self._give_up(self._broken)
        self.dispatch()

    def _give_up(self, error: WorkerError) -> None:
        self._broken = self._broken or error
        while self._waiting:
            self._waiting.popleft().fail(error)

    def _key_of(self, reward: RewardFunction) -> int:
        if id(reward) not in self._keys:
            self.references.append(reference_of(reward).to_wire())
            self._rewards.append(reward)
            self._keys[id(reward)] = len(self.references) - 1
        return self._keys[id(reward)]

    async def _score_on_loop(
        self,
        reward: Callable[..., Any],
        prompt: Mapping[str, Any],
        completion: str,
        extra: Mapping[str, Any],
    ) -> float:
        name = _name_of(reward)
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                value = await reward(dict(prompt), completion, **extra)
            return finite_reward(value)
        except Exception as error:  # the user's code: whatever it raises is its answer
            if isinstance(error, TimeoutError) and limit.expired():
                raise _took_too_long(name, self.timeout_s) from error
            text = f"reward {name}: {describe(error)}\n{short_traceback(error)}"
            raise RewardError(text) from error


@dataclass
class _Call:
    """One call of a sync reward, from `score` until its future is done."""

    key: int
    name: str
    request: bytes
    future: asyncio.Future[float]
    num_attempts: int = 0

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class _RewardProcess(asyncio.Protocol):
    """One process of a pool: starting, then idle or running a call, then ended for good."""

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool
        self._pid: int | None = None
        self._transport: asyncio.Transport | None = None
        self._unpacker = make_unpacker()
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loaded: set[int] = set()
        self._call: _Call | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._has_ended = False

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
                self._pid = await asyncio.to_thread(
                    self._pool.source.spawn,
                    *("reward", {}, self._pool.log_path),
                    fds=[theirs.fileno()],
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

    def run(self, call: _Call) -> None:
        assert self.is_idle
        assert self._transport is not None
        self._call = call
        call.num_attempts += 1
        if call.key in self._loaded:
            self._send_call(call)
        else:
            self._set_timer(LOAD_TIMEOUT_S, "importing its module")
            self._transport.write(pack(["load", call.key, self._pool.references[call.key]]))

    def abandon(self, error: Exception | None) -> None:
        """Kills the process; its call, if it runs one, fails with `error`."""
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
            if not call.future.done():
                call.future.set_result(rest[0])
        else:
            what, remote_traceback = rest
            call.fail(RewardError(f"reward {call.name}: {what}\n{remote_traceback}"))
        self._pool.dispatch()

    def _send_call(self, call: _Call) -> None:
        assert self._transport is not None
        self._set_timer(self._pool.timeout_s, None)
        self._transport.write(call.request)

    def _set_timer(self, limit_s: float, doing: str | None) -> None:
        self._cancel_timer()
        self._timer = asyncio.get_running_loop().call_later(
            limit_s, self._on_timeout, limit_s, doing
        )

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self, limit_s: float, doing: str | None) -> None:
        assert self._call is not None
        log.warning("reward=%s pid=%s limit_s=%g killed", self._call.name, self._pid, limit_s)
        self.abandon(_took_too_long(self._call.name, limit_s, doing))

    def _end(self) -> _Call | None:
        """Leaves the pool's service; returns the call that was running."""
        self._has_ended = True
        self._cancel_timer()
        call, self._call = self._call, None
        return call

    async def _mourn(self, culprit: _Call | None) -> None:
        """Finds out how a process ended that nobody asked to end, and tells its culprit."""
        status = "unknown exit status"
        if self._pid is not None:
            with contextlib.suppress(WorkerError):
                returncode = await asyncio.to_thread(
                    self._pool.source.wait, self._pid, _EXIT_WAIT_S
                )
                status = _exit_text(returncode)
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
        if self._pid is None:
            return
        with contextlib.suppress(WorkerError):  # a dead fork server took its children along
            await asyncio.to_thread(self._pool.source.kill, self._pid, signal.SIGKILL)
            if await asyncio.to_thread(self._pool.source.wait, self._pid, _EXIT_WAIT_S) is None:
                log.error("reward_process pid=%d did not die of SIGKILL", self._pid)


def _is_async(reward: Any) -> bool:
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(
        getattr(type(reward), "__call__", None)  # noqa: B004  # the method, not callable()
    )


def _name_of(reward: Any) -> str:
    return str(getattr(reward, "__qualname__", type(reward).__qualname__))


def _took_too_long(name: str, limit_s: float, doing: str | None = None) -> RewardError:
    what = f"{doing} took" if doing else "took"
    return RewardError(
        f"reward {name}: {what} longer than {limit_s:g} s; make it faster, "
        "or raise rollout.reward_timeout_s"
    )


def _exit_text(returncode: int | None) -> str:
    if returncode is None:
        return "unknown exit status"
    if returncode >= 0:
        return f"exit code {returncode}"
    return f"signal {-returncode} ({signal.Signals(-returncode).name})"
