"""The event loop that the controllers of a script share.

It runs in a thread of its own, so admission, heartbeats and weight updates go on while the user's
script computes, sleeps, or waits in another call. Time in which the loop cannot turn counts for no
time limit.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import sys
import threading
from collections.abc import Coroutine, Iterator, Sequence
from itertools import combinations
from typing import Any, TypeVar

from areal_sc import interrupts
from areal_sc.controller.base import Controller
from areal_sc.controller.pausable_loop import PausableLoop
from areal_sc.controller.takeover import TakenOver, can_take_over, take_over
from areal_sc.errors import (
    ConfigError,
    RunFolderError,
    TransportError,
    WaitTimeout,
    WorkerError,
)
from areal_sc.process import refuse_in_worker

T = TypeVar("T")

JOIN_TIMEOUT_S = 30.0
SIGNAL_CHECK_S = 0.5
CLOSE_TIMEOUT_S = 60.0
"""Controllers may take this long to end their workers; the scheduler then kills what is left."""

LOSS_NOTICE_S = 2.0
"""How long after a failed call the loss of the worker that explains it may be noticed."""


class ControlLoop:
    """Runs coroutines of the controllers; `run` blocks the calling thread until one is done.

    Args:
        controllers: those whose given up workers end a call of any of them.

    Attributes:
        takes_over: workers of an earlier start go on.
    """

    def __init__(self, controllers: Sequence[Controller] = ()) -> None:
        self._controllers = controllers
        self.takes_over = can_take_over(controllers)
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


@contextlib.contextmanager
def start(*controllers: Controller) -> Iterator[TakenOver | None]:
    """Starts the workers of all controllers, concurrently, and stops them at the end.

    Controllers whose engines measure the free memory of a GPU start when the others have started:
    these hold their memory by then, so what is measured does not depend on who was faster.

    Workers that an earlier start of the script has left, because it was killed, go on with what
    they do: the block gets what was found, or None. See `takeover`.

    With `--dry-run` nothing is started: the first call that waits for workers ends the process.

    However the block ends (return, exception, any number of Ctrl-C), every worker is gone
    afterwards.

    Raises:
        ConfigError: two controllers have one role.
        WorkerError: in place of a TransportError of the block, where a worker that was given up
            explains it: a rank that waits for the dead one, say, or a worker that pulls from it.
    """
    refuse_in_worker("start")
    for one, other in combinations(controllers, 2):
        if one.role == other.role:
            raise ConfigError(
                f"two controllers have the role {one.role!r}, which names their workers, logs and "
                "snapshots; give one another: TrainController(..., role='ref')"
            )
    if any(controller.is_dry_run for controller in controllers):
        for controller in controllers:
            controller.look()
        yield None
        return
    control_loop = ControlLoop(controllers)
    try:
        for controller in controllers:
            controller.attach(control_loop)
        with interrupts.answered_here():
            control_loop.run(_start_all(controllers))
            taken = control_loop.run(take_over(controllers)) if control_loop.takes_over else None
            with _small_collections():
                yield taken
    except TransportError as error:
        loss = control_loop.run(_notice_loss(control_loop))
        if loss is None:
            raise
        raise loss from error
    finally:
        if (ended_by := sys.exception()) is not None:
            for controller in controllers:
                controller.note_end(ended_by)
        with interrupts.deferred(), contextlib.ExitStack() as stack:
            stack.callback(control_loop.close)
            for controller in controllers:
                stack.callback(controller.attach, None)
            control_loop.run(_close_all(controllers))


@contextlib.contextmanager
def _small_collections() -> Iterator[None]:
    """Keeps Python's garbage collections short: they leave out all objects that exist now.

    With thousands of workers a full collection stopped the loop for a tenth of a second.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def _start_all(controllers: Sequence[Controller]) -> None:
    """Starts all controllers; those that measure the memory which the others leave start last."""
    last = [c for c in controllers if await c.measures_free_memory()]
    for wave in ([c for c in controllers if c not in last], last):
        await _start_together(wave)


async def _start_together(controllers: Sequence[Controller]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for controller in controllers:
                group.create_task(controller.start_async())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _notice_loss(control_loop: ControlLoop) -> WorkerError | RunFolderError | None:
    loop = asyncio.get_running_loop()
    give_up = loop.time() + LOSS_NOTICE_S
    while True:
        loss = control_loop.worker_lost()
        if loss is not None or loop.time() > give_up:
            return loss
        await asyncio.sleep(0.05)


async def _close_all(controllers: Sequence[Controller]) -> None:
    """Closes all, then raises the first error."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            results = await asyncio.gather(
                *(controller.close_async() for controller in controllers), return_exceptions=True
            )
    except TimeoutError:
        raise WaitTimeout(f"the workers did not end within {CLOSE_TIMEOUT_S:g} s") from None
    for result in results:
        if isinstance(result, BaseException):
            raise result
