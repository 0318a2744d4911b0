from __future__ import annotations

import asyncio
import logging
import select
import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from waiting import until

from areal_sc.errors import PeerLost
from areal_sc.transport.sockets.zmq_socket import FRAME_BYTES, AsyncSocket, Frame

Context = zmq.Context[zmq.Socket[bytes]]

LEFT, RIGHT = b"left", b"right"
CUT_SIZES = [0, 1, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 3 * FRAME_BYTES, 1_000_000]


@pytest.fixture
def context() -> Iterator[Context]:
    with zmq.Context() as made:
        yield made


class Inbox:
    """Messages as they came, each without its sender."""

    def __init__(self) -> None:
        self.messages: list[list[bytes]] = []

    def put(self, frames: list[Frame]) -> None:
        self.messages.append([bytes(frame) for frame in frames[1:]])

    async def holds(self, count: int) -> list[list[bytes]]:
        await until(lambda: len(self.messages) >= count)
        return self.messages


async def pair(
    context: Context,
    on_left: Callable[[list[Frame]], None],
    on_right: Callable[[list[Frame]], None],
    *,
    max_parts: int = 1024,
) -> tuple[AsyncSocket, AsyncSocket]:
    """Two connected ROUTERs, of which little is in the kernel.

    Each reaches the other by its name: `LEFT` or `RIGHT`.
    """
    left, right = (context.socket(zmq.ROUTER) for _ in range(2))
    for socket, own, other in ((left, LEFT, RIGHT), (right, RIGHT, LEFT)):
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTING_ID, own)
        socket.setsockopt(zmq.CONNECT_ROUTING_ID, other)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.SNDBUF, 1 << 14)
        socket.setsockopt(zmq.RCVBUF, 1 << 14)
    left.bind("tcp://127.0.0.1:0")
    right.connect(left.getsockopt_string(zmq.LAST_ENDPOINT))
    sockets = AsyncSocket(left, on_left), AsyncSocket(right, on_right, max_parts=max_parts)
    async with asyncio.timeout(20):
        while True:  # until the left one knows the name of the right one
            try:
                sockets[0].send([RIGHT, b"connected"])
                break
            except PeerLost:
                await asyncio.sleep(0.001)
    # A new socket looks at its inbox in its first turn; until it has, ZMQ signals nothing.
    await asyncio.sleep(0)
    return sockets


def ignore(frames: list[Frame]) -> None:
    """The message is of no interest."""


async def test_what_is_not_read_waits_and_nothing_is_lost(context: Context) -> None:
    received: list[int] = []
    left, right = await pair(context, ignore, ignore)
    asyncio.get_running_loop().remove_reader(right._fd)  # it does not read
    payload = bytes(2 * FRAME_BYTES)  # two frames
    for i in range(2000):
        left.send([RIGHT, str(i).encode(), payload])

    def take(frames: list[Frame]) -> None:
        if len(frames) == 4:
            received.append(int(bytes(frames[1])))

    right._on_message = take
    asyncio.get_running_loop().add_reader(right._fd, right._look)
    right._look_soon()
    await until(lambda: len(received) == 2000)
    assert received == list(range(2000))
    left.close()
    right.close()


async def test_both_directions_make_progress_at_once(context: Context) -> None:
    """A send may swallow the signal of an arrival; the receiver must see it all the same."""
    at_left, at_right = Inbox(), Inbox()
    left, right = await pair(context, at_left.put, at_right.put)
    await at_right.holds(1)
    at_right.messages.clear()

    async def send_all(socket: AsyncSocket, name: bytes) -> None:
        for i in range(2000):
            socket.send([name, str(i).encode()])

    async with asyncio.timeout(60):
        await asyncio.gather(send_all(left, RIGHT), send_all(right, LEFT))
        expected = [[str(i).encode()] for i in range(2000)]
        assert await at_left.holds(2000) == expected
        assert await at_right.holds(2000) == expected
    left.close()
    right.close()


