"""What others than the script ask an agent for, and the signals by which a cluster asks."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from typing import Final

from areal_sc.config.slurm_script import COMES_BACK
from areal_sc.nodes.spec import Wish
from areal_sc.system.process import END_SIGNAL, SNAPSHOT_SIGNALS

SAVE_EVERY_S: Final = 1.0
"""Between wishes for a snapshot of a node that is about to go; steps without one are lost."""

logger = logging.getLogger(__name__)


class Wishes:
    """The wishes that one agent was told, in order.

    Args:
        on_wish: is called at each of them.
    """

    def __init__(self, on_wish: Callable[[], None]) -> None:
        self._wishes: list[Wish] = []
        self._on_wish = on_wish

    def __len__(self) -> int:
        return len(self._wishes)

    def since(self, number: int) -> list[Wish]:
        """All but the first so many."""
        return self._wishes[number:]

    def add(self, wish: Wish) -> None:
        """Notes one."""
        self._wishes.append(wish)
        self._on_wish()

    def clear(self) -> None:
        """They were meant for an earlier script."""
        self._wishes.clear()

    @property
    def are_of_end(self) -> bool:
        """Whether one of them is that the agent ends."""
        return Wish.stop in self._wishes or Wish.leave in self._wishes

    def take_signals(self, is_in_use: Callable[[], bool], end: Callable[[], None]) -> None:
        """`SNAPSHOT_SIGNALS` ask for a snapshot. SIGTERM says that node or run is to end soon.

        The script waits for a node that comes back, and does not end: so it is asked for snapshots
        alone, again and again, until the node is gone.

        Args:
            is_in_use: whether the script loses something by that: then it is told, the first time.
            end: is called otherwise.
        """
        is_told = False

        def leave() -> None:
            nonlocal is_told
            if is_in_use() and not is_told:
                logger.warning("SIGTERM: the script is told, which stops; a second one ends this")
                is_told = True
                if os.environ.get(COMES_BACK):
                    save()
                else:
                    self.add(Wish.leave)
            else:
                end()

        def save() -> None:
            self.add(Wish.snapshot)
            loop.call_later(SAVE_EVERY_S, save)

        loop = asyncio.get_running_loop()
        for number in SNAPSHOT_SIGNALS:
            loop.add_signal_handler(number, self.add, Wish.snapshot)
        loop.add_signal_handler(signal.SIGTERM, leave)
        loop.add_signal_handler(END_SIGNAL, end)
