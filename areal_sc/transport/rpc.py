"""Calls between processes: what the floors above use.

    RpcClient ── Request(id, incarnation, method, args, frames) ──► RpcServer
              ◄─ Reply(id, value, frames) | Failure(id, error) ──
              ── Cancel(id) ──►                      the caller stopped waiting

Controllers see `Connection` and `Transport` only, so a simulated transport can take the place of
`ZmqTransport` in virtual time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakSet

import zmq

from areal_sc.errors import TransportError
from areal_sc.transport.codec import FrameLimits
from areal_sc.transport.endpoint import Authenticator, Context
from areal_sc.transport.rpc_client import RequestIds, RpcClient, random_request_id
from areal_sc.transport.rpc_server import Frames, Handler, RpcServer
from areal_sc.transport.socket import Buffer, Frame

__all__ = [
    "Authenticator",
    "Connection",
    "Frame",
    "FrameLimits",
    "Frames",
    "Handler",
    "RpcClient",
    "RpcServer",
    "Transport",
    "ZmqTransport",
    "random_request_id",
]


class Connection(Protocol):
    """What a controller may do with one peer."""

    node_id: str

    @property
    def bytes_sent(self) -> int: ...

    @property
    def bytes_received(self) -> int: ...

    async def call(
        self, method: str, args: dict[str, Any], *, timeout_s: float, request_id: str | None = None
    ) -> Any: ...

    async def call_frames(
        self,
        method: str,
        args: dict[str, Any],
        *,
        timeout_s: float,
        frames: Sequence[Buffer] = (),
        request_id: str | None = None,
    ) -> tuple[Any, list[Frame]]: ...

    def fail_pending(self, error: Exception) -> None: ...

    async def close(self) -> None: ...


class Transport(Protocol):
    """Where connections come from; a simulated one takes its place in virtual time."""

    def connect(self, address: str, node_id: str, incarnation: str) -> Connection: ...

    async def close(self) -> None: ...


class ZmqTransport:
    """Connections over ZMQ that share one context, with its one I/O thread."""

    def __init__(
        self,
        *,
        authenticator: Authenticator | None = None,
        limits: FrameLimits | None = None,
        new_request_id: RequestIds = random_request_id,
    ) -> None:
        self._authenticator = authenticator
        self._limits = limits
        self._new_request_id = new_request_id
        self._context: Context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        # weak, because a connection that its user has closed is of no more concern
        self._connections: WeakSet[RpcClient] = WeakSet()

    def connect(self, address: str, node_id: str, incarnation: str) -> RpcClient:
        """A connection that is made in the background; calls wait for it within their deadline."""
        if self._context.closed:
            raise TransportError(f"cannot connect to {node_id} at {address}: transport is closed")
        connection = RpcClient(
            address,
            node_id=node_id,
            incarnation=incarnation,
            context=self._context,
            authenticator=self._authenticator,
            limits=self._limits,
            new_request_id=self._new_request_id,
        )
        self._connections.add(connection)
        return connection

    async def close(self) -> None:
        """Closes all connections."""
        for connection in list(self._connections):
            await connection.close()
        self._context.term()
