"""One ROUTER socket that connects to any number of servers, and tells the life of each.

consumes     messages of all peers, and the life events of all connections (one monitor)
waits for    nothing
unblocked by the peers, and by ZMQ's I/O thread, which connects and reconnects in the background

A socket per peer would cost a controller of thousands of workers as many file descriptors, reader
callbacks and monitors. Here a peer is a routing id of our own choice (`CONNECT_ROUTING_ID`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass, field
from typing import Final, Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from areal_sc.errors import TransportError
from areal_sc.transport.security.curve import CurveClient
from areal_sc.transport.sockets.interface import bracketed
from areal_sc.transport.sockets.zmq_socket import (
    AsyncSocket,
    Buffer,
    Frame,
    configure_socket,
    monitor_of,
    parsed_address,
)

logger = logging.getLogger(__name__)

FAILURES_UNTIL_LOST: Final = 3
"""Refused or ended connections, without a message between them, before a peer counts as gone. An
address is only known once its server listens, so a refusal is not a matter of waiting longer."""

REOPEN_S: Final = 0.1
MAX_REOPEN_S: Final = 2.0
"""Between two attempts at a server that ends its connections; twice as long each time."""

CONNECT_TIMEOUT_MS: Final = 5_000
"""An attempt to connect that nobody answers fails after this time."""

MAX_PORT_DIGITS: Final = 200

_LIFE_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


class Peer(Protocol):
    """What wants to know of one server; called on the event loop, and must not raise.

    Its first messages may come before `on_connected`, none after `on_interrupted` and `on_lost`
    until it is connected again.
    """

    def on_message(self, frames: list[Frame]) -> None: ...

    def on_connected(self) -> None: ...

    def on_interrupted(self) -> None:
        """The connection ended, and is made again: what was sent may be lost, or be answered."""

    def on_lost(self, reason: str) -> None: ...


@dataclass(eq=False, slots=True)
class Route:
    """The way to one server.

    Attributes:
        address: of the server, as the user of the hub named it.
        server_key: public key that it has to have; "": see `CurveClient`.
        server: its IP address and port.
        endpoint: the address in a spelling that is this connection's alone; "" between two.
        is_lost: why it is not reachable now; None while it is, or may still become so.
        num_failures: refused or ended connections since its last message.
    """

    address: str
    server: tuple[str, int]
    peer: Peer
    hub: PeerHub = field(repr=False)
    server_key: str = ""
    endpoint: str = ""
    is_closed: bool = False
    routing_id: bytes = b""
    is_lost: str | None = None
    is_up: bool = False
    was_up: bool = False
    num_failures: int = 0

    @property
    def is_open(self) -> bool:
        """Whether a message can be queued: a connection is there, or is being made."""
        return bool(self.endpoint)

    def send(self, message: Buffer) -> None:
        """Queues a message. Raises: PeerLost: the route is not open."""
        self.hub.socket.send([self.routing_id, message])

    def close(self) -> None:
        """Ends the connection; the peer hears nothing more."""
        self.hub.forget(self)


class PeerHub:
    """Connections to servers; must be made on a running event loop.

    Args:
        max_frames: frames of one message; of a longer one, one more is handed over.
        client: who calls, for servers that want to know it.

    Attributes:
        num_bytes: sent and received, of all frames that its peers have counted.
    """

    def __init__(
        self,
        *,
        max_frames: int,
        client: CurveClient | None = None,
    ) -> None:
        self.num_bytes = 0
        context = self._context = zmq.Context()
        raw = context.socket(zmq.ROUTER)
        configure_socket(raw)
        raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
        raw.setsockopt(zmq.RECONNECT_IVL, 100)
        raw.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        raw.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        self._client = client
        if client is not None:
            client.configure(raw)
        self._monitor = AsyncSocket(monitor_of(context, raw, _LIFE_EVENTS), self._on_life_event)
        self.socket = AsyncSocket(raw, self._on_message, max_parts=max_frames + 1)
        self._loop = asyncio.get_running_loop()
        self._routing_ids = itertools.count(1)
        self._widths = itertools.cycle(range(1, MAX_PORT_DIGITS))
        self._routes: dict[bytes, Route] = {}
        self._by_endpoint: dict[str, Route] = {}
        self._is_closed = False

    def connect(self, address: str, peer: Peer, server_key: str = "") -> Route:
        """A route that is connected in the background; messages sent meanwhile wait in its queue.

        Args:
            server_key: see `Route`.
        Raises: TransportError: the address is not like tcp://10.0.0.1:5555, the hub is closed, or
            has too many connections to that address, or the key is none.
        """
        host, port = parsed_address(address)
        if self._is_closed:
            raise TransportError(f"cannot connect to {address}: this side is closed")
        route = Route(address, (host, port), peer, self, server_key)
        self._open(route)
        return route

    def forget(self, route: Route) -> None:
        """Ends one connection; see `Route.close`."""
        self._disconnect(route)
        route.is_closed = True
        route.is_lost = "the connection was closed here"

    async def close(self) -> None:
        """Ends all connections; peers are not told."""
        if self._is_closed:
            return
        self._is_closed = True
        self._routes.clear()
        self._by_endpoint.clear()
        # Before its reader closes: ZMQ sends a last event, and would wait for room forever.
        self.socket.raw.disable_monitor()
        self._monitor.close()
        self.socket.close()
        self._context.term()

    def _open(self, route: Route) -> None:
        if route.is_closed or self._is_closed:
            return
        # Life events name no connection, only the endpoint as it was spelled. Leading zeros of the
        # port tell connections apart, the ended ones too, whose last events may still come.
        host, port = route.server
        widths = itertools.islice(self._widths, MAX_PORT_DIGITS)
        spellings = (f"tcp://{bracketed(host)}:{port:0{width}d}" for width in widths)
        endpoint = next((text for text in spellings if text not in self._by_endpoint), None)
        if endpoint is None:
            raise TransportError(
                f"cannot connect to {route.address}: this process has {MAX_PORT_DIGITS - 1} "
                "connections to it already"
            )
        if self._client is not None:
            self._client.expect(self.socket.raw, route.server_key)
        # A fresh id each time: the pipe of the connection before may still hold the old one.
        route.routing_id = next(self._routing_ids).to_bytes(8, "big")
        self._routes[route.routing_id] = route
        route.endpoint = endpoint
        self._by_endpoint[route.endpoint] = route
        self.socket.raw.setsockopt(zmq.CONNECT_ROUTING_ID, route.routing_id)
        self.socket.raw.setsockopt(zmq.IPV6, ":" in host)  # of this connection, as its key
        self.socket.raw.connect(route.endpoint)

    def _disconnect(self, route: Route) -> None:
        """Ends the connection; nothing that is still on its way from it is heard."""
        if self._by_endpoint.pop(route.endpoint, None) is None:
            return
        del self._routes[route.routing_id]
        self.socket.raw.disconnect(route.endpoint)
        route.endpoint = ""

    def _on_message(self, frames: list[Frame]) -> None:
        route = self._routes.get(bytes(frames[0]))
        if route is not None:  # else: it came from a connection that was given up
            route.num_failures = 0
            route.peer.on_message(frames[1:])

    def _on_life_event(self, frames: list[Frame]) -> None:
        happened = parse_monitor_message([bytes(frame) for frame in frames])
        route = self._by_endpoint.get(happened["endpoint"].decode())
        if route is None:
            return
        match happened["event"]:
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                route.is_up = route.was_up = True
                route.is_lost = None
                route.peer.on_connected()
            case zmq.EVENT_DISCONNECTED if route.is_up:
                self._end(route, "the connection ended")
            case zmq.EVENT_DISCONNECTED:
                reason = "the handshake failed: it ended, or has the keys of another run"
                self._end(route, reason, is_final=not route.was_up)
            case zmq.EVENT_CLOSED if not route.is_up:
                self._on_refusal(route)

    def _on_refusal(self, route: Route) -> None:
        """ZMQ tries again by itself, with what is queued."""
        if route.num_failures < FAILURES_UNTIL_LOST - 1:
            route.num_failures += 1
        elif route.is_lost is None:
            refused = f"it refused the connection {FAILURES_UNTIL_LOST} times"
            ended = "the connection ended, and a new one is refused"
            self._end(route, ended if route.was_up else refused)

    def _end(self, route: Route, reason: str, *, is_final: bool = False) -> None:
        """A connection ended, or none was made; the next one is begun.

        Args:
            is_final: the server counts as lost, however few failures there were.
        """
        # Replies that arrived before the end are still in the inbox.
        self.socket.receive_ready()
        if route.routing_id not in self._routes:
            return  # one of them closed the route
        was_up, route.is_up = route.is_up, False
        route.num_failures += 1
        if is_final or route.num_failures >= FAILURES_UNTIL_LOST:
            route.is_lost = reason
        # A new connection instead of ZMQ's own reconnection, which would deliver the requests that
        # are still queued, also of calls that have failed. (IMMEDIATE would drop them too, but ZMQ
        # 4.3 then also loses the last of many replies that arrived before the end.)
        self._disconnect(route)
        if was_up and route.num_failures == 1:
            self._open(route)
        else:  # a server that refuses is not asked again at once
            delay_s = min(REOPEN_S * 2 ** min(route.num_failures - 1, 10), MAX_REOPEN_S)
            self._loop.call_later(delay_s, self._open, route)
        if route.is_lost is not None:
            route.peer.on_lost(reason)
        elif was_up:
            route.peer.on_interrupted()
