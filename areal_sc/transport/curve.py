"""CurveZMQ for the sockets of a run: only holders of the run's client key are served.

CURVE alone admits whoever knows the server's public key, hence the list of admitted client keys,
which is the guard's.
"""

from __future__ import annotations

import logging

import zmq
from zmq.utils import z85

from areal_sc.transport.endpoint import Context
from areal_sc.transport.keys import RunKeys
from areal_sc.transport.refusals import Refusals
from areal_sc.transport.zap import ZapGuard

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

    def configure_server(self, context: Context, socket: zmq.Socket[bytes]) -> ZapGuard:
        """Guards a socket that is not bound yet; close the guard before the socket.

        Args:
            context: the socket's own, with no other guarded socket: ZMQ asks one place a context.
        """
        socket.curve_server = True
        socket.curve_secretkey = self._keys.server_secret
        member = [z85.decode(self._keys.client_public)]

        def admission(mechanism: bytes, credentials: list[bytes]) -> str | None:
            if (mechanism, credentials) == (b"CURVE", member):
                return None
            return "shows a key that is not the run's"

        return ZapGuard(context, socket, admission, self.refusals)

    def configure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Lets a socket that is not connected yet show the run's client key."""
        socket.curve_serverkey = self._keys.server_public
        socket.curve_publickey = self._keys.client_public
        socket.curve_secretkey = self._keys.client_secret
