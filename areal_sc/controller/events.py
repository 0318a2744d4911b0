"""What happens to rows and batches in a controller.

Each controller has one function, `_hear`, that says who of it acts on what, as it does for what
becomes of its workers (`fleet.worker_life`). It acts at once, and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from areal_sc.workers.calls import GroupAttempt


@dataclass(frozen=True)
class RoomFreed:
    """Room in the store of a rollout worker is free again."""


@dataclass(frozen=True)
class RowsLost:
    """The shards of these runs are gone with their worker."""

    runs: Sequence[GroupAttempt]


@dataclass(frozen=True)
class BatchFormed:
    """The batch of the next step is there."""


StepEvent = RoomFreed | RowsLost | BatchFormed

Hear = Callable[[StepEvent], None]
"""Takes an event: the controller."""
