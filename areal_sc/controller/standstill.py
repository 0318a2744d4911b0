"""A pause: a person wants the run to stand still, and it does between two steps.

consumes     wishes, which `StatusBoard` hears; see `run.wishes`
waits for    the end of the pause, wherever a step of the script begins
unblocked by that, and by a script that is to end, or to be saved, meanwhile

No episode begins, and none is interrupted: those that run end, as does the step in progress. So
nothing is computed then, and no time limit but that of waiting for a batch has to stand still.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from areal_sc.errors import StepLost
from areal_sc.run.wishes import PauseWish

LOOK_S: Final = 0.1
"""Between two looks at whether the pause is over."""


class Standstill:
    """Whether the run is paused, as one controller knows it.

    Attributes:
        wish: None: it is not.
        held_s: seconds that calls of the script were held so far.
        is_held: one is held now.
        is_left: whether the script has to do something else than the next step.
    """

    def __init__(self) -> None:
        self.wish: PauseWish | None = None
        self.held_s = 0.0
        self.is_held = False
        self.is_left: Callable[[], bool] = lambda: False

    @property
    def is_on(self) -> bool:
        return self.wish is not None

    async def hold(self, check: Callable[[], None] = lambda: None) -> None:
        """Returns when the pause is over, at once if there is none.

        Args:
            check: raises what is to end the wait.
        Raises: StepLost: the script `is_left`; its step has not begun.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            self.is_held = self.is_on
            await self.end(check)
        finally:
            if self.is_held:
                self.is_held = False
                self.held_s += loop.time() - began_s

    async def end(self, check: Callable[[], None]) -> None:
        """Waits as `hold` does, in a call that is no step: nothing tells that it is held."""
        # a wish is heard rarely, and an end of the script anywhere: there is no event for both
        while self.is_on:
            check()
            if self.is_left():
                raise StepLost("the run is paused, and the script is to end or to be saved")
            await asyncio.sleep(LOOK_S)
