"""RPC over real sockets on loopback: peers that end, do not read, or send what they should not."""

from __future__ import annotations

import asyncio
import gc
import select
import socket

import pytest
import zmq
from integration.rpc_methods import LIFE, connected, named, serving, transport
from waiting import until

from areal_sc.errors import PeerLost, ProtocolError, RpcTimeout, TransportError
from areal_sc.transport.rpc.client import RpcClient
from areal_sc.transport.rpc.codec import MAX_MESSAGE_BYTES, Reply, Request, decode, encode
from areal_sc.transport.rpc.server import RpcServer
from areal_sc.transport.rpc.transport import ZmqTransport


async def test_a_server_that_ends_fails_what_waits_for_it() -> None:
    async with serving() as (server, methods, address), transport() as callers:
        client = callers.connect(address, "train/2", LIFE)
        call = asyncio.create_task(client.call(named("wait"), {}, timeout_s=100))
        await methods.started.wait()
        await server.close()
        with pytest.raises(PeerLost, match=r"train/2 at tcp.* is lost: the connection ended"):
            await call
        with pytest.raises(PeerLost, match="echo not sent"):
            await client.call(named("echo"), {}, timeout_s=100)


@pytest.mark.parametrize("has_reply", [False, True])
async def test_what_a_method_returns_as_the_server_ends_still_arrives(has_reply: bool) -> None:
    async with serving() as (server, methods, address), transport() as callers:
        client = callers.connect(address, "train/2", LIFE)
        call = asyncio.create_task(client.call(named("wait"), {}, timeout_s=20))
        await methods.started.wait()
        methods.go_on.set()
        await asyncio.sleep(0)  # the method has returned; its reply is not made yet
        if has_reply:
            await until(lambda: len(server._finished) > 0)
        closing = asyncio.create_task(server.close())
        assert await call == 1
        await closing


async def test_replies_that_arrived_before_the_end_are_delivered() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.bind("tcp://127.0.0.1:0")
        address = server.getsockopt_string(zmq.LAST_ENDPOINT)
        async with transport() as callers:
            client = callers.connect(address, "train/2", LIFE)
            calls = [
                asyncio.create_task(client.call(named("x"), {}, timeout_s=100)) for _ in range(100)
            ]
            requests: list[list[bytes]] = []
            async with asyncio.timeout(20):
                while len(requests) < len(calls):
                    await asyncio.sleep(0)
                    if server.poll(0):
                        requests.append(server.recv_multipart())
            # answered, and gone, while the client's event loop has no turn
            for caller, request in requests:
                message = decode([memoryview(request)])
                server.send_multipart([caller, encode(Reply(message.request_id, 1))])
            server.close(linger=60_000)  # at most: until they are on their way
            assert callers._hub is not None
            assert select.select([callers._hub._monitor._fd], [], [], 60)[0]
            assert await asyncio.gather(*calls) == [1] * 100
            await until(lambda: client.is_lost is not None)
            with pytest.raises(PeerLost):
                await client.call(named("x"), {}, timeout_s=100)


async def test_a_connection_that_ended_is_made_again() -> None:
    async with connected() as (server, methods, client):
        assert await client.call(named("count"), {}, timeout_s=20) == 1
        await server.close()
        await until(lambda: client.is_lost is not None)
        with pytest.raises(PeerLost):
            await client.call(named("count"), {}, timeout_s=20)
        # the same worker is reachable again, as after a failure of the network
        back = RpcServer(methods.served(), node_id="train/2", incarnation=LIFE, bind=client.address)
        await back.start()
        await until(lambda: client.is_lost is None)
        assert await client.call(named("count"), {}, timeout_s=20) == 2
        await back.close()


