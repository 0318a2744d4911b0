"""How often a run may go back without getting anywhere. Pure state."""

from __future__ import annotations

from areal_sc.errors import StepsLost


class Retreats:
    """Counts them since the farthest step was made.

    Args:
        max_retreats: without a step beyond that; the next one ends the run.
    """

    def __init__(self, max_retreats: int) -> None:
        self._max_retreats = max_retreats
        self._farthest = 0
        self._num = 0

    def note_retreat(self, step: int, cause: StepsLost) -> None:
        """The run is about to go back from a step.

        Raises: StepsLost: it has done so too often.
        """
        if step > self._farthest:
            self._farthest, self._num = step, 0
        self._num += 1
        if self._num > self._max_retreats:
            raise StepsLost(
                f"the run went back {self._num} times without a step beyond step "
                f"{self._farthest}, scheduler.max_deaths is {self._max_retreats}; the last time: "
                f"{cause}"
            ) from cause
