"""What both ends of a ZMQ connection agree on before it is made."""

from __future__ import annotations

import ipaddress
from typing import Final

import zmq

from areal_sc.errors import TransportError
from areal_sc.transport.socket import FRAME_BYTES

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


def configure_socket(socket: zmq.Socket[bytes]) -> None:
    """The options that both sides share.

    ZMQ ends the connection of a peer that announces a frame of more than `FRAME_BYTES` (and what
    encryption adds), before anything is allocated for it.
    """
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
    """Host and port of an address like tcp://10.0.0.1:5555.

    Names are refused: ZMQ tells of a connection's life under the address as it resolved it.

    Raises: TransportError: it is not like that.
    """
    try:
        scheme, slashes, rest = address.partition("://")
        host, _, port = rest.rpartition(":")
        if scheme == "tcp" and slashes and port.isdecimal() and 0 < int(port) < 65536:
            return str(ipaddress.IPv4Address(host)), int(port)
    except ValueError:
        pass
    raise TransportError(f"expected an address like tcp://10.0.0.1:5555, got {address[:200]!r}")
