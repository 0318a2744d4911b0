"""An asyncio loop whose clock jumps: hours of waiting pass in milliseconds, the same way each time.

When nothing is ready to run, the clock is set to the next timer. Real file descriptors are still
polled, without waiting for them, so code that needs an answer from another thread or process does
not belong on this loop.

The controllers can pause while the world around them goes on: see `VirtualTimeLoop.pause`.

A run that cannot go on, or goes on for too long, ends with `Stalled`: a deadlock of the code under
test shows as an error, never as a hang.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

MAX_VIRTUAL_S = 1e6
MAX_TURNS = 2_000_000
"""Turns of the loop; one that is never idle does not move the clock."""


IS_PAUSABLE: ContextVar[bool] = ContextVar("is_pausable", default=False)
"""Set in the tasks of the controllers; a `Context()` is that of the world around them."""


class Stalled(BaseException):
    """Nothing will ever happen again, or too much has. No code under test catches it."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Time starts at 0 and passes only by waiting for it.

    Attributes:
        paused_until_s: the controllers stand still until then, in time of the world.

    Args:
        max_virtual_s: clock time after which the run counts as stalled.
        max_turns: turns after which it does.
    """

    def __init__(self, max_virtual_s: float = MAX_VIRTUAL_S, max_turns: int = MAX_TURNS) -> None:
        self.paused_until_s = 0.0
        self._now_s = 0.0
        self._paused_s = 0.0
        self._max_virtual_s = max_virtual_s
        self._max_turns = max_turns
        self._num_turns = 0
        self._is_stalled = False
        super().__init__(_ImpatientSelector(self._pass_time))

    def time(self) -> float:
        """Without their pauses, for the controllers; see `PausableLoop`."""
        if IS_PAUSABLE.get():
            return max(self._now_s, self.paused_until_s) - self._paused_s
        return self._now_s

    @property
    def world_s(self) -> float:
        """Time that passes also during a pause."""
        return self._now_s

    def pause(self, duration_s: float) -> None:
        """The controllers stand still: their timers are late, their clock is not."""
        self.paused_until_s = max(self._now_s, self.paused_until_s) + duration_s
        self._paused_s += duration_s
        for timer in self._scheduled:  # type: ignore[attr-defined]
            if timer._context.get(IS_PAUSABLE, False):
                timer._when += duration_s
        heapq.heapify(self._scheduled)  # type: ignore[attr-defined]

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        paused_s = self._paused_s if IS_PAUSABLE.get() else 0.0
        return super().call_at(when + paused_s, callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        is_pausable = IS_PAUSABLE.get() if context is None else context.get(IS_PAUSABLE, False)
        start_s = max(self._now_s, self.paused_until_s) if is_pausable else self._now_s
        return super().call_at(start_s + delay, callback, *args, context=context)

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
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(max_virtual_s, max_turns)) as runner:
        return runner.run(coroutine)
