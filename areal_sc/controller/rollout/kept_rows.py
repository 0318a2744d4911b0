"""How long rows of trained steps stay in the stores: the steps may have to be repeated.

    trained ──► kept ──► a snapshot covers the step ──► released: they may be swept
                  └────► admission lacks room: the oldest step's go before

The ledger keeps their metadata for as long. Pure state: nothing here waits.
"""

from __future__ import annotations

import logging

from areal_sc.controller.ledger.ledger import Ledger

logger = logging.getLogger(__name__)


class KeptRows:
    """Which steps a ledger has to keep.

    Attributes:
        has_let_go: rows went before a snapshot on the disk covered their step.
    """

    def __init__(self) -> None:
        self.has_let_go = False
        self._first_step: int | None = None  # None: no step is repeated
        self._is_being_covered = False

    def keep_from(self, first_step: int, *, is_being_covered: bool) -> None:
        """Allows the rows of earlier steps to go; `release` follows.

        Args:
            is_being_covered: the others stay for now, even where room is short.
        """
        self._first_step, self._is_being_covered = first_step, is_being_covered

    def release(self, ledger: Ledger, version: int) -> None:
        """The ledger lets go of what no step reads again: neither the next one nor a repeated one.

        Args:
            version: the current policy version, and so the number of the next step.
        """
        first_step = version if self._first_step is None else min(version, self._first_step)
        ledger.release(first_step - 1)
        if not any(step < version for step in ledger.kept_steps):
            self.has_let_go = False

    def let_go(self, ledger: Ledger, version: int) -> bool:
        """Room is short: the rows of the oldest step go; tells whether there were any."""
        step = min(ledger.kept_steps, default=version)
        if step >= version or self._is_being_covered:
            return False
        ledger.release(step)
        if not self.has_let_go:
            logger.warning(
                "the stores lack room for the rows of step %d, which no snapshot on the disk "
                "covers: more room (rollout.store_bytes) or more snapshots "
                "(checkpoint.every_steps) would keep them",
                step + 1,
            )
        self.has_let_go = True
        return True
