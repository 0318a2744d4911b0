"""How a connection of the bulk plane begins, on both sides: ZMTP's greeting, then a ticket.

    puller     greeting                 HELLO ticket              INITIATE
    owner      greeting                                 WELCOME              READY

What is spoken is ZMTP 3.1 (https://rfc.zeromq.org/spec/37) with PLAIN (spec/24), so ZMQ's own
sockets can stand on either side. An owner keeps no more of a stranger than one short command.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import ExitStack
from typing import Final

from areal_sc.errors import PeerLost, ProtocolError
from areal_sc.transport.endpoint import (
    HANDSHAKE_TIMEOUT_MS,
    KEEPALIVE_EVERY_S,
    KEEPALIVE_IDLE_S,
    KEEPALIVE_PROBES,
    UNSENT_TIMEOUT_MS,
    parsed_address,
)

LONG_FRAME: Final = 2
COMMAND_FRAME: Final = 4
"""Flags of a frame; spec/37 names a third one, for more frames of a message."""

MAX_COMMAND_BYTES: Final = 1 << 10

_GREETING: Final = struct.Struct(">10s2B20sB31x")
_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
_MECHANISM: Final = b"PLAIN"
_HELLO, _WELCOME, _INITIATE, _READY = b"\x05HELLO", b"\x07WELCOME", b"\x08INITIATE", b"\x05READY"


async def connect(address: str, ticket: tuple[str, str]) -> socket.socket:
    """A non-blocking connection to an owner that has admitted us.

    Args:
        address: like tcp://10.0.0.1:5555.
        ticket: name and password; each of 1 to 255 ASCII characters.

    Raises:
        PeerLost: nobody listens there, it speaks something else, or does not let us in.
        TransportError: the address is malformed.
    """
    host, port = parsed_address(address)
    with ExitStack() as undo:
        connection = undo.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        connection.setblocking(False)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_MS / 1000):
                await asyncio.get_running_loop().sock_connect(connection, (host, port))
                configure(connection)
                await _show_ticket(connection, ticket)
        except TimeoutError:
            raise PeerLost("it did not answer the handshake") from None
        except (OSError, ProtocolError) as error:
            raise PeerLost(f"no connection to {address}: {error}") from error
        undo.pop_all()
    return connection


def configure(connection: socket.socket) -> None:
    """As `configure_socket` does it for ZMQ's connections."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNSENT_TIMEOUT_MS)


async def receive_ticket(connection: socket.socket) -> tuple[bytes, bytes]:
    """Name and password that whoever has connected shows.

    Raises: ProtocolError, OSError: it speaks something else, or left.
    """
    await _exchange_greetings(connection, is_server=True)
    hello = await _expect(connection, _HELLO)
    try:
        name, rest = _short_string(hello)
        password, rest = _short_string(rest)
        if not rest:
            return name, password
    except IndexError:
        pass
    raise ProtocolError("the caller shows no ticket")


async def welcome(connection: socket.socket) -> None:
    """Tells whoever showed a valid ticket that messages may come.

    Raises: ProtocolError, OSError: it breaks the handshake, or left.
    """
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, command(_WELCOME))
    await _expect(connection, _INITIATE)
    await loop.sock_sendall(connection, command(_READY + _properties(b"ROUTER")))


def command(body: bytes) -> bytes:
    """The frame of a command."""
    if len(body) < 256:
        return bytes([COMMAND_FRAME, len(body)]) + body
    return bytes([COMMAND_FRAME | LONG_FRAME]) + len(body).to_bytes(8, "big") + body


async def _show_ticket(connection: socket.socket, ticket: tuple[str, str]) -> None:
    loop = asyncio.get_running_loop()
    await _exchange_greetings(connection, is_server=False)
    name, password = (part.encode("ascii") for part in ticket)
    hello = _HELLO + bytes([len(name)]) + name + bytes([len(password)]) + password
    await loop.sock_sendall(connection, command(hello))
    await _expect(connection, _WELCOME)
    await loop.sock_sendall(connection, command(_INITIATE + _properties(b"DEALER")))
    await _expect(connection, _READY)


async def _exchange_greetings(connection: socket.socket, *, is_server: bool) -> None:
    """Ours goes first: ZMQ sends most of its own only when it knows whom it speaks to."""
    greeting = _GREETING.pack(_SIGNATURE, 3, 1, _MECHANISM, is_server)
    await asyncio.get_running_loop().sock_sendall(connection, greeting)
    fields = _GREETING.unpack(await _read_exactly(connection, _GREETING.size))
    signature, major, _, mechanism, _ = fields
    if signature[::9] != _SIGNATURE[::9] or major < 3:
        raise ProtocolError("it does not speak ZMTP 3")
    if mechanism.rstrip(b"\0") != _MECHANISM:
        raise ProtocolError("it does not admit, or ask to be admitted, by tickets")


async def _expect(connection: socket.socket, name: bytes) -> bytes:
    """What follows the name of the expected command."""
    flags, *length = await _read_exactly(connection, 2)
    if flags & LONG_FRAME:
        length += await _read_exactly(connection, 7)
    num_bytes = int.from_bytes(bytes(length), "big")
    if not flags & COMMAND_FRAME or num_bytes > MAX_COMMAND_BYTES:
        raise ProtocolError("it breaks the handshake")
    body = await _read_exactly(connection, num_bytes)
    if not body.startswith(name):
        raise ProtocolError(f"it ended the handshake with {body[1:40]!r}")
    return body[len(name) :]


async def _read_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        received = await asyncio.get_running_loop().sock_recv(connection, num_bytes - len(data))
        if not received:
            raise ConnectionError("it ended the handshake")
        data += received
    return data


def _short_string(data: bytes) -> tuple[bytes, bytes]:
    """(the string that the data begins with, the rest). Raises: IndexError: it is cut."""
    stop = 1 + data[0]
    if len(data) < stop:
        raise IndexError
    return data[1:stop], data[stop:]


def _properties(socket_type: bytes) -> bytes:
    """The metadata that ZMQ's sockets want to hear of their peers."""

    def of(name: bytes, value: bytes) -> bytes:
        return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value

    return of(b"Socket-Type", socket_type) + of(b"Identity", b"")
