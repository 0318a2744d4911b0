"""CurveZMQ for the sockets of a run: who calls is known, and strangers are not served.

consumes     ZMQ's questions whether a connection is admitted (ZAP, RFC 27), on the event loop that
             the server runs on
waits for    nothing; a connection waits for its answer, bounded by ZMQ's handshake timeout
unblocked by ZMQ's I/O thread

CURVE alone admits whoever knows the server's public key, hence the question for the client's. Each
message then comes with the key of its connection, as ZMQ's property `User-Id`. Where callers show
passes, a connection is made with any key, and its owner has to show a pass with the first request.
Whoever does not know the server's public key ZMQ puts out by itself, uncounted.
A guard that is gone admits nobody (`ZAP_ENFORCE_DOMAIN`).
"""

from __future__ import annotations

import logging
from typing import Final, Self

import zmq
from zmq.utils import z85

from areal_sc.errors import TransportError
from areal_sc.transport.security.keys import KeyPair, RunKeys
from areal_sc.transport.security.passes import KnownCallers, WorkerKeys
from areal_sc.transport.sockets.refusals import Refusals
from areal_sc.transport.sockets.zmq_socket import AsyncSocket, Context, Frame

ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
ZAP_DOMAIN: Final = "areal_sc"
NUM_ZAP_FRAMES: Final = 8
"""Routing id, empty, version, request id, domain, address, identity, mechanism; then the client's
credentials: for CURVE its public key."""

logger = logging.getLogger(__name__)


class CurveClient:
    """What a caller shows.

    Args:
        own: the pair that it calls with.
        server_key: public key of the servers that it calls, where nothing else is said.
        shown_pass: who it is; b"": the controller, or an agent that joins.
    """

    def __init__(self, own: KeyPair, server_key: bytes, shown_pass: bytes = b"") -> None:
        self.shown_pass = shown_pass
        self._own = own
        self._server_key = server_key

    @classmethod
    def of_controller(cls, keys: RunKeys) -> Self:
        """Whoever has the keys of the run."""
        return cls(keys.controller, keys.workers.public)

    @classmethod
    def of_worker(cls, keys: WorkerKeys) -> Self:
        """A worker that calls other workers."""
        return cls(keys.own, keys.servers.public, keys.shown_pass)

    def configure(self, socket: zmq.Socket[bytes]) -> None:
        """Prepares a socket that is not connected yet."""
        socket.curve_publickey = self._own.public
        socket.curve_secretkey = self._own.secret

    def expect(self, socket: zmq.Socket[bytes], server_key: str) -> None:
        """The socket's next connection is to the owner of that key; "": to one of `server_key`.

        Raises: TransportError: it is no key; another process may have said it.
        """
        key = server_key.encode("ascii", "replace") if server_key else self._server_key
        try:
            socket.curve_serverkey = key
        except zmq.ZMQError as error:
            raise TransportError("expected a public key of 40 characters of Z85") from error


class CurveServer:
    """What a server admits; used from one event loop.

    Args:
        own: the pair that it serves with.
        callers: whom it knows.
        node_id: its name, for the log.

    Attributes:
        refused: connections that were not admitted, messages of strangers, and calls of those who
            may not make them.
    """

    def __init__(self, own: KeyPair, callers: KnownCallers, node_id: str) -> None:
        self.callers = callers
        self.refused = Refusals(logger, "refused", node_id)
        self._own = own

    @classmethod
    def of_worker(cls, keys: WorkerKeys, node_id: str) -> Self:
        """Takes calls of the controller and of other workers."""
        return cls(keys.servers, KnownCallers(keys.controller, keys.authority), node_id)

    def configure(self, context: Context, socket: zmq.Socket[bytes]) -> Guard:
        """Guards a socket that is not bound yet; close the guard before the socket.

        Args:
            context: the socket's own, with no other guarded socket: ZMQ asks one place a context.
        """
        socket.curve_server = True
        socket.curve_secretkey = self._own.secret
        return Guard(context, socket, self.callers, self.refused)


class Guard:
    """Says who is admitted to one socket, and counts the keys that are not the run's."""

    def __init__(
        self,
        context: Context,
        guarded: zmq.Socket[bytes],
        callers: KnownCallers,
        refusals: Refusals,
    ) -> None:
        self._callers = callers
        self._refusals = refusals
        self._is_closed = False
        guarded.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        guarded.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        zap = context.socket(zmq.ROUTER)
        zap.setsockopt(zmq.LINGER, 0)
        zap.bind(ZAP_ADDRESS)
        self._zap = AsyncSocket(zap, self._on_question, max_parts=2 * NUM_ZAP_FRAMES)

    def close(self) -> None:
        """Admits nobody any more; connections that are made stay."""
        if self._is_closed:
            return
        self._is_closed = True
        self._zap.close()

    def _on_question(self, frames: list[Frame]) -> None:
        parts = [bytes(frame) for frame in frames]
        caller, request_id, address = parts[0], parts[3], parts[5]
        mechanism, *credentials = parts[NUM_ZAP_FRAMES - 1 :]
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" else b""
        if key and self._callers.may_connect(key.decode("ascii")):
            status, user = b"200", key
        else:
            status, user = b"400", b""
            shown = address.decode("ascii", "replace")
            self._refusals.add(f"{shown} shows a key that is not the run's")
        self._zap.send([caller, b"", b"1.0", request_id, status, b"", user, b""])
