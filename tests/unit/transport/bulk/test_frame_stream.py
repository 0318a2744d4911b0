"""The client's own end of ZMTP: against bytes as they come, and against ZMQ itself."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import zmq
import zmq.auth.thread

from areal_sc.errors import PeerLost, ProtocolError, TransportError
from areal_sc.transport.bulk.frame_stream import FrameStream

LARGE = 300_000


class Sink:
    """Keeps frames; the memory of each is cut into places of `place_bytes`."""

    def __init__(self, place_bytes: int = 1 << 30, max_bytes: int = 1 << 24) -> None:
        self.messages: list[list[bytes]] = [[]]
        self.lost: list[str] = []
        self._place_bytes = place_bytes
        self._max_bytes = max_bytes
        self._frame = bytearray()

    def places(self, num_bytes: int) -> list[memoryview]:
        if num_bytes > self._max_bytes:
            raise ProtocolError(f"a frame of {num_bytes} bytes")
        self._frame = bytearray(num_bytes)
        view, size = memoryview(self._frame), self._place_bytes
        return [view[start : start + size] for start in range(0, num_bytes, size)]

    def on_frame(self, *, has_more: bool) -> None:
        self.messages[-1].append(bytes(self._frame))
        if not has_more:
            self.messages.append([])

    def on_lost(self, reason: str) -> None:
        self.lost.append(reason)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - counters have no event
            await asyncio.sleep(0.001)


@asynccontextmanager
async def stream_of(sink: Sink) -> AsyncIterator[tuple[FrameStream, socket.socket]]:
    """A stream that was greeted, and the peer's end of its connection."""
    mine, peers = socket.socketpair()
    mine.setblocking(False)
    peers.setblocking(False)
    stream = FrameStream(mine, sink)
    try:
        yield stream, peers
    finally:
        stream.close()
        peers.close()


def frame(payload: bytes, more: int = 0) -> bytes:
    if len(payload) < 256:
        return bytes([more, len(payload)]) + payload
    return bytes([more | 2]) + len(payload).to_bytes(8, "big") + payload


MESSAGES = [
    [b""],
    [b"a"],
    [b"x" * 255, b"y" * 256],
    [b"head", os.urandom(LARGE), b"tail"],
    [os.urandom(20_000)] * 3,
]


@pytest.mark.parametrize("place_bytes", [1 << 30, 1000, 7_777])
@pytest.mark.parametrize("cut", [1 << 20, 70_001, 4_097])
async def test_frames_come_whole_however_they_are_cut(cut: int, place_bytes: int) -> None:
    data = b"".join(
        frame(part, more=number < len(message) - 1)
        for message in MESSAGES
        for number, part in enumerate(message)
    )
    sink = Sink(place_bytes)
    async with stream_of(sink) as (_, peer):
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(20):
            for start in range(0, len(data), cut):
                await loop.sock_sendall(peer, data[start : start + cut])
                await asyncio.sleep(0)
        await until(lambda: len(sink.messages) > len(MESSAGES))
    assert sink.messages == [*MESSAGES, []]
    assert sink.lost == []


async def test_single_bytes_make_frames_too() -> None:
    message = [b"x" * 300, b"", b"yz"]
    sink = Sink(place_bytes=7)
    async with stream_of(sink) as (_, peer):
        for byte in frame(message[0], 1) + frame(message[1], 1) + frame(message[2]):
            peer.send(bytes([byte]))
            await asyncio.sleep(0)
        await until(lambda: len(sink.messages) == 2)
    assert sink.messages[0] == message