async def test_a_send_that_swallows_the_signal_of_an_arrival_still_sees_it(
    context: Context,
) -> None:
    at_left = Inbox()
    left, right = await pair(context, at_left.put, ignore)
    for i in range(20):
        right.send([LEFT, b"arrival"])
        assert select.select([left._fd], [], [], 20)[0]
        time.sleep(0.002)  # noqa: ASYNC251 - ZMQ looks at its signals once in a millisecond
        left.send([RIGHT, b"answer"])
        await at_left.holds(i + 1)
    left.close()
    right.close()


async def test_what_a_message_makes_one_send_does_not_hide_the_next_message(
    context: Context,
) -> None:
    """A server answers from within `on_message`, where the inbox is being looked at already."""
    at_right = Inbox()
    num_asked = 0

    def answer(frames: list[Frame]) -> None:
        nonlocal num_asked
        num_asked += 1
        time.sleep(0.002)  # ZMQ looks at its signals once in a millisecond
        left.send([RIGHT, *frames[1:]])

    left, right = await pair(context, answer, at_right.put)
    for i in range(100):
        right.send([LEFT, str(i).encode()])
    answers = await at_right.holds(101)
    assert answers[1:] == [[str(i).encode()] for i in range(100)]
    assert num_asked == 100
    left.close()
    right.close()


async def test_an_error_in_on_message_leaves_the_rest_of_the_inbox(
    context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    at_right = Inbox()

    def sometimes(frames: list[Frame]) -> None:
        at_right.put(frames)
        if len(at_right.messages) % 3 == 0:
            raise RuntimeError("a bug in on_message")

    left, right = await pair(context, ignore, sometimes)
    with caplog.at_level(logging.CRITICAL, "asyncio"):
        for i in range(100):
            left.send([RIGHT, str(i).encode()])
        received = await at_right.holds(101)
    assert received[1:] == [[str(i).encode()] for i in range(100)]
    left.close()
    right.close()


async def test_a_router_says_that_its_peer_is_gone(context: Context) -> None:
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.bind("tcp://127.0.0.1:0")
    socket = AsyncSocket(router, ignore)
    with pytest.raises(PeerLost, match="the peer has disconnected"):
        socket.send([b"nobody", b"hello"])
    socket.close()


async def test_a_socket_may_be_closed_by_the_message_it_gives(context: Context) -> None:
    received = 0

    def close(frames: list[Frame]) -> None:
        nonlocal received
        if bytes(frames[-1]) == b"close":
            received += 1
            right.close()

    left, right = await pair(context, ignore, close)
    for _ in range(2):  # the second is not given any more
        left.send([RIGHT, b"close"])
    await until(lambda: received == 1)
    left.close()


async def test_the_last_part_is_cut_into_frames(context: Context) -> None:
    at_right = Inbox()
    left, right = await pair(context, ignore, at_right.put)
    sent = [bytes([number % 251 for number in range(size)]) for size in CUT_SIZES]
    for payload in sent:
        left.send([RIGHT, b"x" * 2 * FRAME_BYTES, payload])
    _, *received = await at_right.holds(1 + len(sent))
    for payload, (first, *frames) in zip(sent, received, strict=True):
        assert first == b"x" * 2 * FRAME_BYTES
        assert b"".join(frames) == payload
        assert max(map(len, frames)) <= FRAME_BYTES
        assert len(frames) == max(1, -(-len(payload) // FRAME_BYTES))
    left.close()
    right.close()


async def test_parts_over_the_limit_are_read_and_thrown_away(context: Context) -> None:
    few = Inbox()
    left, right = await pair(context, ignore, few.put, max_parts=2)
    left.send([RIGHT, *[b"part"] * 50])
    left.send([RIGHT, b"next"])
    assert await few.holds(3) == [[b"connected"], [b"part"] * 2, [b"next"]]
    right.close()
    left.close()
