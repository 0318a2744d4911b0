"""How a connection begins: each side of ours against ZMQ's own sockets, and against strangers."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import zmq
import zmq.auth.thread
from unit.transport.bulk.keeping_sink import LARGE, Sink, until

from areal_sc.errors import PeerLost, ProtocolError, TransportError
from areal_sc.transport.bulk.frame_stream import FrameStream
from areal_sc.transport.bulk.handshake import connect, receive_ticket, welcome
from areal_sc.transport.bulk.turns import Turns


@asynccontextmanager
async def router_of(passwords: dict[str, str]) -> AsyncIterator[tuple[zmq.Socket[bytes], str]]:
    """ZMQ's own ROUTER, which admits by name and password; (socket, address)."""
    context = zmq.Context()
    authenticator = zmq.auth.thread.ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_plain(passwords=passwords)
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.RCVTIMEO, 20_000)
    router.plain_server = True
    router.setsockopt(zmq.HEARTBEAT_IVL, 50)
    router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1000)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    try:
        yield router, f"tcp://127.0.0.1:{port}"
    finally:
        router.close()
        authenticator.stop()
        context.term()


async def test_it_speaks_with_zmq_and_answers_its_pings() -> None:
    async with router_of({"me": "secret"}) as (router, address):
        sink = Sink()
        stream = FrameStream(await connect(address, ("me", "secret")), sink, Turns())
        for size in (0, 1, 255, 256, LARGE):
            stream.send([([bytes(size)], False)])
            peer, request = await asyncio.to_thread(router.recv_multipart)
            assert request == bytes(size)
            router.send_multipart([peer, b"head", os.urandom(size), b""])
        await until(lambda: len(sink.messages) == 6)
        assert [list(map(len, m)) for m in sink.messages] == [
            *([4, size, 0] for size in (0, 1, 255, 256, LARGE)),
            [],
        ]
        await asyncio.sleep(1.5)  # longer than the server waits for an answer to its pings
        assert sink.lost == []
        stream.close()


@pytest.mark.parametrize("ticket", [("me", "wrong"), ("you", "secret")])
async def test_who_is_not_admitted_is_told_so(ticket: tuple[str, str]) -> None:
    async with router_of({"me": "secret"}) as (_, address):
        with pytest.raises(PeerLost, match=f"no connection to {address}: it ended the handshake"):
            await connect(address, ticket)


async def test_an_address_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(PeerLost, match="Connect call failed"):
        await connect(f"tcp://127.0.0.1:{port}", ("a", "b"))
    with pytest.raises(TransportError, match=r"like tcp://10\.0\.0\.1:5555"):
        await connect("somewhere", ("a", "b"))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "it ended the handshake"),
        (b"HTTP/1.1 400 Bad Request\r\n" + bytes(100), "does not speak ZMTP 3"),
        (b"\xff" + bytes(8) + b"\x7f\x01" + bytes(53), "does not speak ZMTP 3"),
        (b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48), "does not admit, or ask"),
        (b"\xff" + bytes(8) + b"\x7f\x03\x01PLAIN" + bytes(47) + b"\x00\x01x", "breaks the hands"),
        (
            b"\xff" + bytes(8) + b"\x7f\x03\x01PLAIN" + bytes(47) + b"\x06" + b"\xff" * 8,
            "breaks the handshake",
        ),
    ],
)
async def test_a_server_that_speaks_something_else(answer: bytes, reason: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await reader.readexactly(64)
            writer.write(answer)
            await writer.drain()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(PeerLost, match=reason):
        await connect(f"tcp://127.0.0.1:{port}", ("a", "b"))
    server.close()
    await server.wait_closed()


async def shown_by(options: dict[str, bytes]) -> tuple[bytes, bytes]:
    """The ticket that ZMQ's own DEALER shows to our side, which then welcomes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener, zmq.Context() as context:
        listener.setblocking(False)
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, 20_000)
        for name, value in options.items():
            setattr(dealer, name, value)
        dealer.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        dealer.send(b"request")
        try:
            async with asyncio.timeout(20):
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                with connection:
                    ticket = await receive_ticket(connection)
                    await welcome(connection)
                    sink = Sink()
                    stream = FrameStream(connection, sink, Turns())
                    await until(lambda: len(sink.messages) == 2)
                    stream.send([([b"large ", bytes(LARGE)], True), ([b""], False)])
                    answer = await asyncio.to_thread(dealer.recv_multipart)
                    stream.close()
        finally:
            dealer.close()
        assert sink.messages[0] == [b"request"]
        assert answer == [b"large " + bytes(LARGE), b""]
        return ticket


async def test_zmqs_own_socket_is_let_in_and_served() -> None:
    ticket = await shown_by({"plain_username": b"me", "plain_password": b"s" * 255})
    assert ticket == (b"me", b"s" * 255)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01PLAIN" + bytes(47)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"", "ended the handshake"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(64), "does not speak ZMTP 3"),
        (GREETING.replace(b"PLAIN", b"CURVE"), "does not admit, or ask to be admitted, by tickets"),
        (GREETING, "ended the handshake"),
        (GREETING + b"\x00\x05hello", "breaks the handshake"),
        (GREETING + b"\x04\x06\x05READY", "it ended the handshake with b'READY'"),
        (GREETING + b"\x06" + (1 << 40).to_bytes(8, "big"), "breaks the handshake"),
        (GREETING + b"\x04\x06\x05HELLO", "shows no ticket"),
        (GREETING + b"\x04\x08\x05HELLO\x05a", "shows no ticket"),
        (GREETING + b"\x04\x0a\x05HELLO\x01a\x02b", "shows no ticket"),
        (GREETING + b"\x04\x0b\x05HELLO\x01a\x01bc", "shows no ticket"),
    ],
)
async def test_a_stranger_shows_no_ticket(sent: bytes, reason: str) -> None:
    ours, its = socket.socketpair()
    with ours, its:
        ours.setblocking(False)
        its.sendall(sent)
        its.shutdown(socket.SHUT_WR)
        with pytest.raises((ProtocolError, ConnectionError), match=reason):
            await receive_ticket(ours)
