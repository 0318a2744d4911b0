"""Who may connect to a server socket, and a count of who may not.

consumes     ZMQ's questions whether a connection is admitted (ZAP, RFC 27), and the life events of
             the guarded socket; both on the event loop that the server runs on
waits for    nothing; a connection waits for its answer, bounded by ZMQ's handshake timeout
unblocked by ZMQ's I/O thread

Nothing of a connection is read before it is admitted. A guard that is gone admits nobody
(`ZAP_ENFORCE_DOMAIN`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from areal_sc.errors import TransportError
from areal_sc.transport.endpoint import Context, monitor_of
from areal_sc.transport.refusals import Refusals
from areal_sc.transport.socket import AsyncSocket, Frame

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

Admission = Callable[[bytes, list[bytes]], str | None]
"""(mechanism, credentials) -> why the connection is refused; None admits it."""


class ZapGuard:
    """Answers who is admitted to one socket, and counts who is not.

    Args:
        context: the socket's own, with no other guarded socket: ZMQ asks one place a context.
        guarded: a server socket that is not bound yet; its mechanism is set.
        admission: decides; called on the event loop.
        refusals: connections that were not admitted.
    """

    def __init__(
        self,
        context: Context,
        guarded: zmq.Socket[bytes],
        admission: Admission,
        refusals: Refusals,
    ) -> None:
        self._admission = admission
        self._refusals = refusals
        self._guarded = guarded
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
        reason = self._admission(parts[NUM_ZAP_FRAMES - 1], parts[NUM_ZAP_FRAMES:])
        if reason is None:
            status, user = b"200", b"member"
        else:
            status, user = b"400", b""
            self._refusals.add(f"{address.decode('ascii', 'replace')} {reason}")
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
        if self._is_counted:
            pass
        elif self._reason is not None:
            self._refusals.add(self._reason)
        elif self._num_admitted:
            # A stranger without a greeting looks the same, and counts when the members are gone.
            self._num_admitted -= 1
        else:
            self._refusals.add("the caller did not speak ZMTP")
        self._reason, self._is_counted = None, False
