"""Processes of the simulated world: their tasks pause, and die, together.

A task belongs to the process whose code has created it. One that is killed takes no step any more,
runs no `finally` and no `except`, as after SIGKILL; the memory that it leaves behind is cleared
away when the loop ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar
from typing import Any


class Killed(BaseException):
    """Ends the step at which a process dies in the middle of blocking work, such as a write."""


class Process:
    """One process, such as a life of the controllers or of a worker.

    Attributes:
        name: of the process, for messages.
        on_await: is called whenever a task of it goes on after an await; it may kill it.
        num_awaits: so many times, up to now.
        paused_until_s: it stands still until then, in time of the world.
        paused_s: it has stood still for so long, in all.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.on_await: Callable[[], None] = lambda: None
        self.num_awaits = 0
        self.paused_until_s = 0.0
        self.paused_s = 0.0
        self._died = asyncio.Event()

    @property
    def is_dead(self) -> bool:
        return self._died.is_set()

    def kill(self) -> None:
        """None of its tasks takes another step."""
        self._died.set()

    async def wait_for_death(self) -> None:
        await self._died.wait()

    def create_task(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """The first task of the process; those that it creates belong to it, too."""
        context = Context()
        context.run(PROCESS.set, self)
        return asyncio.get_running_loop().create_task(work, name=name, context=context)

    def note_await(self) -> None:
        if not self.is_dead:
            self.num_awaits += 1
            self.on_await()


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)
"""None: the world itself."""


class Remains:
    """What dead processes leave.

    Attributes:
        is_ending: the loop is about to end, and clears it away.
        tasks: those that stand still until then.
    """

    def __init__(self) -> None:
        self.is_ending = False
        self.tasks: list[asyncio.Task[Any] | None] = []


class Steps(Coroutine[Any, Any, Any]):
    """The work of one task of a process, step by step; a dead process takes none."""

    def __init__(self, process: Process, work: Coroutine[Any, Any, Any], remains: Remains) -> None:
        self._process = process
        self._work = work
        self._remains = remains
        self._has_begun = False

    def send(self, value: Any) -> Any:
        return self._step(self._work.send, value)

    def throw(self, *error: Any) -> Any:
        if self._process.is_dead and self._remains.is_ending:
            clear_away(self._work)
            raise asyncio.CancelledError
        return self._step(self._work.throw, *error)

    def close(self) -> None:
        clear_away(self._work)

    def __await__(self) -> Generator[Any, Any, Any]:
        raise NotImplementedError("it is the loop that takes the steps")

    def _step(self, step: Callable[..., Any], *args: Any) -> Any:
        if self._has_begun:
            self._process.note_await()
        self._has_begun = True
        if not self._process.is_dead:
            try:
                return step(*args)
            except Killed:
                pass
        return self._stand_still()

    def _stand_still(self) -> Any:
        """Whoever cancels it is not heard."""
        self._remains.tasks.append(asyncio.current_task())
        never: Any = asyncio.get_running_loop().create_future()
        never._asyncio_future_blocking = True  # as in `Future.__await__`
        return never


def clear_away(work: Coroutine[Any, Any, Any]) -> None:
    """Lets go of what a coroutine holds, however often its blocks await something at their end."""
    while True:
        try:
            work.close()
        except RuntimeError:  # it has awaited something
            continue
        except BaseException:  # what its blocks raise is nobody's any more
            return
        return
