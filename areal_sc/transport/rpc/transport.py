"""Calls between processes: what the floors above use.

    RpcClient ── Request(id, incarnation, method, args) ──► RpcServer
              ◄─ Reply(id, value) | Failure(id, error) ────
              ── Cancel(id) ──►                      the caller stopped waiting

Messages are small: tensors go by sockets of their own. Controllers see `Connection` and `Transport`
only, so a simulated transport can take the place of `ZmqTransport` in virtual time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakSet

from areal_sc.errors import ArealError, TransportError
from areal_sc.transport.rpc.client import RpcClient, call_all, random_request_ids
from areal_sc.transport.rpc.codec import MAX_FRAMES
from areal_sc.transport.rpc.method import A, Method, R
from areal_sc.transport.security.curve import CurveClient
from areal_sc.transport.sockets.hub import PeerHub


class Connection(Protocol):
    """What a controller may do with one peer."""

    node_id: str

    async def call(self, method: Method[A, R], args: A, *, timeout_s: float) -> R: ...

    def fail_pending(self, error: ArealError) -> None: ...

    async def close(self) -> None: ...


class Transport(Protocol):
    """Where connections come from; a simulated one takes its place in virtual time."""

    @property
    def num_bytes(self) -> int:
        """Sent and received on all connections so far."""

    def connect(
        self,
        address: str,
        node_id: str,
        incarnation: str,
        *,
        keeps_trying: bool = False,
        server_key: str = "",
    ) -> Connection: ...

    async def call_all(
        self,
        calls: Sequence[tuple[Any, A]],
        method: Method[A, R],
        *,
        timeout_s: float,
        stops_at_error: bool = False,
    ) -> list[R | ArealError]: ...

    async def close(self) -> None: ...


class ZmqTransport:
    """Connections over ZMQ that share one socket, with its one I/O thread.

    Args:
        client: who calls by it; None: servers that serve everyone are called.
        term: of the controller that calls by it; 0: a worker does.
    """

    def __init__(
        self,
        *,
        client: CurveClient | None = None,
        term: int = 0,
    ) -> None:
        self._client = client
        self._term = term
        self._new_request_id = random_request_ids()
        self._hub: PeerHub | None = None
        self._is_closed = False
        # weak, because a connection that its user has closed is of no more concern
        self._connections: WeakSet[RpcClient] = WeakSet()

    def connect(
        self,
        address: str,
        node_id: str,
        incarnation: str,
        *,
        keeps_trying: bool = False,
        server_key: str = "",
    ) -> RpcClient:
        """A connection that is made in the background; calls wait for it within their deadline.

        Args:
            keeps_trying: see `RpcClient`.
            server_key: see `Route`.
        Raises: TransportError: the address is none, or the transport is closed.
        """
        if self._is_closed:
            raise TransportError(f"cannot connect to {node_id} at {address}: transport is closed")
        if self._hub is None:
            self._hub = PeerHub(max_frames=MAX_FRAMES, client=self._client)
        connection = RpcClient(
            self._hub,
            address,
            node_id=node_id,
            incarnation=incarnation,
            new_request_id=self._new_request_id,
            keeps_trying=keeps_trying,
            server_key=server_key,
            shown_pass=b"" if self._client is None else self._client.shown_pass,
            term=self._term,
        )
        self._connections.add(connection)
        return connection

    @property
    def num_bytes(self) -> int:
        return 0 if self._hub is None else self._hub.num_bytes

    call_all = staticmethod(call_all)

    async def close(self) -> None:
        """Closes all connections."""
        self._is_closed = True
        for connection in list(self._connections):
            await connection.close()
        if self._hub is not None:
            await self._hub.close()
