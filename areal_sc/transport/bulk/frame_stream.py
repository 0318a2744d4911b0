"""A client's end of a ZMTP connection, which receives large frames where they belong.

libzmq receives every message on a thread of its own into memory of its own, from where it has to
be copied: a third of the CPU time of a bulk transfer. Here the event loop reads the socket, and
whoever uses the stream says of each frame where its bytes go. The other end is a ZMQ socket like
any other.

consumes     the connection's bytes, as the kernel has them
waits for    readiness of its file descriptor; what cannot be sent at once waits in memory
unblocked by the peer, or the end of the connection

What is spoken is ZMTP 3.1 (https://rfc.zeromq.org/spec/37), with PLAIN (spec/24) to be let in.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections import deque
from itertools import islice
from typing import Final, Protocol

from areal_sc.errors import PeerLost, ProtocolError
from areal_sc.transport.endpoint import (
    HANDSHAKE_TIMEOUT_MS,
    KEEPALIVE_EVERY_S,
    KEEPALIVE_IDLE_S,
    KEEPALIVE_PROBES,
    UNSENT_TIMEOUT_MS,
    parsed_address,
)

logger = logging.getLogger(__name__)

READS_PER_TURN: Final = 8
"""Then the rest of the event loop has its turn; a read is at most one frame."""

_STAGING_BYTES: Final = 16 << 10
"""Of a large frame as many bytes at most are copied once more: those that come with its head."""

_MAX_LOW_WATER_BYTES: Final = 1 << 20
"""Within a large frame the kernel reports no readiness before so much of it, or its rest, is there:
every wake-up costs both ends as much as moving some 20 KiB."""

_MAX_PLACES: Final = 64
"""Of one read; the kernel allows 1,024."""

_MAX_COMMAND_BYTES: Final = 1 << 10
_MORE, _LONG, _COMMAND = 1, 2, 4
_GREETING: Final = struct.Struct(">10s2B20s32x")
_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
_LENGTH: Final = struct.Struct(">Q")
_NOTHING: Final = memoryview(b"")
_PING, _PONG = b"\x04PING", b"\x04PONG"
_PING_TTL_BYTES: Final = 2


class FrameSink(Protocol):
    """Who takes the frames; called on the event loop."""

    def places(self, num_bytes: int) -> list[memoryview]:
        """Memory of just that size together, none of it empty, for the next frame.

        Raises: ProtocolError: no correct peer sends such a frame; ends the connection.
        """
        ...

    def on_frame(self, *, has_more: bool) -> None:
        """The frame is in its places; `has_more`: another one of its message follows."""
        ...

    def on_lost(self, reason: str) -> None:
        """Nothing more comes. Called at most once, and not after `close`."""
        ...


class FrameStream:
    """Made by `connect`; used on one event loop.

    Args:
        connection: greeted and admitted; owned from here on.
        sink: takes what arrives, from the next turn of the event loop on.
    """

    def __init__(self, connection: socket.socket, sink: FrameSink) -> None:
        self._socket = connection
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._peer = connection.getpeername()
        self._is_closed = False
        self._staging = memoryview(bytearray(_STAGING_BYTES))
        self._num_staged = 0  # bytes of a frame's head that is not whole yet
        self._flags = 0  # of the frame that is being received
        self._places: deque[memoryview] = deque()  # of what is missing of it
        self._missing = 0
        self._command = _NOTHING
        self._unsent = bytearray()
        self._low_water = 1
        self._loop.add_reader(connection, self._on_readable)

    @classmethod
    async def connect(cls, address: str, ticket: tuple[str, str], sink: FrameSink) -> FrameStream:
        """A stream from a ROUTER that admits by name and password.

        Args:
            address: like tcp://10.0.0.1:5555.
            ticket: name and password; each of 1 to 255 ASCII characters.

        Raises:
            PeerLost: nobody listens there, it speaks something else, or does not let us in.
            TransportError: the address is malformed.
        """
        host, port = parsed_address(address)
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            _configure(connection)
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_MS / 1000):
                await asyncio.get_running_loop().sock_connect(connection, (host, port))
                await _shake_hands(connection, ticket)
            return cls(connection, sink)
        except TimeoutError:
            connection.close()
            raise PeerLost("it did not answer the handshake") from None
        except (OSError, ProtocolError) as error:
            connection.close()
            raise PeerLost(f"no connection to {address}: {error}") from error
        except BaseException:
            connection.close()
            raise

    def send(self, frame: bytes) -> None:
        """Sends a message of one frame; what the kernel does not take now waits in memory.

        How much may wait is for the caller to bound: by the answers that it allows outstanding.
        """
        if self._is_closed:
            return
        head = bytes([0, len(frame)]) if len(frame) < 256 else b"\x02" + _LENGTH.pack(len(frame))
        self._write(head + frame)

    def close(self) -> None:
        """Ends the connection; the sink hears nothing more."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._places.clear()

    def _on_readable(self) -> None:
        try:
            for _ in range(READS_PER_TURN):
                if self._is_closed or not self._read():
                    break
        except BlockingIOError:
            pass
        except (OSError, ProtocolError) as error:
            self._lose(str(error))
        except Exception as error:  # the boundary to the sink: whoever waits for a frame must fail
            logger.exception("the stream to %s ends", self._peer)
            self._lose(repr(error))
        if not self._is_closed:
            self._set_low_water()

    def _set_low_water(self) -> None:
        """Safe because the socket never blocks: a blocking read may have taken some of the bytes
        that the kernel still waits for."""
        low_water = 1
        if self._missing > _STAGING_BYTES:
            low_water = min(self._missing, _MAX_LOW_WATER_BYTES)
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
        while num_bytes:
            place = self._places.popleft()
            if num_bytes < len(place):
                self._places.appendleft(place[num_bytes:])
            num_bytes -= min(num_bytes, len(place))

    def _received(self, num_bytes: int) -> int:
        if not num_bytes:
            raise ConnectionError("the connection ended")
        return num_bytes

    def _begin_frame(self, staged: memoryview, position: int) -> int | None:
        """Finds a place for the frame whose head is there; returns where its bytes begin.

        None: the head is not whole yet.
        """
        flags = staged[position]
        if flags & ~(_MORE | _LONG | _COMMAND) or flags & (_MORE | _COMMAND) == _MORE | _COMMAND:
            raise ProtocolError(f"frame flags {flags:#x} mean nothing in ZMTP")
        end = position + (9 if flags & _LONG else 2)
        if end > len(staged):
            return None
        num_bytes = int.from_bytes(staged[position + 1 : end], "big")
        self._flags = flags
        if flags & _COMMAND:
            if num_bytes > _MAX_COMMAND_BYTES:
                raise ProtocolError(f"a command of {num_bytes} bytes")
            self._command = memoryview(bytearray(num_bytes))
            self._places = deque([self._command])
        else:
            self._places = deque(self._sink.places(num_bytes))
        self._missing = num_bytes
        return end

    def _end_frame(self) -> None:
        self._places.clear()  # an empty view would keep its memory
        if not self._flags & _COMMAND:
            self._sink.on_frame(has_more=bool(self._flags & _MORE))
        elif self._command[: len(_PING)] == _PING and not self._unsent:  # else it does not read
            context = self._command[len(_PING) + _PING_TTL_BYTES :]
            self._write(_command(_PONG + context))

    def _write(self, data: bytes) -> None:
        if not self._unsent:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                pass
            except OSError as error:
                self._loop.call_soon(self._lose, str(error))
                return
            if not data:
                return
            self._loop.add_writer(self._socket, self._on_writable)
        self._unsent += data

    def _on_writable(self) -> None:
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(str(error))
            return
        if not self._unsent:
            self._loop.remove_writer(self._socket)

    def _lose(self, reason: str) -> None:
        if not self._is_closed:
            self.close()
            self._sink.on_lost(reason)


