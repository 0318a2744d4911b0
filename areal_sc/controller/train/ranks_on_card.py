"""The memory of the card that the ranks of a model may share with generation (`placement: turns`).

consumes     the turns of a `SharedCard`
waits for    the ranks to give the memory up
unblocked by their replies, or by their death; ranks that are given up end it with an error
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Final

from areal_sc.controller.shared_card import SharedCard
from areal_sc.controller.turns import Side
from areal_sc.errors import ArealError
from areal_sc.fleet.recovery import Recovery
from areal_sc.system.waiting import first_of
from areal_sc.workers.calls import SLEEP

HUNG_SETTING: Final = "transport.call_timeout_s, of writes transport.write_timeout_s"
"""How long a call of ranks may take."""


class RanksOnCard:
    """Has the ranks give up the card's memory when generation wants it."""

    def __init__(self, card: SharedCard, recovery: Recovery) -> None:
        self._has_memory = False  # on the card, as far as is known
        self._has_left = asyncio.Event()
        self._card = card
        self._recovery = recovery
        self._fleet = recovery.fleet
        card.join(Side.training, enter=self._enter, leave=self._leave)

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Within it the ranks may use the card; raises as `SharedCard.held`."""
        return self._card.held(Side.training)

    def note_memory(self) -> None:
        """The ranks have memory on the card, or soon will."""
        self._has_memory = True

    def note_left(self) -> None:
        """The ranks have no memory on the card any more."""
        self._has_memory = False
        self._has_left.set()
        self._has_left = asyncio.Event()

    def _enter(self) -> None:
        self._has_memory = bool(self._fleet.members)

    async def _leave(self) -> None:
        """The ranks give up the card's memory. Those that cannot are started again.

        Returns: when the memory is free.
        """
        while self._has_memory:
            first, left = self._fleet.members[0], self._has_left
            incarnation = first.worker.incarnation
            try:
                await self._fleet.call_all(SLEEP, None)
            except ArealError as error:
                members = self._fleet.members
                if not await self._fleet.lose_hung(error, members, HUNG_SETTING):
                    self._fleet.lose(first, incarnation, f"has kept the card's memory: {error}")
                # they are up again, or without memory; raises that they were given up
                await first_of(self._recovery.wait_until_ready(first), left.wait())
            else:
                self.note_left()
