"""One end of a connection of the data plane.

Content is received where it belongs, and sent from where it lies. (ZMQ's library receives every
message in memory of its own, on a thread of its own: a pull then takes 1.2 to 1.6 times as long on
two cores. The transports of asyncio copy what the kernel does not take at once, and receive into
one place at a time.)

consumes     the connection's bytes, as the kernel has them; messages to send
waits for    readiness of the socket; a message is made when there is room for it
unblocked by the peer, or the end of the connection
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final, Protocol

from areal_sc.errors import ProtocolError
from areal_sc.transport.bulk.messages import HEAD
from areal_sc.transport.sockets.interface import family_of
from areal_sc.transport.sockets.zmq_socket import (
    HANDSHAKE_TIMEOUT_MS,
    KEEPALIVE_EVERY_S,
    KEEPALIVE_IDLE_S,
    KEEPALIVE_PROBES,
    UNSENT_TIMEOUT_MS,
    Buffer,
    parsed_address,
)

logger = logging.getLogger(__name__)

_READS_PER_TURN: Final = 4
_TURN_BYTES: Final = 1 << 20
"""Most bytes of one connection in one read or write. Other connections and timers have their turn
after a few of these; otherwise RPCs would wait for hundreds of milliseconds where one event loop
has tens of connections."""

_STAGING_BYTES: Final = 16 << 10
"""At most this many bytes of a content are copied twice: those that come with its head."""

_MAX_LOW_WATER_BYTES: Final = 1 << 20
"""Within a large content the kernel reports no readiness before so much of it, or its rest, is
there. Each wake-up costs both ends as much as moving some 20 KiB: pulls of 16 MiB or more would
take a tenth more CPU."""

_WINDOW_LOW_WATERS: Final = 4
"""The receive window holds the low water mark several times: a sender that finds less room than a
segment sends nothing, and a reader that waits for more than is there makes none."""

_MAX_BUFFERS: Final = 64
"""Most buffers of messages in one read or write; the kernel allows 1,024."""

_GATHERED_BYTES: Final = 64 << 10
"""Messages are sent together up to this size: a system call costs as much as copying 20 KiB."""


class MessageSink(Protocol):
    """A receiver of messages. Any error that it raises ends the connection."""

    def on_head(self, kind: int, num_bytes: int) -> Sequence[memoryview]:
        """Memory for the content, in parts, of just its size."""

    def on_message(self, kind: int, tag: bytes) -> None:
        """The content is there."""

    def on_lost(self, reason: Exception) -> None:
        """Nothing more comes; a ProtocolError is the peer's fault. Not called after `close`."""


