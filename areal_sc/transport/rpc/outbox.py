"""Replies on their way to callers, some of which do not read.

consumes     replies
waits for    room in the caller's queue, at most `timeout_s`; only its own replies wait
unblocked by a timer that tries again; there is none while nobody is behind
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from areal_sc.errors import PeerLost
from areal_sc.transport.sockets.refusals import Refusals
from areal_sc.transport.sockets.zmq_socket import SEND_RETRY_S, AsyncSocket

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES: Final = 64 << 20
"""What may wait for one caller beside ZMQ's own queue; further replies are dropped. It holds the
replies to as many requests as a server runs, should all of them end at once."""

_ENTRY_BYTES: Final = 200
"""What a waiting reply takes beside its own bytes."""


@dataclass(slots=True)
class _Backlog:
    """What waits for one caller; `since_s` is when it last took a reply."""

    since_s: float
    num_bytes: int = 0
    replies: deque[bytes] = field(default_factory=deque)


class Outbox:
    """Sends replies in order; drops those whose caller has left or does not read.

    Args:
        socket: a ROUTER that reports peers it cannot reach.
        node_id: the server's name, for messages.
        timeout_s: how long a caller may take nothing before what waits for it is dropped.

    Attributes:
        dropped: replies that nobody will get.
    """

    def __init__(self, socket: AsyncSocket, *, node_id: str, timeout_s: float) -> None:
        self.dropped = Refusals(logger, "replies_dropped", node_id, level=logging.INFO)
        self._socket = socket
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._backlogs: dict[bytes, _Backlog] = {}
        self._retry: asyncio.TimerHandle | None = None

    def send(self, caller: bytes, reply: bytes) -> None:
        """Sends a reply now or, while the caller's queue is full, later."""
        backlog = self._backlogs.get(caller)
        if backlog is None:
            if self._is_settled(caller, reply):
                return
            backlog = self._backlogs[caller] = _Backlog(self._loop.time())
        num_bytes = backlog.num_bytes + _ENTRY_BYTES + len(reply)
        if num_bytes > MAX_WAITING_BYTES:
            self.dropped.add(f"caller {caller.hex()} reads slower than it asks")
            return
        backlog.num_bytes = num_bytes
        backlog.replies.append(reply)
        if self._retry is None:
            self._retry = self._loop.call_later(SEND_RETRY_S, self._try_again)

    def close(self) -> None:
        """Gives up what waits."""
        if self._retry is not None:
            self._retry.cancel()
        for backlog in self._backlogs.values():
            self.dropped.add("the server ends", len(backlog.replies))
        self._backlogs.clear()

    def _try_again(self) -> None:
        now_s = self._loop.time()
        for caller, backlog in list(self._backlogs.items()):
            replies = backlog.replies
            while replies and self._is_settled(caller, replies[0]):
                backlog.num_bytes -= _ENTRY_BYTES + len(replies.popleft())
                backlog.since_s = now_s
            if now_s - backlog.since_s >= self._timeout_s:
                reason = f"caller {caller.hex()} read nothing for {self._timeout_s:g} s"
                self.dropped.add(reason, len(replies))
                replies.clear()
            if not replies:
                del self._backlogs[caller]
        self._retry = None
        if self._backlogs:
            self._retry = self._loop.call_later(SEND_RETRY_S, self._try_again)

    def _is_settled(self, caller: bytes, reply: bytes) -> bool:
        """Whether the reply needs no further attempt; False where there is no room for it."""
        try:
            return self._socket.send_nowait([caller, reply])
        except PeerLost:
            self.dropped.add(f"caller {caller.hex()} has left")
            return True
