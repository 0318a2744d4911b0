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

MAX_CALLERS: Final = 256
"""In the middle of a handshake at one time."""

_BACKLOG: Final = 1024
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
        self._socket = socket.create_server((host, 0), backlog=_BACKLOG)
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._callers: dict[asyncio.Task[None], None] = {}  # in the order of their coming
        self._accepting = asyncio.create_task(self._accept(), name=f"bulk port {self.port}")
        self._accepting.add_done_callback(_report_failure)

    async def close(self) -> None:
        """Lets nobody in any more; connections that were let in stay."""
        tasks = [self._accepting, *self._callers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # `_report_failure` has told of them
        self._socket.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, (host, *_) = await loop.sock_accept(self._socket)
            except OSError as error:
                self._refused.add(f"a connection could not be taken: {error}")
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            if len(self._callers) == MAX_CALLERS:
                longest = next(iter(self._callers))
                longest.cancel()
                await asyncio.wait([longest])
            caller = asyncio.create_task(self._shake_hands(connection, host))
            self._callers[caller] = None
            caller.add_done_callback(self._on_end)
            await asyncio.sleep(0)  # a flood of connections must not starve the event loop

    async def _shake_hands(self, connection: socket.socket, host: str) -> None:
        try:
            connection.setblocking(False)
            configure(connection)
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_MS / 1000):
                await self._let_in(connection)
        except TimeoutError:
            self._refuse(connection, f"{host}: it did not finish the handshake in time")
        except (OSError, ProtocolError) as error:
            self._refuse(connection, f"{host}: {error}")
        except BaseException as error:
            self._refuse(connection, f"{host}: {error!r}")
            raise

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        connection.close()
        self._refused.add(reason)

    def _on_end(self, caller: asyncio.Task[None]) -> None:
        del self._callers[caller]
        _report_failure(caller)


def _report_failure(task: asyncio.Task[None]) -> None:
    """Nobody awaits these tasks before the end of the listener."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("bulk_listener task=%s failed", task.get_name(), exc_info=error)
