"""Messages over a pair of real sockets."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import pytest
from waiting import until

from areal_sc.errors import ProtocolError, TransportError
from areal_sc.transport.bulk.messages import HEAD
from areal_sc.transport.bulk.stream import MessageStream, connect

LARGE = 3 << 20
TAG = bytes(range(16))


def message(kind: int, *parts: bytes) -> list[bytes]:
    return [HEAD.pack(sum(map(len, parts)), kind, TAG), *parts]


class Sink:
    """Keeps what comes; content lies in places of `place_bytes`."""

    def __init__(self, place_bytes: int = 1000) -> None:
        self.messages: list[tuple[int, bytes]] = []
        self.lost: Exception | None = None
        self.error: Exception | None = None  # raised at the next head
        self._place_bytes = place_bytes
        self._places: list[memoryview] = []

    def on_head(self, kind: int, num_bytes: int) -> Sequence[memoryview]:
        if self.error is not None:
            raise self.error
        memory = memoryview(bytearray(num_bytes))
        size = self._place_bytes
        self._places = [memory[i : i + size] for i in range(0, num_bytes, size)]
        return self._places

    def on_message(self, kind: int, tag: bytes) -> None:
        assert tag == TAG
        self.messages.append((kind, b"".join(self._places)))

    def on_lost(self, reason: Exception) -> None:
        assert self.lost is None
        self.lost = reason


@asynccontextmanager
async def pair(sink: Sink) -> AsyncIterator[tuple[MessageStream, Sink]]:
    """(a stream whose messages come to the sink, the sink of what comes back)."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    near = await connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
    far, _ = await asyncio.get_running_loop().sock_accept(listener)
    back = Sink()
    sender, receiver = MessageStream(near, back), MessageStream(far, sink)
    try:
        yield sender, back
    finally:
        sender.close()
        receiver.close()
        listener.close()


@pytest.mark.parametrize("place_bytes", [1000, 70_000, 1 << 30])
async def test_messages_of_all_sizes_come_whole_and_in_order(place_bytes: int) -> None:
    sizes = [0, 1, 16_384 - HEAD.size, 16_384, 5, LARGE, 0, 100_000, 70_000]
    sent = [(kind, os.urandom(size)) for kind, size in enumerate(sizes * 3)]
    sink = Sink(place_bytes)
    async with pair(sink) as (stream, _):
        for kind, content in sent:
            stream.send(partial(message, kind, content[:7], content[7:]))
        await until(lambda: len(sink.messages) == len(sent))
    assert sink.messages == sent


async def test_a_message_may_come_byte_by_byte() -> None:
    sink = Sink()
    async with pair(sink) as (stream, _):
        for _ in range(2):
            for byte in b"".join(message(7, b"content")):
                stream.send(lambda byte=byte: [bytes([byte])])  # type: ignore[misc]
                await asyncio.sleep(0)
        await until(lambda: len(sink.messages) == 2)
    assert sink.messages == [(7, b"content")] * 2


async def test_nothing_is_made_for_a_peer_that_does_not_read() -> None:
    sink, num_made = Sink(1 << 30), 0

    def make() -> list[bytes]:
        nonlocal num_made
        num_made += 1
        return message(0, bytes(LARGE))

    async with pair(sink) as (stream, _):
        for _ in range(50):
            stream.send(make)
        assert num_made < 10  # the loop has not turned: nobody reads
        assert stream.num_waiting == 50 - num_made
        await until(lambda: len(sink.messages) == 50)
        assert stream.moved_bytes == 50 * (LARGE + HEAD.size)


@pytest.mark.parametrize("error", [ProtocolError("a fault"), ZeroDivisionError("a defect")])
async def test_an_error_of_the_sink_ends_the_connection(error: Exception) -> None:
    sink = Sink()
    sink.error = error
    async with pair(sink) as (stream, back):
        stream.send(partial(message, 0, b"content"))
        await until(lambda: back.lost is not None)
        assert sink.lost is error


async def test_an_error_of_a_message_that_is_made_ends_the_connection() -> None:
    def make() -> list[bytes]:
        raise ZeroDivisionError("a defect")

    sink = Sink()
    async with pair(sink) as (stream, back):
        stream.send(make)
        assert back.lost is None  # not within the call
        await until(lambda: back.lost is not None and sink.lost is not None)
        assert isinstance(back.lost, ZeroDivisionError)


async def test_who_cannot_be_connected_to_is_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionRefusedError, match=f"'127.0.0.1', {port}"):
        await connect(f"tcp://127.0.0.1:{port}")
    with pytest.raises(TransportError, match="expected an address"):
        await connect("127.0.0.1:80")
