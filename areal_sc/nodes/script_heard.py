"""What an agent hears: whether its script is there and needs it, and what others ask of it."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Final

from areal_sc.config.schema import SchedulerConfig
from areal_sc.config.slurm_script import COMES_BACK
from areal_sc.errors import ArealError, NotPermitted, StaleTerm, TransportError
from areal_sc.nodes.joining import JOIN_LIMIT_S
from areal_sc.nodes.spec import Wish
from areal_sc.system.process import END_SIGNAL, SNAPSHOT_SIGNALS
from areal_sc.system.waiting import cancel_all

MAX_SILENT_INTERVALS: Final = 5
"""A script that lives asks for news at every interval."""

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


class ScriptHeard:
    """Judged by the calls of its controllers; without workers, by other signs.

    Args:
        has_workers: whether any run.
        is_far: the script is on another machine, where `is_done` asks it: an open standard input
            tells nothing of a script to which there is no way any more.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        wishes: Wishes,
        has_workers: Callable[[], bool],
        *,
        is_far: bool,
    ) -> None:
        self._is_far = is_far
        self._config = config
        self._wishes = wishes
        self._has_workers = has_workers
        self._heard_s = self._asked_s = time.monotonic()
        self._is_known = not is_far  # a script on this machine has started the agent just now

    def note_contact(self) -> None:
        """It calls, or answers."""
        self._heard_s = time.monotonic()
        self._is_known = True

    @property
    def is_lately(self) -> bool:
        """Whether it lives, by all that is known."""
        return self._is_known and self._is_within(self._beats_s)

    @property
    def needs_node(self) -> bool:
        """Someone may still need workers; until any run, the script may be silent."""
        limit_s = self._beats_s if self._wishes.are_of_end else self._config.orphan_timeout_s
        must_call = self._is_far or self._has_workers() or self._wishes.are_of_end
        # a script that is gone has closed the standard input, to which it writes nothing
        is_gone = must_call or bool(select.select([sys.stdin], [], [], 0)[0])
        if self._is_within(limit_s) or not is_gone:
            return True
        logger.error("no controller was heard for %g s; ending", limit_s)
        return False

    async def meet(self, join: Callable[[float], Awaitable[None]], ended: asyncio.Event) -> None:
        """Returns at the first answer of a script on another machine, or when the agent ends.

        Args:
            join: see `is_done`.
        Raises: TransportError: none comes, or the run is to end before. NotPermitted: see `join`.
        """
        meeting = asyncio.create_task(self._meet(join))
        ending = asyncio.create_task(ended.wait())
        try:
            await asyncio.wait([meeting, ending], return_when=asyncio.FIRST_COMPLETED)
            if meeting.done():
                meeting.result()
        finally:
            await cancel_all([meeting, ending])

    async def _meet(self, join: Callable[[float], Awaitable[None]]) -> None:
        give_up_s = time.monotonic() + min(JOIN_LIMIT_S, self._config.orphan_timeout_s)
        while True:
            try:
                await join(self._beats_s)
                return self.note_contact()
            except NotPermitted:
                raise
            except TransportError:
                if self._wishes.are_of_end or time.monotonic() >= give_up_s:
                    raise

    async def is_done(self, join: Callable[[float], Awaitable[None]]) -> bool:
        """Whether a script that was silent says, when it is asked, that it has another agent.

        Without workers no controller calls: then its answer tells that it lives.

        Args:
            join: joins the script on another machine, within a limit in seconds.
        """
        limit_s = min(self._beats_s, self._config.orphan_timeout_s / 4)
        if time.monotonic() < limit_s + max(self._heard_s, self._asked_s):
            return False
        try:
            await join(limit_s / 2)
        except (NotPermitted, StaleTerm) as error:
            logger.error("the agent ends with its workers: %s", error)
            return True
        except ArealError as error:  # its disk is full, say: that is no reason to end workers
            logger.warning("the script does not answer as it should: %s", error)
        else:
            if not self._has_workers():
                self.note_contact()
        self._asked_s = time.monotonic()
        return False

    @property
    def _beats_s(self) -> float:
        beats_s = MAX_SILENT_INTERVALS * self._config.heartbeat_interval_s
        return min(self._config.orphan_timeout_s, beats_s)

    def _is_within(self, limit_s: float) -> bool:
        return time.monotonic() <= self._heard_s + limit_s