async def test_requests_whose_calls_have_failed_are_never_delivered() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as unread:
        unread.setsockopt(zmq.RCVHWM, 1)
        unread.setsockopt(zmq.RCVBUF, 1 << 14)
        unread.bind("tcp://127.0.0.1:0")
        address = unread.getsockopt_string(zmq.LAST_ENDPOINT)
        async with transport() as callers:
            client = callers.connect(address, "train/2", LIFE)
            calls = [
                asyncio.create_task(
                    client.call(named("count"), {"blob": bytes(1 << 17)}, timeout_s=100)
                )
                for _ in range(100)  # more than the kernel's buffers take
            ]
            await until(lambda: bool(unread.poll(0)))
            unread.close(linger=0)
            ends = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(end) for end in ends} == {PeerLost}
            async with serving(bind=address) as (_, methods, _):
                await until(lambda: client.is_lost is None)
                assert await client.call(named("echo"), {"x": 1}, timeout_s=20) == {"x": 1}
                assert methods.num_calls == 0


async def test_calls_to_a_server_that_does_not_read_end_at_their_deadline() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as unread:
        unread.setsockopt(zmq.RCVHWM, 1)
        unread.setsockopt(zmq.RCVBUF, 1 << 14)
        unread.bind("tcp://127.0.0.1:0")
        address = unread.getsockopt_string(zmq.LAST_ENDPOINT)
        async with transport() as callers:
            client = callers.connect(address, "train/2", LIFE)
            args = {"blob": bytes(1 << 15)}
            calls = [
                asyncio.create_task(client.call(named("count"), args, timeout_s=1))
                for _ in range(2000)
            ]
            ends = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(end) for end in ends} == {RpcTimeout}


async def test_an_address_where_nobody_listens_is_given_up() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        async with transport() as callers:
            client = callers.connect(address, "train/2", LIFE)
            with pytest.raises(PeerLost, match="refused the connection 3 times"):
                await client.call(named("echo"), {}, timeout_s=100)


async def test_fail_pending_ends_every_waiting_call_and_no_later_one() -> None:
    async with connected() as (_, methods, client):
        calls = [
            asyncio.create_task(client.call(named("wait"), {}, timeout_s=100)) for _ in range(3)
        ]
        await until(lambda: methods.num_calls == 3)
        client.fail_pending(PeerLost("the scheduler saw train/2 exit"))
        for call in calls:
            with pytest.raises(PeerLost, match="scheduler saw"):
                await call
        assert await client.call(named("echo"), {}, timeout_s=20) == {}


async def test_calls_that_fail_and_are_cancelled_at_once_leave_no_error_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as unread:
        unread.setsockopt(zmq.RCVHWM, 1)
        unread.bind("tcp://127.0.0.1:0")
        async with transport() as callers:
            address = unread.getsockopt_string(zmq.LAST_ENDPOINT)
            client = callers.connect(address, "train/2", LIFE)
            await fail_and_cancel(client)
            gc.collect()
            await asyncio.sleep(0)
    assert "never retrieved" not in caplog.text


async def fail_and_cancel(client: RpcClient) -> None:
    """Calls of which some wait for their reply, and some for room in the queue."""
    args = {"blob": bytes(1 << 15)}
    calls = [asyncio.create_task(client.call(named("x"), args, timeout_s=100)) for _ in range(2000)]
    await until(lambda: len(client._pending) == 2000)
    await asyncio.sleep(0.05)
    client.fail_pending(PeerLost("gone"))
    for call in calls:
        call.cancel()
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(end) for end in ends} == {asyncio.CancelledError}


async def test_closing_a_client_ends_its_calls_and_no_others() -> None:
    async with serving() as (_, methods, address), transport() as callers:
        client, other = (callers.connect(address, "train/2", LIFE) for _ in range(2))
        kept = asyncio.create_task(other.call(named("wait"), {}, timeout_s=20))
        call = asyncio.create_task(client.call(named("wait"), {}, timeout_s=100))
        await until(lambda: methods.num_waiting == 2)
        await client.close()
        with pytest.raises(PeerLost, match="closed here"):
            await call
        with pytest.raises(PeerLost, match="closed here"):
            await client.call(named("echo"), {}, timeout_s=100)
        methods.go_on.set()
        assert await kept == 2


