"""CurveZMQ for the sockets of a run: only holders of the run's client key are served.

consumes     ZMQ's questions whether a connection is admitted (ZAP, RFC 27), and the life events of
             the guarded socket; both on the event loop that the server runs on
waits for    nothing; a connection waits for its answer, bounded by ZMQ's handshake timeout
unblocked by ZMQ's I/O thread

CURVE alone admits whoever knows the server's public key, hence the question for the client's.
Nothing of a connection is read before it is admitted. A guard that is gone admits nobody
(`ZAP_ENFORCE_DOMAIN`).
"""

from __future__ import annotations

import logging
import os
from typing import Final

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from areal_sc.errors import TransportError
from areal_sc.transport.security.keys import RunKeys
from areal_sc.transport.sockets.refusals import Refusals
from areal_sc.transport.sockets.zmq_socket import AsyncSocket, Context, Frame, monitor_of

ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
ZAP_DOMAIN: Final = "areal_sc"
NUM_ZAP_FRAMES: Final = 8
"""Routing id, empty, version, request id, domain, address, identity, mechanism; then the client's
credentials: for CURVE its public key."""

_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)

_REASONS: Final[dict[int, str]] = {
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "the caller has another server key",
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "the caller does not authenticate itself as asked",
}

logger = logging.getLogger(__name__)


class CurveAuthenticator:
    """Both sides of CURVE with one run's keys; used from one event loop.

    Args:
        keys: of the run.
        node_id: who guards, for the log.

    Attributes:
        refusals: connections that were not admitted, on all guarded sockets together.
    """

    def __init__(self, keys: RunKeys, node_id: str) -> None:
        self.refusals = Refusals(logger, "refused_connection", node_id)
        self._keys = keys

    @property
    def num_refused(self) -> int:
        return self.refusals.num

    def configure_server(self, context: Context, socket: zmq.Socket[bytes]) -> Guard:
        """Guards a socket that is not bound yet; close the guard before the socket.

        Args:
            context: the socket's own, with no other guarded socket: ZMQ asks one place a context.
        """
        socket.curve_server = True
        socket.curve_secretkey = self._keys.server_secret
        return Guard(context, socket, z85.decode(self._keys.client_public), self.refusals)

    def configure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Lets a socket that is not connected yet show the run's client key."""
        socket.curve_serverkey = self._keys.server_public
        socket.curve_publickey = self._keys.client_public
        socket.curve_secretkey = self._keys.client_secret


class Guard:
    """Says who is admitted to one socket, and counts who is not."""

    def __init__(
        self,
        context: Context,
        guarded: zmq.Socket[bytes],
        member_key: bytes,
        refusals: Refusals,
    ) -> None:
        self._guarded = guarded
        self._member = [b"CURVE", member_key]
        self._refusals = refusals
        self._num_admitted = 0
        self._reason: str | None = None
        self._is_counted = False
        self._is_closed = False
        guarded.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        guarded.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        zap = context.socket(zmq.ROUTER)
        zap.setsockopt(zmq.LINGER, 0)
        try:
            zap.bind(ZAP_ADDRESS)
        except zmq.ZMQError as error:
            zap.close()
            raise TransportError(f"a second socket of a ZMQ context is guarded: {error}") from error
        self._zap = AsyncSocket(zap, self._on_question, max_parts=2 * NUM_ZAP_FRAMES)
        monitor = monitor_of(context, guarded, _EVENTS)
        self._monitor = AsyncSocket(monitor, self._on_life_event)

    def close(self) -> None:
        """Admits nobody any more; connections that are made stay."""
        if self._is_closed:
            return
        self._is_closed = True
        self._guarded.disable_monitor()
        self._monitor.close()
        self._zap.close()

    def _on_question(self, frames: list[Frame]) -> None:
        parts = [bytes(frame) for frame in frames]
        caller, request_id, address = parts[0], parts[3], parts[5]
        if parts[NUM_ZAP_FRAMES - 1 :] == self._member:
            status, user = b"200", b"member"
        else:
            status, user = b"400", b""
            shown = address.decode("ascii", "replace")
            self._refusals.add(f"{shown} shows a key that is not the run's")
        self._zap.send_nowait([caller, b"", b"1.0", request_id, status, b"", user, b""])

    def _on_life_event(self, frames: list[Frame]) -> None:
        """The end of a refused connection follows the event that says why, if there is one."""
        happened = parse_monitor_message([bytes(frame) for frame in frames])
        value = happened["value"]
        match happened["event"]:
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._num_admitted += 1
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._is_counted = True
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                other = f"the caller broke the handshake (ZMTP error {value:#x})"
                self._reason = _REASONS.get(value, other)
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._reason = f"the caller left before it was admitted ({os.strerror(value)})"
            case zmq.EVENT_DISCONNECTED:
                self._on_end()

    def _on_end(self) -> None:
        if self._reason is None and self._num_admitted and not self._is_counted:
            # A stranger without a greeting looks the same, and counts when the members are gone.
            self._num_admitted -= 1
        elif not self._is_counted:
            self._refusals.add(self._reason or "the caller did not speak ZMTP")
        self._reason, self._is_counted = None, False
