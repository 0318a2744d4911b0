"""Frames of a ZMTP connection, against bytes as they come and as they go."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from unit.transport.bulk.keeping_sink import LARGE, Sink, until

from areal_sc.transport.bulk.frame_stream import FrameStream, Outgoing
from areal_sc.transport.bulk.turns import Turns


@asynccontextmanager
async def stream_of(sink: Sink) -> AsyncIterator[tuple[FrameStream, socket.socket]]:
    """A stream that was greeted, and the peer's end of its connection."""
    mine, peers = socket.socketpair()
    mine.setblocking(False)
    peers.setblocking(False)
    stream = FrameStream(mine, sink, Turns())
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
        stream.send([([b"nobody hears this, and nothing happens"], False)])
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
        stream.send([([bytes(1 << 22)], False)])
        waiting = list(stream._unsent)
        assert sum(map(len, waiting)) > 1 << 20
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(20):
            for _ in range(100):
                await loop.sock_sendall(peer, b"\x04\x0b\x04PING\x00\x64same" * 100)
        peer.send(frame(b"the last one"))
        await until(lambda: len(stream._sink.messages) == 2)  # type: ignore[attr-defined]
        assert list(stream._unsent) == waiting
        stream.ping()  # has no place there either
        assert list(stream._unsent) == waiting


async def test_after_close_nothing_is_heard() -> None:
    sink = Sink()
    async with stream_of(sink) as (stream, peer):
        peer.send(frame(b"too late"))
        stream.close()
        stream.close()
        stream.ping()
        peer.close()
        await asyncio.sleep(0.01)
    assert (sink.messages, sink.lost) == ([[]], [])


async def received_by(peer: socket.socket, num_bytes: int) -> bytes:
    data = b""
    async with asyncio.timeout(20):
        while len(data) < num_bytes:
            data += await asyncio.get_running_loop().sock_recv(peer, 1 << 16)
    return data


async def test_messages_leave_as_their_frames_however_they_are_cut() -> None:
    expected = b"".join(
        frame(part, more=number < len(message) - 1)
        for message in MESSAGES
        for number, part in enumerate(message)
    )
    async with stream_of(Sink()) as (stream, peer):
        for message in MESSAGES:
            stream.send(
                ([part[: len(part) // 3], part[len(part) // 3 :]], number < len(message) - 1)
                for number, part in enumerate(message)
            )
        assert await received_by(peer, len(expected)) == expected
        assert stream.moved_bytes == len(expected)
        assert stream.num_waiting == 0


async def test_frames_are_made_only_when_there_is_room_for_them() -> None:
    num_made = 0

    def frames(count: int) -> Iterator[Outgoing]:
        nonlocal num_made
        for number in range(count):
            num_made += 1
            yield [number.to_bytes(4, "big") + bytes(100_000)], number < count - 1

    async with stream_of(Sink()) as (stream, peer):
        stream.send(frames(200))
        stream.send(frames(200))
        for _ in range(10):
            await asyncio.sleep(0)
        assert num_made < 100  # of 40 MB; what a socket pair holds is less than one
        assert stream.num_waiting == 2
        length = 9 + 100_004
        received = await received_by(peer, 400 * length)
        starts = range(0, 400 * length, length)
        numbers = [int.from_bytes(received[start + 9 : start + 13], "big") for start in starts]
        assert numbers == [*range(200), *range(200)]
        assert (stream.num_waiting, num_made) == (0, 400)


async def test_an_error_in_making_a_frame_ends_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def frames() -> Iterator[Outgoing]:
        yield [b"the first"], True
        raise MemoryError("no room for the second")

    sink = Sink()
    async with stream_of(sink) as (stream, _):
        stream.send(frames())
        await until(lambda: sink.lost)
    assert sink.lost == ["MemoryError('no room for the second')"]
    assert "Traceback" in caplog.text


async def test_what_the_sink_sends_in_answer_leaves_in_the_same_turn() -> None:
    class Answering(Sink):
        stream: FrameStream

        def on_frame(self, *, has_more: bool) -> None:
            super().on_frame(has_more=has_more)
            self.stream.send([([b"to ", self.messages[-2][0]], False)])

    sink = Answering()
    async with stream_of(sink) as (stream, peer):
        sink.stream = stream
        peer.send(frame(b"one") + frame(b"two"))
        await until(lambda: len(sink.messages) == 3)
        assert peer.recv(100) == frame(b"to one") + frame(b"to two")


async def test_a_ping_asks_for_an_answer_that_alone_counts_as_movement() -> None:
    async with stream_of(Sink()) as (stream, peer):
        stream.ping()
        stream.send([([b"message"], False)])
        ping = b"\x04\x07\x04PING\x00\x00"
        assert await received_by(peer, len(ping) + 9) == ping + frame(b"message")
        assert stream.moved_bytes == 9
        stream.ping()
        assert await received_by(peer, len(ping)) == ping
        assert stream.moved_bytes == 9
        peer.send(b"\x04\x05\x04PONG")
        await until(lambda: stream.moved_bytes == 9 + 7)