async def test_a_ping_is_answered_with_its_context() -> None:
    async with stream_of(Sink()) as (_, peer):
        peer.send(b"\x04\x0b\x04PING\x00\x64same")
        async with asyncio.timeout(20):
            answer = await asyncio.get_running_loop().sock_recv(peer, 100)
    assert answer == b"\x04\x09\x04PONGsame"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x08\x01x", "mean nothing"),
        (b"\x05\x01x", "mean nothing"),
        (b"\xff" * 10, "mean nothing"),
        (b"\x02" + (1 << 62).to_bytes(8, "big"), "a frame of 4611686018427387904 bytes"),
        (b"\x06" + (1 << 20).to_bytes(8, "big"), "a command of 1048576 bytes"),
    ],
)
async def test_what_no_peer_sends_ends_the_connection(data: bytes, reason: str) -> None:
    sink = Sink()
    async with stream_of(sink) as (stream, peer):
        peer.send(frame(b"good") + data + frame(b"not heard"))
        await until(lambda: sink.lost)
        stream.send(b"nobody hears this, and nothing happens")
    assert sink.messages[0] == [b"good"]
    assert len(sink.lost) == 1
    assert reason in sink.lost[0]


@pytest.mark.parametrize("sent", [b"", b"\x00", frame(bytes(LARGE))[:-1]])
async def test_the_end_of_a_connection_is_told_once(sent: bytes) -> None:
    sink = Sink()
    async with stream_of(sink) as (_, peer):
        async with asyncio.timeout(20):
            await asyncio.get_running_loop().sock_sendall(peer, sent)
        peer.close()
        await until(lambda: sink.lost)
        await asyncio.sleep(0)
    assert sink.lost == ["the connection ended"]
    assert sink.messages == [[]]


async def test_an_error_of_the_sink_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink()

    def fail(num_bytes: int) -> list[memoryview]:
        raise MemoryError(f"no room for {num_bytes} bytes")

    sink.places = fail  # type: ignore[method-assign]
    async with stream_of(sink) as (_, peer):
        peer.send(frame(b"x" * 10))
        await until(lambda: sink.lost)
    assert sink.lost == ["MemoryError('no room for 10 bytes')"]
    assert "Traceback" in caplog.text


async def test_pings_of_a_peer_that_does_not_read_build_nothing_up() -> None:
    async with stream_of(Sink()) as (stream, peer):
        stream.send(bytes(1 << 22))
        waiting = len(stream._unsent)
        assert waiting > 1 << 20
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(20):
            for _ in range(100):
                await loop.sock_sendall(peer, b"\x04\x0b\x04PING\x00\x64same" * 100)
        peer.send(frame(b"the last one"))
        await until(lambda: len(stream._sink.messages) == 2)  # type: ignore[attr-defined]
        assert len(stream._unsent) == waiting


async def test_after_close_nothing_is_heard() -> None:
    sink = Sink()
    async with stream_of(sink) as (stream, peer):
        peer.send(frame(b"too late"))
        stream.close()
        stream.close()
        peer.close()
        await asyncio.sleep(0.01)
    assert (sink.messages, sink.lost) == ([[]], [])


async def test_what_the_kernel_does_not_take_waits() -> None:
    async with stream_of(Sink()) as (stream, peer):
        requests = [os.urandom(100_000) for _ in range(50)]
        for request in requests:
            stream.send(request)
        expected = b"".join(map(frame, requests))
        received = b""
        async with asyncio.timeout(20):
            while len(received) < len(expected):
                received += await asyncio.get_running_loop().sock_recv(peer, 1 << 16)
    assert received == expected


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
        stream = await FrameStream.connect(address, ("me", "secret"), sink)
        for size in (0, 1, 255, 256, LARGE):
            stream.send(bytes(size))
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
            await FrameStream.connect(address, ticket, Sink())


async def test_an_address_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(PeerLost, match="Connect call failed"):
        await FrameStream.connect(f"tcp://127.0.0.1:{port}", ("a", "b"), Sink())
    with pytest.raises(TransportError, match=r"like tcp://10\.0\.0\.1:5555"):
        await FrameStream.connect("somewhere", ("a", "b"), Sink())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "it ended the handshake"),
        (b"HTTP/1.1 400 Bad Request\r\n" + bytes(100), "does not speak ZMTP 3"),
        (b"\xff" + bytes(8) + b"\x7f\x01" + bytes(53), "does not speak ZMTP 3"),
        (b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48), "does not admit by tickets"),
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
        await FrameStream.connect(f"tcp://127.0.0.1:{port}", ("a", "b"), Sink())
    server.close()
    await server.wait_closed()