class MessageStream:
    """Used on the running event loop.

    Args:
        connection: non-blocking; owned from here on.
        sink: takes what arrives, from the next turn of the event loop on.

    Attributes:
        moved_bytes: those that the kernel has given and taken.
    """

    def __init__(self, connection: socket.socket, sink: MessageSink) -> None:
        self.moved_bytes = 0
        self._socket = connection
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._staging = memoryview(bytearray(_STAGING_BYTES))
        self._num_staged = 0  # bytes of a head that is not whole yet
        self._head: tuple[int, bytes] | None = None  # kind and tag, while content is missing
        self._places: deque[memoryview] = deque()  # for the missing content
        self._num_missing = 0
        self._outbox: deque[Callable[[], Iterable[Buffer]]] = deque()
        self._unsent: deque[memoryview] = deque()  # of messages that were made
        self._awaits_room = False
        self._low_water = 1
        self._max_low_water = 0  # not known yet
        self._seen_bytes = 0
        self._num_idle_looks = 0
        self._loop.add_reader(connection, self._on_readable)

    def count_idle_looks(self) -> int:
        """How many calls in a row, this one included, have found that nothing moved since."""
        is_idle = self.moved_bytes == self._seen_bytes
        self._num_idle_looks = self._num_idle_looks + 1 if is_idle else 0
        self._seen_bytes = self.moved_bytes
        return self._num_idle_looks

    @property
    def num_waiting(self) -> int:
        """Messages that were not made yet."""
        return len(self._outbox)

    def send(self, make: Callable[[], Iterable[Buffer]]) -> None:
        """Queues a message; how many may wait is for the caller to bound.

        Args:
            make: gives the message in parts; called when the kernel has room: for a peer that does
                not read nothing is made.
        """
        if not self._is_closed:
            self._outbox.append(make)
            if not self._awaits_room:
                self._send_some()

    def close(self) -> None:
        """Ends the connection; the sink hears nothing more."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        for kept in (self._places, self._outbox, self._unsent):
            kept.clear()

    def _on_readable(self) -> None:
        try:
            for _ in range(_READS_PER_TURN):
                if self._is_closed or not self._read():
                    break
        except BlockingIOError:
            pass
        except Exception as error:  # the boundary to the sink: whoever waits for it must fail
            self._lose(error)
        if not self._is_closed:
            self._set_low_water()

    def _read(self) -> bool:
        """Reads once; tells whether there may be more now."""
        buffers = _first(self._places, _TURN_BYTES)
        room = self._staging[self._num_staged :]
        is_rest = sum(map(len, buffers)) == self._num_missing
        if is_rest:
            buffers.append(room)
        num_bytes = self._socket.recvmsg_into(buffers)[0]
        if not num_bytes:
            raise ConnectionError("the connection ended")
        self.moved_bytes += num_bytes
        in_place = min(num_bytes, self._num_missing)
        self._arrived(in_place)
        if num_bytes > in_place:
            self._unpack(self._staging[: self._num_staged + num_bytes - in_place])
        return self._num_missing > 0 or num_bytes == in_place + len(room)

    def _unpack(self, staged: memoryview) -> None:
        """Takes heads, and the beginnings of contents that came with them."""
        while not self._is_closed:
            if self._num_missing:
                part = staged[: len(self._places[0])]
                if not part:
                    break
                self._places[0][: len(part)] = part
                staged = staged[len(part) :]
                self._arrived(len(part))
            elif len(staged) >= HEAD.size:
                num_bytes, kind, tag = HEAD.unpack_from(staged)
                staged = staged[HEAD.size :]
                self._head = kind, tag
                self._places.extend(filter(len, self._sink.on_head(kind, num_bytes)))
                self._num_missing = num_bytes
                self._arrived(0)
            else:
                break
        self._num_staged = len(staged)
        self._staging[: len(staged)] = bytes(staged)

    def _arrived(self, num_bytes: int) -> None:
        """Notes that `num_bytes` bytes of the content have been put into their places."""
        self._num_missing -= num_bytes
        _advance(self._places, num_bytes)
        if not self._num_missing and self._head is not None:
            head, self._head = self._head, None
            self._sink.on_message(*head)

    def _set_low_water(self) -> None:
        """Safe because the socket never blocks: a blocking read may have taken some of the bytes
        that the kernel still waits for.

        Linux makes room for its low water mark in the receive buffer; asking for the room itself
        (SO_RCVBUF) allows less by default, and ends the buffer's own growth.
        """
        low_water = 1
        option = socket.SOL_SOCKET, socket.SO_RCVLOWAT
        if self._num_missing > _STAGING_BYTES:
            if not self._max_low_water:
                self._socket.setsockopt(*option, _WINDOW_LOW_WATERS * _MAX_LOW_WATER_BYTES)
                window = self._socket.getsockopt(*option)  # the system may allow less
                self._max_low_water = window // _WINDOW_LOW_WATERS
            low_water = min(self._num_missing, self._max_low_water)
        if low_water != self._low_water:
            self._socket.setsockopt(*option, low_water)
            self._low_water = low_water

    def _send_some(self) -> None:
        """Gives the kernel about a message; the rest waits for the next turn of the event loop."""
        try:
            num_bytes = sum(map(len, self._unsent))
            while self._outbox and num_bytes < _GATHERED_BYTES:
                parts = [memoryview(part) for part in self._outbox.popleft()() if len(part)]
                self._unsent.extend(parts)
                num_bytes += sum(map(len, parts))
            sent = self._socket.sendmsg(_first(self._unsent, _TURN_BYTES))
            self.moved_bytes += sent
            _advance(self._unsent, sent)
        except BlockingIOError:
            pass
        except Exception as error:  # also the boundary to who makes messages
            self._outbox.clear()
            self._unsent.clear()
            # not at once: whoever sends does not expect to hear of the end meanwhile
            self._loop.call_soon(self._lose, error)
        is_needed = bool(self._unsent or self._outbox)
        if is_needed != self._awaits_room:
            self._awaits_room = is_needed
            if is_needed:
                self._loop.add_writer(self._socket, self._send_some)
            else:
                self._loop.remove_writer(self._socket)

    def _lose(self, reason: Exception) -> None:
        if not self._is_closed:
            if not isinstance(reason, OSError | ProtocolError):
                logger.error("a bulk connection ends", exc_info=reason)
            self.close()
            self._sink.on_lost(reason)


async def connect(address: str) -> socket.socket:
    """A non-blocking connection to an address like tcp://10.0.0.1:5555.

    Raises: OSError: nobody listens there. TransportError: the address is malformed.
    """
    host, port = parsed_address(address)
    connection = socket.socket(family_of(host), socket.SOCK_STREAM)
    try:
        configure(connection)
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_MS / 1000):
            await asyncio.get_running_loop().sock_connect(connection, (host, port))
    except BaseException:
        connection.close()
        raise
    return connection


def configure(connection: socket.socket) -> None:
    """Makes a connection non-blocking, undelayed, and limited in time like `configure_socket`."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNSENT_TIMEOUT_MS)


def _first(views: Iterable[memoryview], num_bytes: int) -> list[memoryview]:
    """The first `num_bytes` bytes, or fewer, of at most `_MAX_BUFFERS` of the views."""
    found = []
    for view in islice(views, _MAX_BUFFERS):
        found.append(view[:num_bytes])
        num_bytes -= len(found[-1])
        if not num_bytes:
            break
    return found


def _advance(views: deque[memoryview], num_bytes: int) -> None:
    """Takes away the first bytes."""
    while num_bytes:
        view = views.popleft()
        if num_bytes < len(view):
            views.appendleft(view[num_bytes:])
        num_bytes -= min(num_bytes, len(view))
