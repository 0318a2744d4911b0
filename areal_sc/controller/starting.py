"""The block in which the workers of a script live.

A start may go on where an earlier one was killed: workers live, and the journal tells the rest.

    each TrainController    finds its ranks where the journal, or a file of its own, says that they
                            are, or new ones
    each RolloutController  goes on from the journal if all models do, and takes over what its
                            workers run and hold; else it gives all of that up
    both                    workers without the newest weights, or with drawn ones, get them,
                            but from a model that publishes none

What the script then asks for is what it asked for before: the same batch, with the same rows in the
same order, the same updates and the same publication. So it joins what is done, or goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import combinations
from typing import NamedTuple

from areal_sc.controller.base import Controller
from areal_sc.controller.control_loop import ControlLoop
from areal_sc.controller.rollout.rollout_controller import RolloutController
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.errors import (
    ConfigError,
    RunFolderError,
    StepsLost,
    TransportError,
    WaitTimeout,
    WorkerError,
)
from areal_sc.nodes.spec import TRAIN_ROLE
from areal_sc.system import interrupts
from areal_sc.system.process import refuse_in_worker
from areal_sc.system.waiting import all_of

logger = logging.getLogger(__name__)

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
    they do: the block gets what was found, or None.

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


class TakenOver(NamedTuple):
    """What a start has found of an earlier one.

    Attributes:
        version: the policy version that the run is at.
        num_workers: that live, of all roles.
        num_groups: that go on, or have ended meanwhile.
        num_again: that have to be generated again, as who ran them, or held their rows, is gone.
        seconds: that it took to find out.
    """

    version: int
    num_workers: int
    num_groups: int
    num_again: int
    seconds: float

    def __str__(self) -> str:
        again = f"{self.num_again} are generated again" if self.num_again else "none is lost"
        return (
            f"goes on after step {self.version} with {self.num_workers} workers that live; "
            f"{self.num_groups} groups went on meanwhile, {again} ({self.seconds:.1f} s)"
        )


def can_take_over(controllers: Sequence[Controller]) -> bool:
    """Whether there are ranks that say how far the run is."""
    return any(isinstance(controller, TrainController) for controller in controllers)


async def take_over(controllers: Sequence[Controller]) -> TakenOver | None:
    """Once all controllers have started, as `can_take_over` allows; None: nothing goes on.

    Models go on together, or begin anew together: `load_snapshot` brings all of them to one step.

    Raises: RunFolderError: the journal cannot be read, or not be written.
    """
    began = time.monotonic()
    models = [c for c in controllers if isinstance(c, TrainController)]
    rollouts = [c for c in controllers if isinstance(c, RolloutController)]
    actor, num_groups, num_again = _published(models), 0, 0
    goes_on = actor is not None and actor.found is not None and all(map(_goes_on, models))
    if not goes_on:
        for model in models:
            await model.begin_anew()
    for rollout in rollouts:
        is_followed = actor is not None and actor.publishes
        found = await rollout.take_over_async(goes_on=goes_on and is_followed)
        num_groups, num_again = num_groups + len(found.owners), num_again + found.num_again
        if actor is None or not is_followed:
            continue  # all are as they were built
        if goes_on:
            await _go_on(actor, rollout)
        elif found.num_workers or rollout.config.waits_for_weights:  # only the ranks have them
            await actor.share_weights_async(rollout)
    if actor is None or not goes_on:
        return None
    num_members = sum(m.is_adopted for c in controllers for m in c.fleet.members)
    seconds = time.monotonic() - began
    taken = TakenOver(actor.version, num_members, num_groups, num_again, seconds)
    logger.info("%s", taken)
    return taken


def _published(models: Sequence[TrainController]) -> TrainController | None:
    """The model whose versions are published; before the first is, the one that is likely to be."""
    found = [it for it in models if it.place.left is not None and it.place.left.is_published]
    found += models if len(models) == 1 else [it for it in models if it.role == TRAIN_ROLE]
    return next(iter(found), None)


def _goes_on(model: TrainController) -> bool:
    """Whether nothing of it is lost: its ranks live, or it is as it was built."""
    left = model.place.left
    return model.found is not None or left is None or left.is_initial


async def _go_on(actor: TrainController, rollout: RolloutController) -> None:
    assert actor.found is not None
    actor.ranks.note_reader(rollout)
    is_lost = bool(rollout.groups.step.gone) and actor.found.has_begun_step
    if is_lost:
        actor.ranks.begin_step_anew()
    if is_lost or not actor.found.has_begun_step:
        with suppress(StepsLost):  # who waits for a batch is told
            await actor.share_weights_async(rollout)
