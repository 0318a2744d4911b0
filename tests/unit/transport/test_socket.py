from __future__ import annotations

import asyncio
import select
import time
from collections.abc import Iterator

import pytest
import zmq

from areal_sc.errors import PeerLost
from areal_sc.transport.socket import AsyncSocket

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def context() -> Iterator[Context]:
    with zmq.Context() as made:
        yield made


def tcp_pair(
    context: Context, high_water_mark: int = 1000, max_parts: int = 1024
) -> tuple[AsyncSocket, AsyncSocket]:
    """Two connected sockets that queue `high_water_mark` messages and little in the kernel."""
    sockets = [context.socket(zmq.DEALER) for _ in range(2)]
    for socket in sockets:
        socket.setsockopt(zmq.SNDHWM, high_water_mark)
        socket.setsockopt(zmq.RCVHWM, high_water_mark)
        socket.setsockopt(zmq.SNDBUF, 1 << 14)
        socket.setsockopt(zmq.RCVBUF, 1 << 14)
    sockets[0].bind("tcp://127.0.0.1:0")
    sockets[1].connect(sockets[0].getsockopt_string(zmq.LAST_ENDPOINT))
    return AsyncSocket(sockets[0]), AsyncSocket(sockets[1], max_parts=max_parts)


async def test_a_sender_waits_at_the_high_water_mark_and_nothing_is_lost(context: Context) -> None:
    left, right = tcp_pair(context, high_water_mark=2)
    payload = bytes(1 << 16)
    num_sent = 0

    async def send_all() -> None:
        nonlocal num_sent
        for i in range(100):
            await left.send_multipart([str(i).encode(), payload])
            num_sent += 1

    sending = asyncio.create_task(send_all())
    assert bytes((await right.recv_multipart())[0]) == b"0"
    while left.send_nowait([b"probe"]):  # noqa: ASYNC110 - until the queue is full
        await asyncio.sleep(0)
    assert num_sent < 100  # it waits for the receiver
    received = []
    while len(received) < 99:
        parts = await right.recv_multipart()
        if len(parts) == 2:
            received.append(int(bytes(parts[0])))
    await sending
    assert received == list(range(1, 100))
    left.close()
    right.close()


async def test_both_directions_make_progress_at_once(context: Context) -> None:
    """A send may swallow the signal of an arrival; the receiver must see it all the same."""
    left, right = tcp_pair(context)

    async def talk(socket: AsyncSocket) -> int:
        async def send() -> None:
            for i in range(2000):
                await socket.send_multipart([str(i).encode()])

        sending = asyncio.create_task(send())
        for i in range(2000):
            assert bytes((await socket.recv_multipart())[0]) == str(i).encode()
        await sending
        return 2000

    async with asyncio.timeout(60):
        assert await asyncio.gather(talk(left), talk(right)) == [2000, 2000]
    left.close()
    right.close()


async def test_a_send_that_swallows_the_signal_of_an_arrival_still_wakes_the_receiver(
    context: Context,
) -> None:
    left, right = tcp_pair(context)
    await right.send_multipart([b"first"])
    await left.recv_multipart()
    for _ in range(20):
        receiving = asyncio.create_task(left.recv_multipart())
        await asyncio.sleep(0)
        right.send_nowait([b"arrival"])
        assert select.select([left._fd], [], [], 20)[0]
        time.sleep(0.002)  # noqa: ASYNC251 - ZMQ looks at its signals once in a millisecond
        assert left.send_nowait([b"answer"])
        async with asyncio.timeout(20):
            assert bytes((await receiving)[0]) == b"arrival"
    left.close()
    right.close()


async def test_a_send_that_fails_and_swallows_the_signal_still_wakes_the_receiver(
    context: Context,
) -> None:
    left, right = tcp_pair(context, high_water_mark=1)
    await left.send_multipart([b"connected"])
    await right.recv_multipart()
    payload = bytes(1 << 20)
    while left.send_nowait([payload]):  # noqa: ASYNC110 - until the queue is full
        await asyncio.sleep(0.01)
    for _ in range(20):
        receiving = asyncio.create_task(left.recv_multipart())
        await asyncio.sleep(0)
        right.send_nowait([b"arrival"])
        assert select.select([left._fd], [], [], 20)[0]
        time.sleep(0.002)  # noqa: ASYNC251 - ZMQ looks at its signals once in a millisecond
        while left.send_nowait([payload]):  # the last attempt fails
            pass
        async with asyncio.timeout(20):
            assert bytes((await receiving)[0]) == b"arrival"
    left.close()
    right.close()


async def test_a_router_says_that_its_peer_is_gone(context: Context) -> None:
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.bind("tcp://127.0.0.1:0")
    socket = AsyncSocket(router)
    with pytest.raises(PeerLost, match="the peer has disconnected"):
        await socket.send_multipart([b"nobody", b"hello"])
    socket.close()


async def test_closing_ends_a_waiting_sender(context: Context) -> None:
    alone = AsyncSocket(context.socket(zmq.DEALER))  # no peer, so no room
    sending = asyncio.create_task(alone.send_multipart([b"hello"]))
    await asyncio.sleep(0)
    assert not sending.done()
    alone.close()
    alone.close()
    with pytest.raises(PeerLost, match="closed"):
        await sending


async def test_parts_over_the_limit_are_read_and_thrown_away(context: Context) -> None:
    left, few = tcp_pair(context, max_parts=2)
    await left.send_multipart([b"part"] * 50)
    await left.send_multipart([b"next"])
    assert [bytes(part) for part in await few.recv_multipart()] == [b"part"] * 3
    assert [bytes(part) for part in await few.recv_multipart()] == [b"next"]
    few.close()
    left.close()
