"""The event loop that the controllers of a script share.

It runs in a thread of its own, so admission, heartbeats and weight updates go on while the user's
script computes, sleeps, or waits in another call. Its clock stands still while it cannot turn.

A script can be stopped (SIGSTOP, Ctrl-Z, a debugger), or hold the interpreter's lock in C code of
its user. Replies and heartbeats then lie unread in the sockets, and every time limit of the
controllers would blame the workers for it. So all of them count the time of this loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Protocol, TypeVar

from areal_sc.errors import RunFolderError, WorkerError
from areal_sc.system import interrupts

T = TypeVar("T")

JOIN_TIMEOUT_S = 30.0
SIGNAL_CHECK_S = 0.5


class LosesWorkers(Protocol):
    """A controller, as its loop sees it; `worker_lost` as there."""

    @property
    def worker_lost(self) -> WorkerError | RunFolderError | None: ...


class ControlLoop:
    """Runs coroutines of the controllers; `run` blocks the calling thread until one is done.

    Args:
        controllers: those whose given up workers end a call of any of them.

    Attributes:
        takes_over: workers of an earlier start go on; as given.
    """

    def __init__(
        self, controllers: Sequence[LosesWorkers] = (), *, takes_over: bool = False
    ) -> None:
        self._controllers = controllers
        self.takes_over = takes_over
        self._loop = PausableLoop()
        self._thread = threading.Thread(
            target=self._run_loop, name="areal-controllers", daemon=True
        )
        self._thread.start()

    def _run_loop(self) -> None:
        """A SystemExit of the user's code, a scheduler say, is its caller's, not the loop's end."""
        is_running = True
        while is_running:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()
                is_running = False

    def run(self, coroutine: Coroutine[Any, Any, T], *, needs_all_workers: bool = False) -> T:
        """Result of the coroutine. Ctrl-C in the calling thread cancels it, and lets it unwind.

        Args:
            coroutine: what to run.
            needs_all_workers: a worker of any controller that is given up ends the call too: what
                it waits for may depend on that worker without a call to it.
        Raises: WorkerError: such a worker's end. What the coroutine raises.
        """
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(coroutine))
            tasks[0].add_done_callback(lambda task: _copy_outcome(task, outcome))

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        try:
            # within: from here on a Ctrl-C has something to cancel
            self._loop.call_soon_threadsafe(begin)
            while not outcome.done():
                # Bounded, so that a signal is seen although another thread received it.
                concurrent.futures.wait([outcome], timeout=SIGNAL_CHECK_S)
                loss = self.worker_lost() if needs_all_workers else None
                if loss is not None and not outcome.done():
                    raise loss
        finally:
            if not outcome.done():
                with interrupts.deferred():
                    self._loop.call_soon_threadsafe(cancel)
                    concurrent.futures.wait([outcome], timeout=JOIN_TIMEOUT_S)
        return outcome.result()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Runs the coroutine beside whatever comes next."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def is_running_here(self) -> bool:
        """Whether the calling coroutine runs on this loop."""
        return asyncio.get_running_loop() is self._loop

    def worker_lost(self) -> WorkerError | RunFolderError | None:
        """Why the run cannot go on, as the first controller says that knows it."""
        losses = (controller.worker_lost for controller in self._controllers)
        return next((loss for loss in losses if loss is not None), None)

    def close(self) -> None:
        """Cancels what is left on the loop, stops it and joins its thread."""
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _copy_outcome(task: asyncio.Task[T], outcome: concurrent.futures.Future[T]) -> None:
    error = asyncio.CancelledError() if task.cancelled() else task.exception()
    if error is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


MAX_GAP_S: Final = 0.25
"""At most this much of the time between two looks at the clock counts."""

MAX_SELECT_S: Final = 0.1
"""An idle loop looks at the clock at least this often, so that all of its idle time counts."""


class PausableLoop(asyncio.SelectorEventLoop):
    """A loop whose time passes only while it turns.

    Args:
        clock: seconds that also pass during a pause.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_s = clock()
        self._paused_s = 0.0
        super().__init__(_ShortSelector())

    def time(self) -> float:
        """Seconds, without those of pauses."""
        now_s = self._clock()
        self._paused_s += max(0.0, now_s - self._looked_s - MAX_GAP_S)
        self._looked_s = now_s
        return now_s - self._paused_s


class _ShortSelector(selectors.DefaultSelector):
    """Never waits for long."""

    def select(self, timeout: float | None = None) -> Any:
        return super().select(MAX_SELECT_S if timeout is None else min(timeout, MAX_SELECT_S))
