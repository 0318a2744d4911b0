"""Rows of trained steps that stay in the stores, because the steps may have to be repeated.

    trained ──► kept ──► a snapshot covers the step ──► may be swept
                  └────► admission lacks room: the oldest step's go before

Pure state: nothing here waits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

from areal_sc.metadata import RowMetadata
from areal_sc.workers.calls import GroupAttempt

logger = logging.getLogger(__name__)


class KeptRows:
    """Which runs of groups a repeated step would read again.

    Attributes:
        has_let_go: rows went before a snapshot on the disk covered their step.
    """

    def __init__(self) -> None:
        self.has_let_go = False
        self._steps: dict[int, frozenset[GroupAttempt]] = {}  # oldest first
        self._kept: set[GroupAttempt] = set()
        self._first_step: float = math.inf
        self._is_being_covered = False

    def has(self, run: GroupAttempt) -> bool:
        return run in self._kept

    def keep(self, step: int, rows: Iterable[RowMetadata]) -> None:
        """The rows were trained at this version."""
        if step >= self._first_step:
            self._steps[step] = frozenset(GroupAttempt(row.group_id, row.attempt) for row in rows)
            self._kept |= self._steps[step]

    def keep_from(self, first_step: int, *, is_being_covered: bool) -> None:
        """Those of earlier steps may go.

        Args:
            is_being_covered: the others stay for now, even where room is short.
        """
        self._first_step, self._is_being_covered = first_step, is_being_covered
        for step in [step for step in self._steps if step < first_step]:
            self._kept -= self._steps.pop(step)
        if not self._steps:
            self.has_let_go = False

    def let_go(self) -> bool:
        """Room is short: the rows of the oldest step go; tells whether there were any."""
        if not self._steps or self._is_being_covered:
            return False
        step = next(iter(self._steps))
        self._kept -= self._steps.pop(step)
        if not self.has_let_go:
            logger.warning(
                "the stores lack room for the rows of step %d, which no snapshot on the disk "
                "covers: more room (rollout.store_bytes) or more snapshots "
                "(checkpoint.every_steps) would keep them",
                step + 1,
            )
        self.has_let_go = True
        return True