async def test_connections_can_be_closed_at_any_moment_of_their_life() -> None:
    async with serving() as (_, _, address), transport() as callers:
        for i in range(300):
            client = callers.connect(address if i % 3 else "tcp://127.0.0.1:9", "train/2", LIFE)
            if i % 3 == 1:
                await client.call(named("echo"), {}, timeout_s=20)
            await client.close()
            await client.close()


async def test_a_transport_closes_its_connections_and_makes_no_more() -> None:
    async with serving() as (_, _, address):
        callers = ZmqTransport()
        clients = [callers.connect(address, "train/2", LIFE) for _ in range(3)]
        assert [await c.call(named("count"), {}, timeout_s=20) for c in clients] == [1, 2, 3]
        await callers.close()
        await callers.close()
        with pytest.raises(PeerLost):
            await clients[0].call(named("count"), {}, timeout_s=20)
        with pytest.raises(TransportError, match="transport is closed"):
            callers.connect(address, "train/2", LIFE)


async def test_a_request_over_the_limit_is_refused_before_it_is_sent() -> None:
    async with serving() as (_, _, address), transport() as callers:
        client = callers.connect(address, "train/2", LIFE)
        args = {"blob": bytes(MAX_MESSAGE_BYTES)}
        with pytest.raises(ProtocolError, match=rf"the limit is {MAX_MESSAGE_BYTES}"):
            await client.call(named("echo"), args, timeout_s=100)
        assert await client.call(named("echo"), {"blob": b""}, timeout_s=20) == {"blob": b""}


async def test_a_reply_that_no_server_sends_is_counted_and_ends_nothing() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.bind("tcp://127.0.0.1:0")
        address = server.getsockopt_string(zmq.LAST_ENDPOINT)
        async with transport() as callers:
            client = callers.connect(address, "train/2", LIFE)
            call = asyncio.create_task(client.call(named("x"), {}, timeout_s=20))
            await until(lambda: bool(server.poll(0)))
            caller, frame = server.recv_multipart()
            request = decode([memoryview(frame)])
            good = encode(Reply(request.request_id, "good"))
            for parts in ([b""], [b"garbage"], [frame], [good, good], [good[:-1]], [b"x"] * 100):
                server.send_multipart([caller, *parts])
            server.send_multipart([caller, encode(Reply("no such id", "bad"))])
            server.send_multipart([caller, good])
            assert await call == "good"
            assert client.malformed.num == 6


async def test_a_caller_that_does_not_read_delays_nobody() -> None:
    async with connected() as (_, methods, client):
        with zmq.Context() as context, context.socket(zmq.DEALER) as sleeper:
            sleeper.setsockopt(zmq.LINGER, 0)
            sleeper.setsockopt(zmq.RCVHWM, 1)
            sleeper.setsockopt(zmq.RCVBUF, 1 << 16)
            sleeper.connect(client.address)
            blob = {"blob": bytes(1 << 14)}
            for number in range(2000):  # more than the kernel takes, and ZMQ by default
                sleeper.send(encode(Request(f"s{number}", LIFE, "quick", blob)))
                if number % 200 == 0:
                    x = {"x": number}
                    assert await client.call(named("echo"), x, timeout_s=20) == x
            sleeper.send(encode(Request("last", LIFE, "quick_count", {})))
            await until(lambda: methods.num_calls == 1)
            assert await client.call(named("echo"), {}, timeout_s=20) == {}


async def test_a_flood_of_messages_leaves_the_loop_its_turns() -> None:
    async with connected() as (_, _, client):
        turns = 0
        done = False

        async def count_turns() -> None:
            nonlocal turns
            while not done:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count_turns())
        await asyncio.gather(*(client.call(named("quick"), {}, timeout_s=20) for _ in range(1000)))
        done = True
        await counting
        assert turns > 30  # 1000 messages in batches of 32
