"""One end of a connection of the data plane: messages of a small header and a large payload.

    message   [ length of the header (4) | length of the payload (4) ][ header ][ payload ]

Payload is received where it belongs, and sent from where it lies: the event loop reads and writes
the socket itself. (ZMQ's library receives every message in memory of its own, on a thread of its
own, from where it has to be copied: on two cores a pull then takes 1.2 to 1.6 times as long.)

consumes     the connection's bytes, as the kernel has them; messages to send
waits for    readiness of its file descriptor; a message is made when there is room for it
unblocked by the peer, or the end of the connection
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final, Protocol

from areal_sc.errors import PeerLost, ProtocolError
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
"""Of one connection, received or sent before other connections and timers have their turn: with
tens of them on one event loop RPCs would wait for hundreds of milliseconds."""

_STAGING_BYTES: Final = 16 << 10
"""At most this many bytes of a payload are copied twice: those that come with its header."""

_MAX_LOW_WATER_BYTES: Final = 1 << 20
"""Within a large payload the kernel reports no readiness before so much of it, or its rest, is
there: every wake-up costs both ends as much as moving some 20 KiB."""

_WINDOW_LOW_WATERS: Final = 4
"""The window must hold the low water mark and more: a sender that finds less room than a segment
sends nothing, and a reader that waits for more than is there makes none, until a timer fires."""

_MAX_PLACES: Final = 64
"""Of one read or write; the kernel allows 1,024."""

_GATHERED_BYTES: Final = 64 << 10
"""Messages are sent together up to this size: a system call costs as much as copying 20 KiB."""

_PREFIX: Final = struct.Struct("<II")


class MessageSink(Protocol):
    """Who takes the messages; called on the event loop. Any error that it raises ends the
    connection."""

    def on_header(self, header: memoryview, payload_bytes: int) -> Sequence[memoryview]:
        """Memory of just the payload's size, all parts together."""
        ...

    def on_message(self) -> None:
        """The payload is there; called for messages without one, too."""
        ...

    def on_lost(self, reason: Exception) -> None:
        """Nothing more comes; a ProtocolError is the peer's fault. Called at most once, and not
        after `close`."""
        ...


