"""Long computations on the event loop, cut into slices: between two of them the loop turns."""

from __future__ import annotations

import asyncio
import time
from typing import Final

SLICE_S: Final = 0.01
"""A timer or an RPC waits at most this long, and for the step in which the slice ends."""


class Slices:
    """One computation; the first slice begins at once."""

    def __init__(self) -> None:
        self._ends_s = time.monotonic() + SLICE_S

    async def step(self) -> None:
        """Awaited after each step; lets the loop turn when the slice is over."""
        if time.monotonic() >= self._ends_s:
            await asyncio.sleep(0)
            self._ends_s = time.monotonic() + SLICE_S
