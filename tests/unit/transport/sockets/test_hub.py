"""The hub and real servers, among them ones that die, are killed and come back."""

from __future__ import annotations

import asyncio
import socket as tcp
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import zmq
from waiting import until

from areal_sc.errors import PeerLost, TransportError
from areal_sc.transport.sockets import hub as hub_module
from areal_sc.transport.sockets.hub import PeerHub, Route
from areal_sc.transport.sockets.zmq_socket import Frame

Context = zmq.Context[zmq.Socket[bytes]]


class Recorder:
    """A peer that writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.life: list[str] = []

    def on_message(self, frames: list[Frame]) -> None:
        self.heard += [bytes(frame).decode() for frame in frames]

    def on_connected(self) -> None:
        self.life.append("connected")

    def on_interrupted(self) -> None:
        self.life.append("interrupted")

    def on_lost(self, reason: str) -> None:
        self.life.append(reason)


class Server:
    """Answers every message with itself in capitals."""

    def __init__(self, context: Context, address: str = "tcp://127.0.0.1:0") -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(address)
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def serve(self) -> None:
        while self.socket.poll(0):
            caller, text = self.socket.recv_multipart()
            self.socket.send_multipart([caller, text.upper()])

    def close(self) -> None:
        self.socket.close(linger=0)


@pytest.fixture
def context() -> Iterator[Context]:
    with zmq.Context() as made:
        yield made


@asynccontextmanager
async def hub_of(max_frames: int = 1) -> AsyncIterator[PeerHub]:
    hub = PeerHub(max_frames=max_frames)
    try:
        yield hub
    finally:
        await hub.close()


async def served_until(condition: Callable[[], bool], *servers: Server) -> None:
    """Meanwhile the servers answer."""

    def look() -> bool:
        for server in servers:
            server.serve()
        return condition()

    await until(look)


def connected(hub: PeerHub, address: str) -> tuple[Route, Recorder]:
    peer = Recorder()
    return hub.connect(address, peer), peer


async def test_routes_to_one_address_live_and_end_by_themselves(context: Context) -> None:
    server = Server(context)
    async with hub_of() as hub:
        peers = [connected(hub, server.address) for _ in range(5)]
        await until(lambda: all(peer.life for _, peer in peers))
        for i, (route, _) in enumerate(peers):
            route.send(f"text {i}".encode())
        peers[1][0].close()
        peers[3][0].close()
        again, heard_again = connected(hub, server.address)
        again.send(b"again")
        rest = [peers[i] for i in (0, 2, 4)]
        await served_until(lambda: all(peer.heard for _, peer in rest), server)
        await served_until(lambda: bool(heard_again.heard), server)
        assert [peer.heard for _, peer in rest] == [["TEXT 0"], ["TEXT 2"], ["TEXT 4"]]
        assert heard_again.heard == ["AGAIN"]
        server.close()
        ended = ["connected", "interrupted", "the connection ended, and a new one is refused"]
        await until(lambda: all(peer.life == ended for _, peer in [*rest, (again, heard_again)]))
        assert peers[1][1].life == peers[3][1].life == ["connected"]
        assert peers[1][1].heard == peers[3][1].heard == []


async def test_messages_wait_for_a_server_that_comes_up_late(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "FAILURES_UNTIL_LOST", 1000)  # however late it is
    with tcp.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{reserved.getsockname()[1]}"
    async with hub_of() as hub:
        route, peer = connected(hub, address)
        route.send(b"early")
        server = Server(context, address)
        await served_until(lambda: peer.life == ["connected"] and peer.heard == ["EARLY"], server)
        server.close()


async def test_what_accepts_and_does_not_speak_zmtp_is_lost() -> None:
    with tcp.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        async with hub_of() as hub:
            _, peer = connected(hub, f"tcp://127.0.0.1:{mute.getsockname()[1]}")
            loop = asyncio.get_running_loop()
            mute.setblocking(False)
            accepted, _ = await loop.sock_accept(mute)
            accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
            accepted.close()
            await until(lambda: bool(peer.life))
            assert peer.life[0].startswith("the handshake failed")


async def test_a_frame_over_the_limit_costs_the_server_its_connection(context: Context) -> None:
    server = Server(context)
    async with hub_of() as hub:
        route, peer = connected(hub, server.address)
        route.send(b"text")
        await until(lambda: bool(server.socket.poll(0)))
        caller, _ = server.socket.recv_multipart()
        server.socket.send_multipart([caller, bytes((1 << 16) + 65)])  # 64: what encryption adds
        await until(lambda: len(peer.life) >= 2)
        assert peer.life[:2] == ["connected", "interrupted"]
        assert peer.heard == []
    server.close()


async def test_a_closed_hub_connects_no_more() -> None:
    async with hub_of() as hub:
        route, _ = connected(hub, "tcp://127.0.0.1:9")
        await hub.close()
        await hub.close()
        route.close()
        with pytest.raises(PeerLost, match="closed"):
            route.send(b"text")
        with pytest.raises(TransportError, match="this side is closed"):
            hub.connect("tcp://127.0.0.1:9", Recorder())


async def test_more_connections_to_one_address_than_can_be_told_apart_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub_module, "MAX_PORT_DIGITS", 4)
    async with hub_of() as hub:
        routes = [hub.connect("tcp://127.0.0.1:9", Recorder()) for _ in range(3)]
        with pytest.raises(TransportError, match="this process has 3 connections to it already"):
            hub.connect("tcp://127.0.0.1:9", Recorder())
        routes[0].close()
        hub.connect("tcp://127.0.0.1:9", Recorder())


@pytest.mark.parametrize(
    "address",
    [
        "tcp://localhost:5555",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:-1",
        "tcp://127.0.0.1:55²5",
        "tcp://127.0.0.1:5555;127.0.0.1:22",
        "tcp://*:5555",
        "ipc:///tmp/socket",
        "inproc://x",
        "",
        "x" * 10_000,
    ],
)
async def test_what_is_no_address_is_refused(address: str) -> None:
    async with hub_of() as hub:
        with pytest.raises(TransportError, match="expected an address like") as refused:
            hub.connect(address, Recorder())
        assert len(str(refused.value)) < 300
