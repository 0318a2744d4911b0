"""An asyncio loop whose clock jumps: hours of waiting pass in milliseconds, the same way each time.

When nothing is ready to run, the clock is set to the next timer. Real file descriptors are still
polled, without waiting for them, so code that needs an answer from another thread or process does
not belong on this loop.

A process can pause, or die, while the world around it goes on: see `VirtualTimeLoop.pause`.

A run that cannot go on, or goes on for too long, ends with `Stalled`: a deadlock of the code under
test shows as an error, never as a hang.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from simulation.process import PROCESS, Process, Remains, Steps

P = ParamSpec("P")
T = TypeVar("T")

MAX_VIRTUAL_S = 1e6
MAX_TURNS = 2_000_000
"""Turns of the loop; one that is never idle does not move the clock."""


class Stalled(BaseException):
    """Nothing will ever happen again, or too much has. No code under test catches it."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Time starts at 0 and passes only by waiting for it.

    Attributes:
        remains: of dead processes.

    Args:
        max_virtual_s: clock time after which the run counts as stalled.
        max_turns: turns after which it does.
    """

    def __init__(self, max_virtual_s: float = MAX_VIRTUAL_S, max_turns: int = MAX_TURNS) -> None:
        self.remains = Remains()
        self._now_s = 0.0
        self._process_of: WeakKeyDictionary[asyncio.Task[Any], Process] = WeakKeyDictionary()
        self._max_virtual_s = max_virtual_s
        self._max_turns = max_turns
        self._num_turns = 0
        self._is_stalled = False
        super().__init__(_ImpatientSelector(self._pass_time))

    def time(self) -> float:
        """For a process without its pauses; see `PausableLoop`."""
        process = PROCESS.get()
        return self._now_s if process is None else self._start_s(process) - process.paused_s

    @property
    def world_s(self) -> float:
        """Time that passes also during a pause."""
        return self._now_s

    def pause(self, process: Process, duration_s: float) -> None:
        """The process stands still: its timers are late, its clock is not."""
        process.paused_until_s = self._start_s(process) + duration_s
        process.paused_s += duration_s
        for timer in self._scheduled:  # type: ignore[attr-defined]
            if timer._context.get(PROCESS) is process:
                timer._when += duration_s
        heapq.heapify(self._scheduled)  # type: ignore[attr-defined]

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is None:
            return super().create_task(coro, name=name, context=context)
        task = super().create_task(Steps(process, coro, self.remains), name=name, context=context)
        self._process_of[task] = process
        if process.is_dead:
            coro.close()
            task._log_destroy_pending = False
        return task

    def process_of(self, task: asyncio.Task[Any]) -> Process | None:
        """Whose task it is; None: the world's."""
        return self._process_of.get(task)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        process = PROCESS.get()
        paused_s = 0.0 if process is None else process.paused_s
        return super().call_at(when + paused_s, callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        process = PROCESS.get() if context is None else context.get(PROCESS)
        return super().call_at(self._start_s(process) + delay, callback, *args, context=context)

    def _start_s(self, process: Process | None) -> float:
        """When the process does next what it does now, in time of the world."""
        return self._now_s if process is None else max(self._now_s, process.paused_until_s)

    def _pass_time(self, timeout_s: float | None) -> None:
        self._num_turns += 1
        if self._is_stalled and self._num_turns < 2 * self._max_turns:
            self._now_s += timeout_s or 0.0
            return  # the clean-up after `Stalled` may take its turns
        if timeout_s is None:
            self._stall("nothing is ready and no timer is set: everybody waits for somebody")
            return
        self._now_s += timeout_s
        if self._now_s > self._max_virtual_s:
            self._stall(f"the clock has passed {self._max_virtual_s:g} s")
        if self._num_turns > self._max_turns:
            self._stall(f"{self._max_turns} turns at {self._now_s:g} s")

    def _stall(self, reason: str) -> None:
        self._is_stalled = True
        waiting = sorted(task.get_name() for task in asyncio.all_tasks(self) if not task.done())
        raise Stalled(f"{reason}; tasks: {', '.join(waiting[:20])}")


class _ImpatientSelector(selectors.DefaultSelector):
    """Hands what `select` would wait to the clock, and looks once."""

    def __init__(self, pass_time: Callable[[float | None], None]) -> None:
        super().__init__()
        self._pass_time = pass_time

    def select(self, timeout: float | None = None) -> Any:
        self._pass_time(timeout)
        return super().select(0)


def run_virtual(
    coroutine: Coroutine[Any, Any, T],
    *,
    max_virtual_s: float = MAX_VIRTUAL_S,
    max_turns: int = MAX_TURNS,
) -> T:
    """Runs a coroutine to its end in virtual time.

    Raises: Stalled: it waits for what never comes.
    """

    async def play() -> T:
        try:
            return await coroutine
        finally:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualTimeLoop)
            loop.remains.is_ending = True

    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(max_virtual_s, max_turns)) as runner:
        return runner.run(play())


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that is played on a loop of its own, as by `run_virtual`."""

    @functools.wraps(test)
    def play(*args: P.args, **kwargs: P.kwargs) -> None:
        run_virtual(test(*args, **kwargs))

    return play