class MessageStream:
    """Used on the running event loop.

    Args:
        connection: non-blocking; owned from here on.
        sink: takes what arrives, from the next turn of the event loop on.
        max_header_bytes: a longer header ends the connection; may be changed.
        window_bytes: that may be on their way to us at one time.

    Attributes:
        received_bytes, sent_bytes: those that the kernel has given, and taken.
    """

    def __init__(
        self,
        connection: socket.socket,
        sink: MessageSink,
        *,
        max_header_bytes: int,
        window_bytes: int = 0,
    ) -> None:
        self.received_bytes = 0
        self.sent_bytes = 0
        self.max_header_bytes = max_header_bytes
        self._socket = connection
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._staging = memoryview(bytearray(_STAGING_BYTES))
        self._num_staged = 0  # bytes of a message's prefix that is not whole yet
        self._header: memoryview | None = None  # while it is being received
        self._payload_bytes = 0
        self._places: deque[memoryview] = deque()  # of what is missing of the header or payload
        self._missing = 0
        self._low_water = 1
        self._max_low_water = _grown_window(connection, window_bytes) // _WINDOW_LOW_WATERS
        self._outbox: deque[Callable[[], Iterable[Buffer]]] = deque()
        self._unsent: deque[memoryview] = deque()  # of messages that were made
        self._awaits_room = False
        self._loop.add_reader(connection, self._on_readable)

    @property
    def moved_bytes(self) -> int:
        """In both directions."""
        return self.received_bytes + self.sent_bytes

    @property
    def num_waiting(self) -> int:
        """Messages that were not made yet."""
        return len(self._outbox)

    def send(self, make: Callable[[], Iterable[Buffer]]) -> None:
        """Queues a message; how many may wait is for the caller to bound.

        Args:
            make: gives the message's parts, of which `framed` makes the first one; called when the
                kernel has room: for a peer that does not read nothing is made.
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
        except (OSError, ProtocolError) as error:
            self._lose(error)
        except Exception as error:  # the boundary to the sink: whoever waits for it must fail
            logger.exception("a bulk connection ends")
            self._lose(error)
        if not self._is_closed:
            self._set_low_water()

    def _read(self) -> bool:
        """Reads once; tells whether there may be more now."""
        if self._missing:
            if len(self._places) == 1:
                place = self._places[0][:_TURN_BYTES]
                num_bytes = self._received(self._socket.recv_into(place))
            else:
                places = _first(self._places, _TURN_BYTES)
                num_bytes = self._received(self._socket.recvmsg_into(places)[0])
            self._advance(num_bytes)
            return not self._missing
        room = self._staging[self._num_staged :]
        num_bytes = self._received(self._socket.recv_into(room))
        staged = self._staging[: self._num_staged + num_bytes]
        while not self._is_closed and (self._missing or len(staged) >= _PREFIX.size):
            if self._missing:
                part = staged[: len(self._places[0])]
                if not len(part):
                    break
                self._places[0][: len(part)] = part
                staged = staged[len(part) :]
                self._advance(len(part))
            else:
                self._begin(*_PREFIX.unpack_from(staged))
                staged = staged[_PREFIX.size :]
        self._num_staged = len(staged)
        self._staging[: len(staged)] = bytes(staged)
        return num_bytes == len(room) or self._missing > 0

    def _received(self, num_bytes: int) -> int:
        if not num_bytes:
            raise ConnectionError("the connection ended")
        self.received_bytes += num_bytes
        return num_bytes

    def _begin(self, header_bytes: int, payload_bytes: int) -> None:
        if not 0 < header_bytes <= self.max_header_bytes:
            raise ProtocolError(f"a header has 1 to {self.max_header_bytes} bytes")
        self._header = memoryview(bytearray(header_bytes))
        self._payload_bytes = payload_bytes
        self._expect([self._header])

    def _expect(self, places: Iterable[memoryview]) -> None:
        self._places = deque(place for place in places if len(place))
        self._missing = sum(map(len, self._places))

    def _advance(self, num_bytes: int) -> None:
        """So many bytes have been put into their places."""
        self._missing -= num_bytes
        _advance(self._places, num_bytes)
        if self._missing:
            return
        if self._header is not None:
            header, self._header = self._header, None
            self._expect(self._sink.on_header(header, self._payload_bytes))
        if not self._missing and not self._is_closed:
            self._sink.on_message()

    def _set_low_water(self) -> None:
        """Safe because the socket never blocks: a blocking read may have taken some of the bytes
        that the kernel still waits for."""
        low_water = 1
        if self._missing > _STAGING_BYTES:
            low_water = max(1, min(self._missing, self._max_low_water, _MAX_LOW_WATER_BYTES))
        if low_water != self._low_water:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
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
            self.sent_bytes += sent
            _advance(self._unsent, sent)
        except BlockingIOError:
            pass
        except Exception as error:  # also the boundary to who makes messages
            if not isinstance(error, OSError):
                logger.exception("a bulk connection ends")
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
            self.close()
            self._sink.on_lost(reason)


def framed(header: bytes, payload: Sequence[Buffer] = ()) -> list[Buffer]:
    """The parts of a message, for `MessageStream.send`."""
    return [_PREFIX.pack(len(header), sum(map(len, payload))) + header, *payload]


async def connect(address: str) -> socket.socket:
    """A non-blocking connection.

    Args:
        address: like tcp://10.0.0.1:5555.

    Raises:
        PeerLost: nobody listens there.
        TransportError: the address is malformed.
    """
    host, port = parsed_address(address)
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        configure(connection)
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_MS / 1000):
            await asyncio.get_running_loop().sock_connect(connection, (host, port))
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):  # a TimeoutError, too
            raise PeerLost(f"no connection to {address}: {error or 'no answer'}") from error
        raise
    return connection


def configure(connection: socket.socket) -> None:
    """As `configure_socket` does it for ZMQ's connections."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNSENT_TIMEOUT_MS)


def _first(views: Iterable[memoryview], num_bytes: int) -> list[memoryview]:
    """So many bytes, or fewer, from the beginning."""
    found = []
    for view in islice(views, _MAX_PLACES):
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


def _grown_window(connection: socket.socket, num_bytes: int) -> int:
    """Makes the receive window so large, as far as the system allows; returns how large it is.

    Linux makes room for its low water mark in the receive buffer; asking for the room itself
    (SO_RCVBUF) allows less by default, and ends the buffer's own growth.
    """
    if num_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
        num_bytes = connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    return num_bytes
