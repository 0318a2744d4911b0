"""Rewards: async ones on the event loop, the others in processes that can be killed.

A thread cannot be stopped, so a reward that hangs, in a regular expression for example, would
hang its worker. Here it runs in a process of its own, and passing its time limit means SIGKILL.

    consumes     calls of `score`
    waits for    an idle process; then its reply, its end, or the time limit of the running call
    unblocked by the reward process, the kernel (end of file), or the event loop's clock

Each process runs one call at a time, so a call's time starts when it begins to execute. A process
that ends by itself is an infrastructure failure: its call runs once more on a fresh process. Only
a call that ends two processes is blamed on the reward.

A reward may declare what it means by taking long (`RewardDeclaration`): then the limit is one of
CPU seconds, and passing it is a verdict.
"""

from __future__ import annotations

import asyncio
import collections
import inspect
import logging
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from areal_sc.errors import RewardError, WorkerError, WorkerLost, WorkflowError
from areal_sc.workflows.base import DECLARATION, RewardFunction
from areal_sc.workflows.reference import reference_of
from areal_sc.workflows.reward_process import describe, finite_reward, pack, short_traceback
from areal_sc.workflows.running_process import (
    ProcessSource,
    RewardCall,
    RunningProcess,
    took_too_long,
)

log = logging.getLogger(__name__)

_MAX_FAILED_STARTS = 3


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
        self._processes: list[RunningProcess] = []
        self._waiting: collections.deque[RewardCall] = collections.deque()
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
        future = asyncio.get_running_loop().create_future()
        call = RewardCall(
            key, _name_of(reward), request, future, getattr(reward, DECLARATION, None)
        )
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
            process = RunningProcess(self)
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

    def note_failed_start(self, process: RunningProcess, error: WorkerError) -> None:
        """Gives up after several in a row, or at once where the fork server is gone."""
        self._processes.remove(process)
        self._num_failed_starts += 1
        log.warning("reward_process_failed_starts=%d: %s", self._num_failed_starts, error)
        if isinstance(error, WorkerLost) or self._num_failed_starts >= _MAX_FAILED_STARTS:
            self._give_up(error)
        self.dispatch()

    def note_ended(self, process: RunningProcess, interrupted: RewardCall | None) -> None:
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
                raise took_too_long(name, self.timeout_s) from error
            text = f"reward {name}: {describe(error)}\n{short_traceback(error)}"
            raise RewardError(text) from error


def _is_async(reward: Any) -> bool:
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(
        getattr(type(reward), "__call__", None)  # noqa: B004  # the method, not callable()
    )


def _name_of(reward: Any) -> str:
    return str(getattr(reward, "__qualname__", type(reward).__qualname__))
