"""A start that goes on where an earlier one was killed: workers live, the journal tells the rest.

    each TrainController    finds its ranks where the journal says that the run is, or new ones
    each RolloutController  goes on from the journal if the ranks do, and takes over what its
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
from areal_sc.controller.rollout import RolloutController
from areal_sc.controller.train import TrainController
from areal_sc.errors import StepsLost

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
    """Whether the journal says where the ranks are: it knows one model alone."""
    return sum(isinstance(controller, TrainController) for controller in controllers) == 1


async def take_over(controllers: Sequence[Controller]) -> TakenOver | None:
    """Once all controllers have started, as `can_take_over` allows; None: nothing goes on.

    Raises: RunFolderError: the journal cannot be read, or not be written.
    """
    began = time.monotonic()
    (actor,) = [c for c in controllers if isinstance(c, TrainController)]
    taken: TakenOver | None = None
    for rollout in (c for c in controllers if isinstance(c, RolloutController)):
        found = await rollout.take_over_async(goes_on=actor.found is not None)
        if actor.found is not None:
            actor.note_reader(rollout)
            is_lost = rollout.groups.has_lost_batch and actor.found.has_begun_step
            if is_lost:
                actor.begin_step_anew()
            elif actor.found.has_begun_step:
                rollout.groups.begun_step = actor.version
            if is_lost or not actor.found.has_begun_step:
                with suppress(StepsLost):  # who waits for a batch is told
                    await actor.share_weights_async(rollout)
            num_members = sum(m.is_adopted for c in controllers for m in c.fleet.members)
            taken = TakenOver(
                actor.version,
                num_members,
                len(found.owners),
                found.num_again,
                time.monotonic() - began,
            )
            logger.info("%s", taken)
        elif found.num_workers or actor.config.random_init:  # weights that only the ranks have
            await actor.share_weights_async(rollout)
    return taken
