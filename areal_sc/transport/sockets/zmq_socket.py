"""ZMQ sockets: their options, their addresses, and one that asyncio drives from its descriptor.

consumes     readiness of the socket's FD; every message goes to `on_message`, on the event loop
waits for    nothing
unblocked by ZMQ's I/O thread, which signals the FD. The FD is edge-triggered in effect: every send
             or receive may swallow the signal, so the inbox is looked at again after each send.

zmq.asyncio is not used: it does not yield while messages are ready, which starves the loop.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from areal_sc.errors import PeerLost, TransportError

Frame = memoryview
"""One received frame: read-only bytes, valid as long as the view lives; nothing was copied."""

Buffer = bytes | bytearray | memoryview

RECEIVES_PER_TURN: Final = 32
"""Messages taken without giving the event loop a turn; a full inbox must not starve timers."""

FRAME_BYTES: Final = 32 << 10
"""The last part of a message travels in frames of at most this size. ZMQ keeps a frame of whoever
connects before it knows who that is, so this is what a stranger can make a server hold."""

Context = zmq.Context[zmq.Socket[bytes]]

HANDSHAKE_TIMEOUT_MS: Final = 10_000
"""Whoever connects and does not prove to be of the run within it is put out."""

KEEPALIVE_IDLE_S: Final = 10
KEEPALIVE_EVERY_S: Final = 5
KEEPALIVE_PROBES: Final = 3
"""The kernel's probes find a host that vanished without closing, after 25 s of silence. ZMQ's own
pings would cost a controller of thousands of workers a wake-up for each of them."""

UNSENT_TIMEOUT_MS: Final = 30_000
"""The kernel ends a connection whose peer takes nothing for so long, as a stopped process does;
neither ZMQ's pings nor the kernel's probes are sent while there is output to send."""

_SEALING_BYTES: Final = 64
"""CURVE's own part of a frame (33 bytes), which ZMQ counts as well."""

# plain integers: pyzmq converts its enumerations on every call, which costs as much as the call
_DONTWAIT: Final = int(zmq.DONTWAIT)
_SEND_MORE: Final = int(zmq.DONTWAIT | zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)


