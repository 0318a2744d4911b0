"""What a RolloutController goes on from, as a snapshot keeps it."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from areal_sc.controller.ledger.ledger_records import LedgerState
from areal_sc.controller.rollout.rejections import RejectionCounts


class RolloutState(Struct, frozen=True):
    """What a controller needs to go on; see `RolloutController.go_back`."""

    training: LedgerState
    rejections: RejectionCounts


INITIAL_STATE: Final = RolloutState(LedgerState(), RejectionCounts({}, 0))
"""The state of a run that has done nothing yet."""
