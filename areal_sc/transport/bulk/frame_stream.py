"""One end of a ZMTP connection, which moves large frames without a copy in between.

libzmq receives every message on a thread of its own into memory of its own, from where it has to
be copied, and sends through such a thread: together half of the CPU time of a bulk transfer. Here
the event loop reads and writes the socket; whoever uses the stream says of each incoming frame
where its bytes go, and of each outgoing one where they lie. The other end may be a ZMQ socket.

consumes     the connection's bytes, as the kernel has them; messages to send
waits for    readiness of its file descriptor; frames to send are made when there is room for them
unblocked by the peer, or the end of the connection

What is spoken is ZMTP 3.1 (https://rfc.zeromq.org/spec/37); `handshake` has what comes before.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, Protocol

from areal_sc.errors import ProtocolError
from areal_sc.transport.bulk.handshake import (
    COMMAND_FRAME,
    LONG_FRAME,
    MAX_COMMAND_BYTES,
    command,
)
from areal_sc.transport.bulk.turns import Turns
from areal_sc.transport.socket import Buffer

logger = logging.getLogger(__name__)

Outgoing = tuple[Sequence[Buffer], bool]
"""The parts of a frame, and whether another frame of its message follows."""

_READS_PER_MOVE: Final = 4
"""Of a frame and its neighbours: the head, what is missing of it, and once more for each."""

_STAGING_BYTES: Final = 16 << 10
"""At most this many bytes of a large frame are copied twice: those that come with its head."""

_MAX_LOW_WATER_BYTES: Final = 1 << 20
"""Within a large frame the kernel reports no readiness before so much of it, or its rest, is there:
every wake-up costs both ends as much as moving some 20 KiB."""

_WINDOW_LOW_WATERS: Final = 4
"""The window must hold the low water mark and more: a sender that finds less room than a segment
sends nothing, and a reader that waits for more than is there makes none, until a timer fires."""

_MAX_PLACES: Final = 64
"""Of one read or write; the kernel allows 1,024."""

_GATHERED_BYTES: Final = 64 << 10
"""Frames are sent together up to this size: a system call costs as much as copying some 20 KiB."""

_MORE_FRAMES: Final = 1
_ALL_FLAGS: Final = _MORE_FRAMES | LONG_FRAME | COMMAND_FRAME
_MORE_COMMANDS: Final = _MORE_FRAMES | COMMAND_FRAME
"""Flags that never come together."""

_NOTHING: Final = memoryview(b"")
_PING, _PONG = b"\x04PING", b"\x04PONG"
_PING_TTL: Final = bytes(2)
"""Tenths of seconds after which the peer should give us up; 0: it decides for itself."""


class FrameSink(Protocol):
    """Who takes the frames; called on the event loop."""

    def places(self, num_bytes: int) -> list[memoryview]:
        """Memory of just that size together, none of it empty, for the next frame.

        Raises: ProtocolError: no correct peer sends such a frame; ends the connection.
        """
        ...

    def on_frame(self, *, has_more: bool) -> None:
        """The frame is in its places; `has_more`: another one of its message follows.

        Raises: ProtocolError: no correct peer sends it now; ends the connection.
        """
        ...

    def on_lost(self, reason: str) -> None:
        """Nothing more comes. Called at most once, and not after `close`."""
        ...


class FrameStream:
    """Used on the running event loop.

    Args:
        connection: non-blocking; the handshake is over; owned from here on.
        sink: takes what arrives, from the next turn of the event loop on.
        turns: those of all connections on the event loop.
        window_bytes: that may be on their way to us at one time.

    Attributes:
        moved_bytes: received, or taken by the kernel to be sent; without our own commands, which it
            takes also when the peer is gone.
    """

    def __init__(
        self, connection: socket.socket, sink: FrameSink, turns: Turns, window_bytes: int = 0
    ) -> None:
        self.moved_bytes = 0
        self._socket = connection
        self._sink = sink
        self._turns = turns
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._is_receiving = False  # it has asked for a turn to
        self._is_sending = False
        self._staging = memoryview(bytearray(_STAGING_BYTES))
        self._num_staged = 0  # bytes of a frame's head that is not whole yet
        self._flags = 0  # of the frame that is being received
        self._places: deque[memoryview] = deque()  # of what is missing of it
        self._missing = 0
        self._command = _NOTHING
        self._low_water = 1
        self._max_low_water = _grown_window(connection, window_bytes) // _WINDOW_LOW_WATERS
        self._outbox: deque[Iterator[Outgoing]] = deque()  # messages, the first one perhaps begun
        self._unsent: deque[memoryview] = deque()  # of frames that were made
        self._command_bytes = 0  # at the beginning of what is unsent
        self._awaits_room = False
        self._loop.add_reader(connection, self._on_readable)

    @property
    def num_waiting(self) -> int:
        """Messages whose last frame was not made yet."""
        return len(self._outbox)

    def send(self, message: Iterable[Outgoing]) -> None:
        """Queues a message of one frame or more.

        Its frames are asked for one by one, when the kernel has room: for a peer that does not
        read nothing is made. How many messages may wait is for the caller to bound.
        """
        if self._is_closed:
            return
        self._outbox.append(iter(message))
        self._send_soon()

    def ping(self) -> None:
        """Asks for a sign of life, unless there is something else to send."""
        self._send_command(_PING + _PING_TTL)

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
        if not self._is_receiving:
            self._is_receiving = True
            self._turns.ask(self._receive)

    def _receive(self) -> bool:
        """Takes about a frame; tells whether there may be more."""
        has_more = False
        try:
            for _ in range(_READS_PER_MOVE):
                has_more = not self._is_closed and self._read()
                if not has_more:
                    break
        except BlockingIOError:
            has_more = False
        except (OSError, ProtocolError) as error:
            self._lose(str(error))
        except Exception as error:  # the boundary to the sink: whoever waits for a frame must fail
            logger.exception("a bulk stream ends")
            self._lose(repr(error))
        self._is_receiving = has_more and not self._is_closed
        if not self._is_closed and not has_more:
            self._set_low_water()
        return self._is_receiving

    def _set_low_water(self) -> None:
        """Safe because the socket never blocks: a blocking read may have taken some of the bytes
        that the kernel still waits for."""
        low_water = 1
        if self._missing > _STAGING_BYTES:
            low_water = max(1, min(self._missing, self._max_low_water, _MAX_LOW_WATER_BYTES))
        if low_water != self._low_water:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
            self._low_water = low_water

    def _read(self) -> bool:
        """Reads once; tells whether there may be more now."""
        if not self._missing:
            return self._read_heads()
        if len(self._places) == 1:
            num_bytes = self._received(self._socket.recv_into(self._places[0]))
        else:
            places = islice(self._places, _MAX_PLACES)
            num_bytes = self._received(self._socket.recvmsg_into(places)[0])
        self._advance(num_bytes)
        if self._missing:
            return False
        self._end_frame()
        return True

    def _read_heads(self) -> bool:
        """The head of the next frame, and what came with it: small frames whole."""
        room = self._staging[self._num_staged :]
        num_bytes = self._received(self._socket.recv_into(room))
        staged = self._staging[: self._num_staged + num_bytes]
        position = 0
        while position < len(staged) and not self._is_closed:
            start = self._begin_frame(staged, position)
            if start is None:
                break
            position = start + self._take_staged(staged[start:])
            if self._missing:
                break
            self._end_frame()
        rest = bytes(staged[position:])
        self._staging[: len(rest)] = rest
        self._num_staged = len(rest)
        return num_bytes == len(room) or self._missing > 0

    def _take_staged(self, staged: memoryview) -> int:
        """Moves to the frame's places what came with its head; returns how many bytes."""
        num_bytes = taken = min(self._missing, len(staged))
        while num_bytes:
            part = staged[taken - num_bytes : taken][: len(self._places[0])]
            self._places[0][: len(part)] = part
            self._advance(len(part))
            num_bytes -= len(part)
        return taken

    def _advance(self, num_bytes: int) -> None:
        """So many bytes have been put into their places."""
        self._missing -= num_bytes
        _advance(self._places, num_bytes)

    def _received(self, num_bytes: int) -> int:
        if not num_bytes:
            raise ConnectionError("the connection ended")
        self.moved_bytes += num_bytes
        return num_bytes

    def _begin_frame(self, staged: memoryview, position: int) -> int | None:
        """Finds a place for the frame whose head is there; returns where its bytes begin.

        None: the head is not whole yet.
        """
        flags = staged[position]
        if flags > _ALL_FLAGS or flags & _MORE_COMMANDS == _MORE_COMMANDS:
            raise ProtocolError(f"frame flags {flags:#x} mean nothing in ZMTP")
        end = position + (9 if flags & LONG_FRAME else 2)
        if end > len(staged):
            return None
        num_bytes = int.from_bytes(staged[position + 1 : end], "big")
        self._flags = flags
        if flags & COMMAND_FRAME:
            if num_bytes > MAX_COMMAND_BYTES:
                raise ProtocolError(f"a command of {num_bytes} bytes")
            self._command = memoryview(bytearray(num_bytes))
            self._places = deque([self._command])
        else:
            self._places = deque(self._sink.places(num_bytes))
        self._missing = num_bytes
        return end

    def _end_frame(self) -> None:
        self._places.clear()  # an empty view would keep its memory
        if not self._flags & COMMAND_FRAME:
            self._sink.on_frame(has_more=bool(self._flags & _MORE_FRAMES))
        elif self._command[: len(_PING)] == _PING:
            self._send_command(_PONG + self._command[len(_PING + _PING_TTL) :])

    def _send_command(self, body: bytes) -> None:
        """Not while anything else is unsent: then the peer does not read, and sees us alive."""
        if not (self._is_closed or self._unsent or self._outbox):
            self._unsent.append(memoryview(command(body)))
            self._command_bytes = len(self._unsent[0])
            self._send_soon()

    def _send_soon(self) -> None:
        if not self._is_sending and not self._awaits_room:
            self._is_sending = True
            self._turns.ask(self._send_some)

    def _send_some(self) -> bool:
        """Gives the kernel about a frame; tells whether it may take more."""
        has_room = True
        try:
            self._make_frames()
            if self._unsent:
                num_parts = min(len(self._unsent), _MAX_PLACES)
                num_left = len(self._unsent) - num_parts
                num_bytes = self._socket.sendmsg(islice(self._unsent, num_parts))
                self.moved_bytes += max(num_bytes - self._command_bytes, 0)
                self._command_bytes = max(self._command_bytes - num_bytes, 0)
                _advance(self._unsent, num_bytes)
                has_room = len(self._unsent) == num_left
        except BlockingIOError:
            has_room = False
        except OSError as error:
            self._lose_soon(str(error))
        except Exception as error:  # the boundary to who makes the frames: the peer must not wait
            logger.exception("a bulk stream ends")
            self._lose_soon(repr(error))
        has_more = bool(self._unsent or self._outbox) and not self._is_closed
        self._is_sending = has_more and has_room
        if not self._is_sending:
            self._await_room(has_more)
        return self._is_sending

    def _make_frames(self) -> None:
        """Adds frames to what is unsent until it is worth a system call."""
        num_bytes = sum(map(len, self._unsent))
        while self._outbox and num_bytes < _GATHERED_BYTES and len(self._unsent) < _MAX_PLACES:
            parts, has_more = next(self._outbox[0])
            if not has_more:
                self._outbox.popleft()
            size = sum(map(len, parts))
            flags = _MORE_FRAMES if has_more else 0
            if size < 256:
                head = bytes([flags, size])
            else:
                head = bytes([flags | LONG_FRAME]) + size.to_bytes(8, "big")
            self._unsent.append(memoryview(head))
            self._unsent.extend(memoryview(part) for part in parts if len(part))
            num_bytes += len(head) + size

    def _await_room(self, is_needed: bool) -> None:
        if is_needed == self._awaits_room or self._is_closed:
            return
        self._awaits_room = is_needed
        if is_needed:
            self._loop.add_writer(self._socket, self._on_writable)
        else:
            self._loop.remove_writer(self._socket)

    def _on_writable(self) -> None:
        if not self._is_sending:
            self._is_sending = True
            self._turns.ask(self._send_some)

    def _lose_soon(self, reason: str) -> None:
        """Not at once: whoever sends does not expect to hear of the end meanwhile."""
        self._outbox.clear()
        self._unsent.clear()
        self._loop.call_soon(self._lose, reason)

    def _lose(self, reason: str) -> None:
        if not self._is_closed:
            self.close()
            self._sink.on_lost(reason)


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
