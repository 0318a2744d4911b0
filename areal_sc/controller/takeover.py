"""A start that goes on where an earlier one was killed: workers live, the journal tells the rest.

    each TrainController    finds its ranks where the journal, or a file of its own, says that they
                            are, or new ones
    each RolloutController  goes on from the journal if all models do, and takes over what its
                            workers run and hold; else it gives all of that up
    both                    workers without the newest weights, or with drawn ones, get them

What the script then asks for is what it asked for before: the same batch, with the same rows in the
same order, the same updates and the same publication. So it joins what is done, or goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from areal_sc.controller.base import Controller
from areal_sc.controller.rollout.rollout_controller import RolloutController
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.errors import StepsLost
from areal_sc.nodes.spec import TRAIN_ROLE

logger = logging.getLogger(__name__)


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

    def of_workers(self) -> dict[str, float]:
        """All but the version."""
        return {name: value for name, value in self._asdict().items() if name != "version"}

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
        found = await rollout.take_over_async(goes_on=goes_on)
        num_groups, num_again = num_groups + len(found.owners), num_again + found.num_again
        if actor is None:
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
    actor.note_reader(rollout)
    is_lost = bool(rollout.groups.step.gone) and actor.found.has_begun_step
    if is_lost:
        actor.begin_step_anew()
    if is_lost or not actor.found.has_begun_step:
        with suppress(StepsLost):  # who waits for a batch is told
            await actor.share_weights_async(rollout)
