"""What the controllers of one run have in common. They know each other by their scheduler alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from areal_sc.controller.shared_card import SharedCard
from areal_sc.workers.calls import GroupAttempt

if TYPE_CHECKING:
    from areal_sc.run.run_folder import RunFolder
    from areal_sc.schedulers.base import Scheduler

NeedsRun = Callable[[GroupAttempt], bool]
"""Whether the rows of a run of a group may still be read."""


@dataclass(eq=False)
class Common:
    """Shared by the controllers of a scheduler.

    Attributes:
        needs: each rollout controller adds what it says of rows.
        card: who may use the memory of GPUs that training and generation share.
    """

    needs: set[NeedsRun] = field(default_factory=set)
    card: SharedCard = field(default_factory=SharedCard)
    _lineage: int = 0
    _entered: set[str] = field(default_factory=set)

    def enter_lineage(self, role: str, folder: RunFolder) -> int:
        """Number of the history of weights that a model begins.

        Models that begin one after the other, or go back one after the other, share it; a model
        that is in the newest history already begins the next one.

        Raises: RunFolderError: as `RunFolder.begin_lineage`.
        """
        if not self._lineage or role in self._entered:
            self._lineage = folder.begin_lineage()
            self._entered.clear()
        self._entered.add(role)
        return self._lineage


_of_schedulers: WeakKeyDictionary[Scheduler, Common] = WeakKeyDictionary()


def common_of(scheduler: Scheduler) -> Common:
    return _of_schedulers.setdefault(scheduler, Common())
