"""Heartbeats of one worker: a thread with a small socket of its own, beside the main event loop.

consumes     calls of controllers; each is answered with the beats of all workers of the node
waits for    the next beat, the next call, or the end
unblocked by the clock. Bulk traffic, a blocked main loop and the engine delay none of it; only code
             that holds the interpreter's lock does

Each beat asks the main event loop for a turn, so that the board tells whether a live worker
also makes progress. A call renews the node's lease; workers whose node has had none for
`orphan_timeout_s` end, also those whose main loop is stuck.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from areal_sc.errors import TransportError
from areal_sc.transport.beat_board import BEAT, BLOCKED_WARNING_S, Beat, BeatBoard
from areal_sc.transport.endpoint import Authenticator
from areal_sc.transport.refusals import Refusals
from areal_sc.transport.rpc.codec import MessageLimits
from areal_sc.transport.rpc.server import RpcServer

logger = logging.getLogger(__name__)

ORPHAN_GRACE_S: Final = 10.0
"""Between asking an orphan to end and ending it by force."""

ORPHAN_EXIT_CODE: Final = 1
MAX_MESSAGE_BYTES: Final = 1 << 20
"""Far above the beats of the largest node."""

THREAD_LIMIT_S: Final = 30.0
_STACK_FRAMES: Final = 12


class BeatServer:
    """Beats, answers `beat`, and notices that nobody asks any more.

    Args:
        board: of the node.
        name, incarnation: of the worker.
        bind: ZMQ interface, with a system-chosen port unless it names one.
        authenticator: lets members of the run in; used by this server alone.
        interval_s: between two beats.
        orphan_timeout_s: so long the worker lives without a controller.
        on_orphaned: called on the main event loop when that has passed.
        end_process: called with an exit code when the main loop does not end after that.
    """

    def __init__(
        self,
        board: BeatBoard,
        *,
        name: str,
        incarnation: str,
        bind: str,
        interval_s: float,
        orphan_timeout_s: float,
        on_orphaned: Callable[[], None],
        authenticator: Authenticator | None = None,
        end_process: Callable[[int], Any] = os._exit,
    ) -> None:
        self._board = board
        self._name = name
        self._incarnation = incarnation
        self._interval_s = interval_s
        self._orphan_timeout_s = orphan_timeout_s
        self._on_orphaned = on_orphaned
        self._end_process = end_process
        self._server = RpcServer(
            [BEAT.served_by(self._answer)],
            node_id=name,
            incarnation=incarnation,
            bind=bind,
            authenticator=authenticator,
            limits=MessageLimits(max_bytes=MAX_MESSAGE_BYTES),
        )
        self._unwritten = Refusals(logger, "beat_not_written", name)
        self._started_ns = self._turn_ns = time.monotonic_ns()
        self._is_turn_asked = False
        self._is_blocked = False
        self._orphaned_ns: int | None = None
        self._main_thread = threading.get_ident()
        self._main_loop: asyncio.AbstractEventLoop | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end = asyncio.Event()
        self._thread: threading.Thread | None = None

    async def start(self) -> str:
        """Starts the thread; returns the address to connect to.

        Raises: TransportError: the interface or port cannot be bound.
        """
        assert self._thread is None, "started twice"
        self._main_loop = asyncio.get_running_loop()
        self._main_thread = threading.get_ident()
        started: asyncio.Future[str] = self._main_loop.create_future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(started)), name="beats", daemon=True
        )
        self._thread.start()
        async with asyncio.timeout(THREAD_LIMIT_S):
            return await started

    async def close(self) -> None:
        """Ends the thread, and takes the worker from the board."""
        if self._thread is None or self._loop is None:
            return
        with suppress(RuntimeError):  # the thread's loop has ended already
            self._loop.call_soon_threadsafe(self._end.set)
        await asyncio.to_thread(self._thread.join, THREAD_LIMIT_S)

    async def _serve(self, started: asyncio.Future[str]) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            address = await self._server.start()
        except TransportError as error:
            self._in_main_loop(_settle, started, error)
            return
        self._beat()
        self._in_main_loop(_settle, started, address)
        try:
            while not self._end.is_set():
                self._look_after_main_loop()
                self._look_after_lease()
                try:
                    async with asyncio.timeout(self._interval_s):
                        await self._end.wait()
                except TimeoutError:
                    self._beat()
        finally:
            await self._server.close()
            self._board.remove(self._name)
            self._board.close()

    def _answer(self, _: None) -> tuple[Beat, ...]:
        self._beat()
        try:
            self._board.renew_lease()
        except OSError as error:
            self._unwritten.add(error)
        beats = {beat.name: beat for beat in self._board.read_all()}
        # Its own is the newest there is, also where the board cannot be written.
        turn_age_s = (time.monotonic_ns() - self._turn_ns) / 1e9
        beats[self._name] = Beat(self._name, self._incarnation, os.getpid(), 0.0, turn_age_s)
        return tuple(beats.values())

    def _beat(self) -> None:
        try:
            self._board.write(self._name, self._incarnation, self._turn_ns)
        except OSError as error:
            self._unwritten.add(error)

    def _look_after_main_loop(self) -> None:
        """Asks for a turn, and says where the main loop is stuck when it has had none for long."""
        if not self._is_turn_asked:
            self._is_turn_asked = True
            self._in_main_loop(self._note_turn)
        blocked_s = (time.monotonic_ns() - self._turn_ns) / 1e9
        is_blocked = blocked_s > BLOCKED_WARNING_S + self._interval_s
        if is_blocked and not self._is_blocked:
            logger.warning(
                "the event loop has not turned for %.0f s; it is at:\n%s", blocked_s, self._stack()
            )
        self._is_blocked = is_blocked

    def _look_after_lease(self) -> None:
        now_ns = time.monotonic_ns()
        if self._orphaned_ns is not None:
            if now_ns - self._orphaned_ns > ORPHAN_GRACE_S * 1e9:
                logger.error(
                    "it did not end within %g s and is ended by force; it is at:\n%s",
                    *(ORPHAN_GRACE_S, self._stack()),
                )
                self._end_process(ORPHAN_EXIT_CODE)
            return
        unheard_s = (now_ns - self._started_ns) / 1e9
        lease_age_s = self._board.lease_age_s()
        if lease_age_s is not None:
            unheard_s = min(unheard_s, lease_age_s)
        if unheard_s > self._orphan_timeout_s:
            logger.error("no controller was heard for %g s; ending", self._orphan_timeout_s)
            self._orphaned_ns = now_ns
            self._in_main_loop(self._on_orphaned)

    def _in_main_loop(self, callback: Callable[..., Any], *args: Any) -> None:
        assert self._main_loop is not None
        try:
            self._main_loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            self._end.set()  # the main loop is closed: the process ends

    def _stack(self) -> str:
        """Where the main thread is."""
        frame = sys._current_frames().get(self._main_thread)
        stack = traceback.format_stack(frame, _STACK_FRAMES) if frame else ["nowhere\n"]
        return "".join(stack).rstrip()

    def _note_turn(self) -> None:
        self._turn_ns = time.monotonic_ns()
        self._is_turn_asked = False


def _settle(started: asyncio.Future[str], outcome: str | TransportError) -> None:
    if started.done():
        return
    if isinstance(outcome, TransportError):
        started.set_exception(outcome)
    else:
        started.set_result(outcome)
