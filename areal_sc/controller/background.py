"""What a controller's concurrent work shares: its tasks, one signal of change, the first failure.

waits for    `wait` returns at the next `notify`, whatever changed; the caller looks again
unblocked by every change of the controller's state, and the end of every task
bounded by   `limit_s`, unless others let the run wait; what is waited for is in the message
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

from areal_sc.errors import ArealError, StepLost, WaitTimeout
from areal_sc.run.run_status import PAUSE_END, SCRIPT, PauseWish, Wait
from areal_sc.system.waiting import cancel_all, first_of

logger = logging.getLogger(__name__)

T = TypeVar("T")


LOOK_S: Final = 0.1
"""Between two looks at whether the pause is over."""


class Standstill:
    """A pause, as one controller knows it: a person wants the run to stand still between two steps.

    consumes     wishes, which `StatusBoard` hears; see `RunWishes`
    waits for    the end of the pause, wherever a step of the script begins
    unblocked by that, and by a script that is to end, or to be saved, meanwhile

    No episode begins, and none is interrupted: those that run end, as does the step in progress.
    So nothing is computed then, and no time limit but that of waiting for a batch has to stand
    still.

    Attributes:
        wish: None: it is not.
        held_s: seconds that calls of the script were held so far.
        is_held: one is held now.
        is_left: whether the script has to do something else than the next step.
    """

    def __init__(self) -> None:
        self.wish: PauseWish | None = None
        self.held_s = 0.0
        self.is_held = False
        self.is_left: Callable[[], bool] = lambda: False

    @property
    def is_on(self) -> bool:
        return self.wish is not None

    async def hold(self, check: Callable[[], None] = lambda: None) -> None:
        """Returns when the pause is over, at once if there is none.

        Args:
            check: raises what is to end the wait.
        Raises: StepLost: the script `is_left`; its step has not begun.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            self.is_held = self.is_on
            await self.end(check)
        finally:
            if self.is_held:
                self.is_held = False
                self.held_s += loop.time() - began_s

    async def end(self, check: Callable[[], None]) -> None:
        """Waits as `hold` does, in a call that is no step: nothing tells that it is held."""
        # a wish is heard rarely, and an end of the script anywhere: there is no event for both
        while self.is_on:
            check()
            if self.is_left():
                raise StepLost("the run is paused, and the script is to end or to be saved")
            await asyncio.sleep(LOOK_S)


class Background:
    """Holds the tasks that nobody awaits; whoever waits next raises the first failure.

    Args:
        limit_s: without any change for so long a wait ends with WaitTimeout.
        describe: state of the controller, for that error's message.
        is_held_up: whether the next change may take as long as it likes.
        standstill: of the run; while it is paused no wait is too long.

    Attributes:
        is_closing: `close` ends the tasks, and with them the controller.
    """

    def __init__(
        self,
        limit_s: float,
        describe: Callable[[], str],
        is_held_up: Callable[[], bool] = lambda: False,
        standstill: Standstill | None = None,
    ) -> None:
        self.is_closing = False
        self.standstill = standstill or Standstill()
        self._limit_s = limit_s
        self._describe = describe
        self._is_held_up = is_held_up
        self._waits: dict[asyncio.Task[Any] | None, tuple[str, float]] = {}
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def notify(self) -> None:
        """Something changed: everyone who waits looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def fail(self, error: Exception) -> None:
        """Every later `raise_failure` raises the first error given here."""
        if self._failure is None:
            self._failure = error
        self.notify()

    def raise_failure(self) -> None:
        if self._failure:
            raise self._failure

    async def wait(self, what: str) -> None:
        """Waits for the next change.

        Raises: WaitTimeout: there was none; names `what`.
        """
        with self._waiting(what):
            while not await self._changes():
                if not (self.standstill.is_on or self._is_held_up()):
                    raise WaitTimeout(
                        f"waited {self._limit_s:g} s without any change for {what}; "
                        f"{self._describe()}"
                    )

    async def wait_for_pause_end(self) -> None:
        """Returns when the run's pause is over; a failure of background work ends the wait.

        Raises: StepLost: as `Standstill.hold`.
        """
        self.raise_failure()
        with self._waiting(PAUSE_END):
            await self.standstill.end(self.raise_failure)

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """The current task waits for it, as people are told."""
        waiter = asyncio.current_task()
        self._waits[waiter] = what, time.time()
        try:
            yield
        finally:
            del self._waits[waiter]

    async def _changes(self) -> bool:
        """Whether anything does so within the limit."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limit_s):
                return await self._changed.wait()
        return False

    def waits(self) -> list[Wait]:
        """What is waited for now: by the script's call, then by this work, equal ones together."""
        counts, since = Counter[tuple[bool, str]](), dict[tuple[bool, str], float]()
        for waiter, (what, began) in self._waits.items():
            key = waiter in self._tasks, what
            counts[key] += 1
            since[key] = min(began, since.get(key, began))
        return [
            Wait(f"{counts[key]} in the background" if key[0] else SCRIPT, key[1], since[key])
            for key in sorted(since)
        ]

    async def wait_until(self, is_done: Callable[[], bool], what: str) -> None:
        """Waits until the condition holds; a failure of background work ends the wait."""
        self.raise_failure()
        while not is_done():
            await self.wait(what)
            self.raise_failure()

    async def unless_failed(self, work: asyncio.Future[T]) -> T:
        """Result of other work; a failure of background work ends the wait for it."""
        while not work.done():
            self.raise_failure()
            await first_of(asyncio.wait([work]), self._changed.wait())
        return work.result()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs background work in a task; its exception becomes the failure."""
        task = self.hold(work, name)
        task.add_done_callback(self._note_end)
        return task

    def hold(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Runs work whose outcome somebody else looks at; `close` ends it."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Ends all tasks, those included that others begin while they end."""
        self.is_closing = True
        try:
            while self._tasks:
                await cancel_all(self._tasks)
        finally:
            self.is_closing = False

    def _note_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            if not isinstance(error, ArealError):
                logger.error("background work failed", exc_info=error)
            self.fail(error)
        self.notify()
