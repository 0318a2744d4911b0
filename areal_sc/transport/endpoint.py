"""What both ends of a ZMQ connection agree on before it is made."""

from __future__ import annotations

from typing import Final, Protocol

import zmq

from areal_sc.transport.codec import FrameLimits

Context = zmq.Context[zmq.Socket[bytes]]

PROBE_EVERY_MS: Final = 5_000
PROBE_TIMEOUT_MS: Final = 20_000
"""ZMQ's own pings, sent by its I/O thread: they find a host that vanished without closing."""


class Authenticator(Protocol):
    """Prepares sockets before they bind or connect, so that strangers are not served."""

    def configure_server(self, socket: zmq.Socket[bytes]) -> None: ...

    def configure_client(self, socket: zmq.Socket[bytes]) -> None: ...


def configure_socket(socket: zmq.Socket[bytes], limits: FrameLimits) -> None:
    """The options that both sides share."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max(limits.max_frame_bytes, limits.max_header_bytes))
    socket.setsockopt(zmq.HEARTBEAT_IVL, PROBE_EVERY_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, PROBE_TIMEOUT_MS)
