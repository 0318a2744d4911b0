"""What happens in a controller, and who is told of it.

Each controller has one `Events`. What happens is a dataclass; who is told of it stands in one
function of the controller, `_wire`, as a table. Listeners run at once, in the order of the table,
and wait for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from areal_sc.weights import WeightsReference
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


@dataclass(frozen=True)
class RowsNeeded:
    """Rows of earlier steps that may be asked for again.

    Attributes:
        first_step: they are those of this step and later ones.
        is_being_covered: fewer will be needed soon, when a snapshot is written or ranks are back.
    """

    first_step: int
    is_being_covered: bool


@dataclass(frozen=True)
class WeightsMoved:
    """The weights of the current version are to be had elsewhere from now on."""

    weights: WeightsReference


@dataclass(frozen=True)
class TrainingLost:
    """The ranks do nothing before they are brought to a snapshot."""

    why: str


E = TypeVar("E")


class Events:
    """The table of one controller."""

    def __init__(self) -> None:
        self._listeners: dict[type[Any], tuple[Callable[[Any], object], ...]] = {}

    def on(self, kind: type[E], *listeners: Callable[[E], object]) -> None:
        """Events of a kind are told to these listeners, and to no others any more."""
        self._listeners[kind] = listeners

    def tell(self, event: object) -> None:
        """Tells an event."""
        for listener in self._listeners.get(type(event), ()):
            listener(event)
