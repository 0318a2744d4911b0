"""How often something that is started again has died, and when that is too often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
_MAX_DOUBLINGS: Final = 32
"""More than it takes to reach the longest pause; a float holds 2 to this power."""


@dataclass
class Deaths:
    """Deaths in a row, without anything useful in between.

    The first start after a death begins at once, each further one in a row after a longer pause.

    Args:
        max_in_row: the next one is the last. 0: the first one is.
    """

    max_in_row: int
    number: int = 0

    def note_death(self, *, is_final: bool = False) -> float | None:
        """One more death; returns the pause before the next start, or None: there is none."""
        self.number += 1
        if is_final or self.number > self.max_in_row:
            return None
        if self.number == 1:
            return 0.0
        num_doublings = min(self.number - 2, _MAX_DOUBLINGS)
        return float(min(FIRST_PAUSE_S * 2.0**num_doublings, LONGEST_PAUSE_S))
