"""What one process may have asked for, of all owners together, and not yet received.

consumes     owners' connections that want to ask; credit that comes back
waits for    nothing
unblocked by replies, or the ends of connections: both give credit back

A thousand owners that answered at once would fill every buffer on the way to one network card.
Connections take turns, one request each, so an owner that is slow or silent holds as much as its
outstanding requests, and the others share the rest.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

MAX_INFLIGHT_BYTES: Final = 256 << 20
"""Far more than the fastest card receives while a request travels and is answered."""


class Asker(Protocol):
    """A connection to an owner."""

    def ask(self) -> int | None:
        """Sends one request, and returns its payload in bytes; None: it has none to send now."""


class Credits:
    """Used from one event loop.

    Args:
        max_bytes: outstanding at one time; one request is always allowed.
        request_bytes: most that one request asks for.

    Attributes:
        outstanding_bytes: asked for, and not given back.
    """

    def __init__(self, max_bytes: int, request_bytes: int) -> None:
        self.outstanding_bytes = 0
        self._max_bytes = max_bytes
        self._request_bytes = request_bytes
        self._line: dict[Asker, None] = {}  # in the order of their turns
        self._is_scheduled = False

    def want(self, asker: Asker) -> None:
        """The asker gets its turn, in a later turn of the event loop, when there is credit."""
        self._line[asker] = None
        self._serve_soon()

    def give_back(self, num_bytes: int) -> None:
        """Takes back credit for bytes that have arrived, or will not."""
        self.outstanding_bytes -= num_bytes
        self._serve_soon()

    def _serve_soon(self) -> None:
        """Once a turn: what several pulls submit in one turn shares requests."""
        if self._line and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        self._is_scheduled = False
        room = max(self._max_bytes - self._request_bytes, 0)
        while self._line and self.outstanding_bytes <= room:
            asker = next(iter(self._line))
            del self._line[asker]
            num_bytes = asker.ask()
            if num_bytes is not None:
                self.outstanding_bytes += num_bytes
                self._line[asker] = None
