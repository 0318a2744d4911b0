"""The listening end of the bulk plane: whoever connects has a short time to show who it is.

consumes     connections
waits for    each caller's handshake, at most `HANDSHAKE_TIMEOUT_MS`; callers beyond
             `MAX_CALLERS` push out the one that has been waiting longest
unblocked by the callers; `close` ends every wait
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Final

from areal_sc.errors import ProtocolError
from areal_sc.transport.bulk.handshake import configure
from areal_sc.transport.endpoint import HANDSHAKE_TIMEOUT_MS
from areal_sc.transport.refusals import Refusals

logger = logging.getLogger(__name__)

MAX_CALLERS: Final = 512
"""In the middle of a handshake at one time."""

_BACKLOG: Final = 1024
_ACCEPTS_PER_TURN: Final = 64
_ACCEPT_RETRY_S: Final = 0.2
"""After the system had no file descriptor or memory left for another connection."""


class Listener:
    """Made on the running event loop.

    Args:
        host: IPv4 address to listen on; a free port is taken.
        let_in: shakes hands with a caller and keeps the connection. It raises ProtocolError or
            OSError for whoever is not let in; that connection is closed here.
        refused: counts whoever was not let in.

    Attributes:
        port: that is listened on.

    Raises: OSError: there is no such address here, or no free port.
    """

    def __init__(
        self,
        host: str,
        let_in: Callable[[socket.socket], Awaitable[None]],
        refused: Refusals,
    ) -> None:
        self._let_in = let_in
        self._refused = refused
        self._loop = asyncio.get_running_loop()
        self._socket = socket.create_server((host, 0), backlog=_BACKLOG)
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._callers: dict[asyncio.Task[None], None] = {}  # in the order of their coming
        self._connections: dict[asyncio.Task[None], tuple[socket.socket, str]] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._listen()

    async def close(self) -> None:
        """Lets nobody in any more; connections that were let in stay."""
        if self._socket.fileno() < 0:  # closed before
            return
        self._loop.remove_reader(self._socket)
        if self._retry is not None:
            self._retry.cancel()
        while self._callers:
            self._send_away(next(iter(self._callers)))
        # what became of each is for `_on_end` to tell
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._socket.close()

    def _listen(self) -> None:
        self._retry = None
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                connection, (host, *_) = self._socket.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # the caller has left already
                continue
            except OSError as error:
                self._refused.add(f"a connection could not be taken: {error}")
                self._loop.remove_reader(self._socket)
                self._retry = self._loop.call_later(_ACCEPT_RETRY_S, self._listen)
                return
            if len(self._callers) == MAX_CALLERS:
                self._send_away(next(iter(self._callers)))
            caller = asyncio.create_task(self._shake_hands(connection), name=f"caller {host}")
            self._callers[caller] = None
            self._connections[caller] = connection, host
            caller.add_done_callback(self._on_end)

    async def _shake_hands(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        configure(connection)
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_MS / 1000):
            await self._let_in(connection)

    def _send_away(self, caller: asyncio.Task[None]) -> None:
        del self._callers[caller]
        caller.cancel()

    def _on_end(self, caller: asyncio.Task[None]) -> None:
        self._callers.pop(caller, None)
        connection, host = self._connections.pop(caller)
        error = None if caller.cancelled() else caller.exception()
        match error:
            case None if not caller.cancelled():
                return  # it was let in
            case None:
                reason = "it had to make room for others, or this side closed"
            case TimeoutError():
                reason = "it did not finish the handshake in time"
            case OSError() | ProtocolError():
                reason = str(error)
            case _:
                reason = repr(error)
                logger.error("a handshake failed: %s", reason, exc_info=error)
        connection.close()
        self._refused.add(f"{host}: {reason}")