class AsyncSocket:
    """One ZMQ socket on the running event loop.

    Args:
        socket: configured; bound or connected now or later; owned from here on. A ROUTER, or what
            else gives messages of two parts or more.
        on_message: gets every message, as one view per part. It must not raise.
        max_parts: parts kept of one message; further ones are read and thrown away, so that the
            decoder sees `max_parts + 1` and refuses the message.
        knows_senders: it is guarded, so each message comes with the key of its connection.

    Attributes:
        sender: the key of the message that is handed over now.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_message: Callable[[list[Frame]], None],
        *,
        max_parts: int = 1024,
        knows_senders: bool = False,
    ) -> None:
        self.raw = socket
        self.sender = ""
        self._knows_senders = knows_senders
        self._on_message = on_message
        self._max_parts = max_parts
        self._loop = asyncio.get_running_loop()
        self._is_looking = False
        self._is_look_scheduled = False
        self._is_closed = False
        self._fd = socket.fileno()
        self._loop.add_reader(self._fd, self._look)
        self._look_soon()

    def send(self, frames: Sequence[Buffer]) -> None:
        """Queues a message, whose last part the receiver gets as one frame for each `FRAME_BYTES`.

        Raises: PeerLost: a ROUTER's peer is gone, or this socket was closed.
        """
        if self._is_closed:
            raise PeerLost("the socket is closed")
        send = self.raw.send
        try:
            for frame in frames[:-1]:
                send(frame, _SEND_MORE)
            rest = frames[-1]
            while len(rest) > FRAME_BYTES:
                rest = memoryview(rest)
                send(rest[:FRAME_BYTES], _SEND_MORE)
                rest = rest[FRAME_BYTES:]
            send(rest, _DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerLost("the peer has disconnected") from None
            raise
        finally:
            # sent or not, the attempt may have swallowed the signal of a message that came in; many
            # sends in one turn are followed by one look
            if not self._is_looking and not self._is_look_scheduled:
                self._look_soon()

    def receive_ready(self) -> None:
        """Hands over every message that is there now."""
        while (frames := self._recv_nowait()) is not None:
            self._on_message(frames)

    def close(self, linger_s: float = 0.0) -> None:
        """Closes the socket; messages not sent after `linger_s` are dropped."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._fd)
        self.raw.close(linger=round(linger_s * 1000))

    def _look_soon(self) -> None:
        self._is_look_scheduled = True
        self._loop.call_soon(self._scheduled_look)

    def _scheduled_look(self) -> None:
        self._is_look_scheduled = False
        if not self._is_closed and self._has_arrived():
            self._look()

    def _look(self) -> None:
        """Takes what is there, within the turn's limit; goes on in the next turn if it is more."""
        self._is_looking = True
        is_empty = False
        try:
            for number in range(RECEIVES_PER_TURN):
                # one message is the rule: asking costs less than the error of an empty inbox
                if self._is_closed or (number == 1 and not self._has_arrived()):
                    is_empty = True
                    break
                frames = self._recv_nowait()
                if frames is None:
                    is_empty = True
                    break
                self._on_message(frames)
        finally:  # also where `on_message` breaks its promise: the rest must not be forgotten
            self._is_looking = False
            if not is_empty and not self._is_look_scheduled and not self._is_closed:
                self._look_soon()

    def _recv_nowait(self) -> list[Frame] | None:
        if self._is_closed:
            return None
        receive = self.raw.recv
        try:
            parts = [memoryview(receive(_DONTWAIT))]  # a routing id: copying it costs least
        except zmq.Again:
            return None
        while True:
            part = receive(_DONTWAIT, False)
            if len(parts) <= self._max_parts:
                parts.append(part.buffer)
            if not part.more:
                break
        if self._knows_senders:
            self.sender = part.get("User-Id")  # type: ignore[assignment]
        return parts

    def _has_arrived(self) -> bool:
        return bool(self.raw.get(_EVENTS) & _POLLIN)  # type: ignore[operator]


def configure_socket(socket: zmq.Socket[bytes]) -> None:
    """The options that both sides share.

    ZMQ ends the connection of a peer that announces a frame of more than `FRAME_BYTES` (and what
    encryption adds), before anything is allocated for it.

    Queues to peers have no limit: what waits for one is bounded by the calls that it makes, or that
    are made of it, and is gone when the kernel ends its connection (`UNSENT_TIMEOUT_MS`).
    """
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES + _SEALING_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_EVERY_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
    socket.setsockopt(zmq.TCP_MAXRT, UNSENT_TIMEOUT_MS)


def monitor_of(context: Context, socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """The end of a socket's monitor that tells the life of its connections.

    It must be closed after `socket.disable_monitor()`.
    """
    address = f"inproc://life-of-{socket.fileno()}"
    socket.monitor(address, events)
    monitor = context.socket(zmq.PAIR)
    # Unbounded: events come from ZMQ's I/O thread, and a full queue would stop it.
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.connect(address)
    return monitor


def parsed_address(address: str) -> tuple[str, int]:
    """Host and port of an address like tcp://10.0.0.1:5555 or tcp://[fd00::1]:5555.

    Names are refused: ZMQ tells of a connection's life under the address as it resolved it.

    Raises: TransportError: it is not like that.
    """
    try:
        scheme, slashes, rest = address.partition("://")
        host, _, port = rest.rpartition(":")
        if scheme == "tcp" and slashes and port.isdecimal() and 0 < int(port) < 65536:
            if host.startswith("[") and host.endswith("]"):
                return str(ipaddress.IPv6Address(host[1:-1])), int(port)
            return str(ipaddress.IPv4Address(host)), int(port)
    except ValueError:
        pass
    raise TransportError(f"expected an address like tcp://10.0.0.1:5555, got {address[:200]!r}")