def _configure(connection: socket.socket) -> None:
    """As `configure_socket` does it for ZMQ's connections."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNSENT_TIMEOUT_MS)


async def _shake_hands(connection: socket.socket, ticket: tuple[str, str]) -> None:
    """Raises: ProtocolError: the peer speaks something else, or refuses the ticket."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, _GREETING.pack(_SIGNATURE, 3, 1, b"PLAIN"))
    greeting = await _read_exactly(connection, _GREETING.size)
    signature, major, _, mechanism = _GREETING.unpack(greeting)
    if signature[::9] != _SIGNATURE[::9] or major < 3:
        raise ProtocolError("it does not speak ZMTP 3")
    if mechanism.rstrip(b"\0") != b"PLAIN":
        raise ProtocolError("it does not admit by tickets")
    name, password = (part.encode("ascii") for part in ticket)
    hello = b"\x05HELLO" + bytes([len(name)]) + name + bytes([len(password)]) + password
    await loop.sock_sendall(connection, _command(hello))
    await _expect(connection, b"\x07WELCOME")
    metadata = _property(b"Socket-Type", b"DEALER") + _property(b"Identity", b"")
    await loop.sock_sendall(connection, _command(b"\x08INITIATE" + metadata))
    await _expect(connection, b"\x05READY")


async def _expect(connection: socket.socket, command: bytes) -> None:
    flags, *length = await _read_exactly(connection, 2)
    if flags & _LONG:
        length += await _read_exactly(connection, 7)
    num_bytes = int.from_bytes(bytes(length), "big")
    if not flags & _COMMAND or num_bytes > _MAX_COMMAND_BYTES:
        raise ProtocolError("it breaks the handshake")
    body = await _read_exactly(connection, num_bytes)
    if not body.startswith(command):
        raise ProtocolError(f"it ended the handshake with {body[1:40]!r}")


async def _read_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        received = await asyncio.get_running_loop().sock_recv(connection, num_bytes - len(data))
        if not received:
            raise ConnectionError("it ended the handshake")
        data += received
    return data


def _command(body: bytes) -> bytes:
    if len(body) < 256:
        return bytes([_COMMAND, len(body)]) + body
    return bytes([_COMMAND | _LONG]) + _LENGTH.pack(len(body)) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
