"""The turns in which training and generation use the memory of the cards that they share.

    nobody's ──want──► a side's ──the other side wants──► it leaves ──left──► nobody's

Training comes first: what it is asked for is short, and nothing else of the run goes on before it
is done. Generation is interrupted for it, as for new weights, and comes back when training is asked
for nothing, and somebody waits for answers.

Pure state: nothing here waits. `SharedCard` does what it says.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum


class Side(StrEnum):
    """One of the two that use the memory: all ranks, or the engines of all rollout workers."""

    training = "training"
    generation = "generation"


class Turns:
    """The two sides, and what each of them is wanted for.

    Attributes:
        holder: whose memory may be on the cards; None: nobody's.
        is_leaving: the holder gives its memory up.
        is_idle: training has not been asked for anything for some time.
    """

    def __init__(self) -> None:
        self.holder: Side | None = Side.generation  # an earlier start may have left it there
        self.is_leaving = False
        self.is_idle = False
        self._wants = Counter[Side]()
        self._num_patient = 0

    def want(self, side: Side) -> None:
        """Somebody waits for what the side does, or has begun it; ends with `done`."""
        self._wants[side] += 1
        self.is_idle &= side is not Side.training

    def done(self, side: Side) -> None:
        """One of those who wanted the side does not any more."""
        assert self._wants[side] > 0, f"{side} is done more often than it was wanted"
        self._wants[side] -= 1

    def wait_for_idle(self, change: int) -> None:
        """Generation is wanted by so many more, or fewer, but not between two calls of a step."""
        self._num_patient += change

    def is_wanted(self, side: Side) -> bool:
        return self._wants[side] > 0

    def may_use(self, side: Side) -> bool:
        """Whether the side may take memory, or use what it has."""
        return self.holder is side and not self.is_leaving

    def advance(self) -> Side | None:
        """Gives the turn to who wants it; returns the side that has to leave for that now."""
        wanted = self._next
        if self.is_leaving or wanted in (None, self.holder):
            return None
        if self.holder is None:
            self.holder = wanted
            return None
        self.is_leaving = True
        return self.holder

    def left(self) -> None:
        """Nothing of the holder is on the cards any more."""
        assert self.is_leaving, f"{self.holder} was not asked to leave"
        self.holder, self.is_leaving = None, False

    @property
    def _next(self) -> Side | None:
        """The side that is wanted, training first."""
        if self._wants[Side.training]:
            return Side.training
        may_come = self.is_idle or self.holder is not Side.training
        is_wanted = self._wants[Side.generation] or (self._num_patient and may_come)
        return Side.generation if is_wanted else None
