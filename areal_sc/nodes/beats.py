"""Signs of life of one worker: a thread beside its main event loop writes them to its agent.

consumes     nothing
waits for    the next beat, or the end
unblocked by the clock. Bulk traffic, a blocked main loop and the engine delay no beat; only code
             that holds the interpreter's lock does

Each beat asks the main event loop for a turn, so that a beat tells two times, both of the clock
that all processes of a node share (`CLOCK_MONOTONIC`, ns): when the process was alive, and when its
main loop last turned.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import Final

from msgspec import msgpack

logger = logging.getLogger(__name__)

BLOCKED_WARNING_S: Final = 10.0
"""Time without a turn of a worker's main event loop that is worth a warning."""

_STACK_FRAMES: Final = 12
_END_LIMIT_S: Final = 30.0


class Beats:
    """Beats while it is open. Constructed on the main event loop.

    Args:
        pipe: file descriptor that the agent reads; each beat is `[beat_ns, turn_ns]` as msgpack.
        interval_s: between two beats.
    """

    def __init__(self, pipe: int, interval_s: float) -> None:
        os.set_blocking(pipe, False)
        self._pipe = pipe
        self._interval_s = interval_s
        self._main_loop = asyncio.get_running_loop()
        self._main_thread = threading.get_ident()
        self._turn_ns = time.monotonic_ns()
        self._is_turn_asked = False
        self._is_blocked = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="beats", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Ends the thread."""
        self._end.set()
        await asyncio.to_thread(self._thread.join, _END_LIMIT_S)

    def _beat(self) -> None:
        while not self._end.is_set():
            # An agent that is stopped does not read; one that is gone takes its workers along.
            with suppress(BlockingIOError, ConnectionError):
                os.write(self._pipe, msgpack.encode([time.monotonic_ns(), self._turn_ns]))
            self._look_after_main_loop()
            self._end.wait(self._interval_s)

    def _look_after_main_loop(self) -> None:
        """Asks for a turn, and says where the main loop is stuck when it has had none for long."""
        if not self._is_turn_asked:
            self._is_turn_asked = True
            with suppress(RuntimeError):  # the main loop is closed: the process ends
                self._main_loop.call_soon_threadsafe(self._note_turn)
        blocked_s = (time.monotonic_ns() - self._turn_ns) / 1e9
        is_blocked = blocked_s > BLOCKED_WARNING_S + self._interval_s
        if is_blocked and not self._is_blocked:
            logger.warning(
                "the event loop has not turned for %.0f s; it is at:\n%s", blocked_s, self._stack()
            )
        self._is_blocked = is_blocked

    def _stack(self) -> str:
        """Where the main thread is."""
        frame = sys._current_frames().get(self._main_thread)
        stack = traceback.format_stack(frame, _STACK_FRAMES) if frame else ["nowhere\n"]
        return "".join(stack).rstrip()

    def _note_turn(self) -> None:
        self._turn_ns = time.monotonic_ns()
        self._is_turn_asked = False
