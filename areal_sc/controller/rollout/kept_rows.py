"""How long rows of trained steps stay in the stores: the steps may have to be repeated.

    trained ──► kept ──► a snapshot covers the step ──► released: they may be swept
                  └────► admission lacks room: the oldest step's go before

The ledger keeps their metadata for as long. Pure state: nothing here waits.
"""

from __future__ import annotations

import logging

from areal_sc.controller.events import RowsNeeded
from areal_sc.controller.ledger.ledger import Ledger

logger = logging.getLogger(__name__)


class KeptRows:
    """Which steps a ledger has to keep.

    Attributes:
        has_let_go: rows went before a snapshot on the disk covered their step.
    """

    def __init__(self) -> None:
        self.has_let_go = False
        self._needed: dict[str, RowsNeeded] = {}  # by each model that is trained on them

    def keep_from(self, needed: RowsNeeded) -> None:
        """Allows rows to go that the model does not need any more; `release` follows."""
        self._needed[needed.model] = needed

    def release(self, ledger: Ledger, version: int) -> None:
        """The ledger lets go of what no step reads again: neither the next one nor a repeated one.

        Args:
            version: the current policy version, and so the number of the next step.
        """
        late = [it.model for it in self._needed.values() if it.version < version - 1]
        for model in late:  # it is not trained once a step: its versions are no steps
            del self._needed[model]
        ledger.release(min([version, *(it.first_step for it in self._needed.values())]) - 1)
        if not any(step < version for step in ledger.kept_steps):
            self.has_let_go = False

    def let_go(self, ledger: Ledger, version: int) -> bool:
        """Room is short: the rows of the oldest step go; tells whether there were any."""
        step = min(ledger.kept_steps, default=version)
        if step >= version or any(it.is_being_covered for it in self._needed.values()):
            return False
        ledger.release(step)
        if not self.has_let_go:
            logger.warning(
                "the stores lack room for the rows of step %d, which no snapshot on the disk "
                "covers: more room (transport.shared_memory) or more snapshots "
                "(checkpoint.every_steps) would keep them",
                step + 1,
            )
        self.has_let_go = True
        return True
