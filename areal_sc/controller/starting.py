"""The block in which the workers of a script live."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from collections.abc import Iterator, Sequence
from itertools import combinations

from areal_sc.controller.base import Controller
from areal_sc.controller.control_loop import ControlLoop
from areal_sc.controller.takeover import TakenOver, can_take_over, take_over
from areal_sc.errors import ConfigError, RunFolderError, TransportError, WaitTimeout, WorkerError
from areal_sc.system import interrupts
from areal_sc.system.process import refuse_in_worker
from areal_sc.system.waiting import all_of

CLOSE_TIMEOUT_S = 60.0
"""Controllers may take this long to end their workers; the scheduler then kills what is left."""

LOSS_NOTICE_S = 2.0
"""How long after a failed call the loss of the worker that explains it may be noticed."""


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
    control_loop = ControlLoop(controllers, takes_over=can_take_over(controllers))
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
        await all_of(controller.start_async() for controller in wave)


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
