"""RPC over real sockets on loopback, both ends in this process."""

from __future__ import annotations

import asyncio
import random
import select
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq

from areal_sc.errors import (
    IncarnationMismatch,
    PeerLost,
    ProtocolError,
    RemoteError,
    RpcTimeout,
    ShardGone,
    TransportError,
)
from areal_sc.transport.codec import FrameLimits, Reply, Request, decode, encode
from areal_sc.transport.rpc import Frame, Frames, RpcClient, RpcServer, ZmqTransport

LIFE = "life1"


class Methods:
    """Methods whose progress a test can observe and steer."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_cancelled = 0
        self.started = asyncio.Event()
        self.go_on = asyncio.Event()

    async def echo(self, args: dict[str, Any], frames: list[Frame]) -> Any:
        return args

    async def count(self, args: dict[str, Any], frames: list[Frame]) -> int:
        self.num_calls += 1
        return self.num_calls

    async def bulk(self, args: dict[str, Any], frames: list[Frame]) -> Frames:
        self.num_calls += 1
        return Frames({"sizes": [len(frame) for frame in frames]}, frames)

    async def one_frame(self, args: dict[str, Any], frames: list[Frame]) -> Frames:
        return Frames(None, [b"x"])

    async def stuck(self, args: dict[str, Any], frames: list[Frame]) -> Frames:
        return Frames(None, [bytes(1 << 17)])

    async def large(self, args: dict[str, Any], frames: list[Frame]) -> bytes:
        self.num_calls += 1
        return bytes(1 << 20)

    async def wait(self, args: dict[str, Any], frames: list[Frame]) -> int:
        self.num_calls += 1
        self.started.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return self.num_calls

    async def fail(self, args: dict[str, Any], frames: list[Frame]) -> None:
        self.num_calls += 1
        if args.get("typed"):
            raise ShardGone("shard 7 on train/2 is gone")
        raise KeyError("absent")

    async def unsendable(self, args: dict[str, Any], frames: list[Frame]) -> object:
        return {1, 2}

    async def cancelled_inside(self, args: dict[str, Any], frames: list[Frame]) -> None:
        raise asyncio.CancelledError

    def handlers(self) -> dict[str, Any]:
        names = [name for name in vars(Methods) if not name.startswith("_") and name != "handlers"]
        return {name: getattr(self, name) for name in names}


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[tuple[RpcServer, Methods, str]]:
    methods = Methods()
    server = RpcServer(methods.handlers(), node_id="train/2", incarnation=LIFE, **options)
    address = await server.start()
    try:
        yield server, methods, address
    finally:
        await server.close()


@asynccontextmanager
async def connected(**options: Any) -> AsyncIterator[tuple[RpcServer, Methods, RpcClient]]:
    async with serving(**options) as (server, methods, address):
        client = RpcClient(address, node_id="train/2", incarnation=LIFE)
        try:
            yield server, methods, client
        finally:
            await client.close()


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that another task or ZMQ's thread brings about."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - nobody could set an event
            await asyncio.sleep(0.005)


async def test_values_and_frames_travel_both_ways() -> None:
    async with connected() as (server, _, client):
        args = {"x": [1, 2.5, None, b"b", "é"], "nested": {"y": True}}
        assert await client.call("echo", args, timeout_s=20) == args
        payload = [random.Random(0).randbytes(n) for n in (0, 1, 1000, 3 << 20)]
        value, frames = await client.call_frames("bulk", {}, timeout_s=20, frames=payload)
        assert value == {"sizes": [0, 1, 1000, 3 << 20]}
        assert [bytes(frame) for frame in frames] == payload
        assert client.bytes_sent == server.bytes_received - 2 * 5  # two routing ids
        assert client.bytes_received == server.bytes_sent > 3 << 20


async def test_a_call_that_expects_a_value_refuses_frames() -> None:
    async with connected() as (_, _, client):
        with pytest.raises(ProtocolError, match="no payload frames, got 1"):
            await client.call("one_frame", {}, timeout_s=20)


async def test_calls_run_concurrently() -> None:
    async with connected() as (_, methods, client):
        waiting = asyncio.create_task(client.call("wait", {}, timeout_s=20))
        await methods.started.wait()
        assert await client.call("echo", {"x": 1}, timeout_s=20) == {"x": 1}
        methods.go_on.set()
        assert await waiting == 1
        answers = await asyncio.gather(
            *(client.call("echo", {"i": i}, timeout_s=20) for i in range(500))
        )
        assert answers == [{"i": i} for i in range(500)]


async def test_a_repeated_request_is_answered_from_memory() -> None:
    async with connected() as (_, methods, client):
        again = RpcClient(client.address, node_id="train/2", incarnation=LIFE)
        first = await client.call("count", {}, timeout_s=20, request_id="a")
        repeats = [
            await caller.call("count", {}, timeout_s=20, request_id="a")
            for caller in (client, again)
        ]
        assert (first, repeats, methods.num_calls) == (1, [1, 1], 1)
        for _ in range(2):
            with pytest.raises(RemoteError, match="absent"):
                await again.call("fail", {}, timeout_s=20, request_id="b")
        assert methods.num_calls == 2
        with pytest.raises(ProtocolError, match="called count before, now echo"):
            await again.call("echo", {}, timeout_s=20, request_id="a")
        await again.close()


async def test_a_repeat_of_a_running_request_joins_it() -> None:
    async with connected() as (_, methods, client):
        other = RpcClient(client.address, node_id="train/2", incarnation=LIFE)
        callers = [client, client, other]
        waiting = [
            asyncio.create_task(caller.call("wait", {}, timeout_s=20, request_id="a"))
            for caller in callers
        ]
        await methods.started.wait()
        # the server has all three requests once it answers what was sent after them
        for caller in (client, other):
            await caller.call("echo", {}, timeout_s=20)
        waiting[0].cancel()
        waiting[2].cancel()
        await asyncio.wait({waiting[0], waiting[2]})
        for caller in (client, other):
            await caller.call("echo", {}, timeout_s=20)
        methods.go_on.set()  # one caller still wants the result
        assert await waiting[1] == 1
        assert (methods.num_calls, methods.num_cancelled) == (1, 0)
        await other.close()


async def test_a_reply_too_large_to_keep_is_not_computed_twice() -> None:
    async with connected() as (_, methods, client):
        assert len(await client.call("large", {}, timeout_s=20, request_id="a")) == 1 << 20
        with pytest.raises(TransportError, match="too large to be kept"):
            await client.call("large", {}, timeout_s=20, request_id="a")
        assert methods.num_calls == 1


async def test_another_incarnation_is_refused() -> None:
    async with connected() as (_, methods, client):
        late = RpcClient(client.address, node_id="train/2", incarnation="life0")
        with pytest.raises(IncarnationMismatch, match=r"life0 of train/2, this is life1"):
            await late.call("count", {}, timeout_s=20)
        assert methods.num_calls == 0
        await late.close()


async def test_a_deadline_names_method_node_and_seconds_and_frees_the_server() -> None:
    async with connected() as (_, methods, client):
        with pytest.raises(RpcTimeout, match=r"wait on train/2 .* within 0\.05 s"):
            await client.call("wait", {}, timeout_s=0.05)
        await until(lambda: methods.num_cancelled == 1 or methods.num_calls == 0)
        assert await client.call("echo", {}, timeout_s=20) == {}


async def test_a_cancelled_call_is_cancelled_at_the_server() -> None:
    async with connected() as (_, methods, client):
        call = asyncio.create_task(client.call("wait", {}, timeout_s=20, request_id="a"))
        await methods.started.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: methods.num_cancelled == 1)
        with pytest.raises(TransportError, match="wait on train/2 was cancelled"):
            await client.call("wait", {}, timeout_s=20, request_id="a")
        assert methods.num_calls == 1


async def test_remote_errors_arrive_typed_with_their_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with connected() as (_, _, client):
        with pytest.raises(ShardGone, match="shard 7 on train/2 is gone") as typed:
            await client.call("fail", {"typed": True}, timeout_s=20)
        assert str(typed.value) == "shard 7 on train/2 is gone"
        assert "raise ShardGone" in typed.value.__notes__[0]
        with pytest.raises(RemoteError, match="fail on train/2 raised KeyError") as untyped:
            await client.call("fail", {}, timeout_s=20)
        assert 'raise KeyError("absent")' in untyped.value.remote_traceback
        with pytest.raises(ProtocolError, match="msgpack"):
            await client.call("unsendable", {}, timeout_s=20)
        with pytest.raises(ProtocolError, match="msgpack"):
            await client.call("echo", {"x": object()}, timeout_s=20)
        with pytest.raises(ProtocolError, match="no method 'absent'"):
            await client.call("absent", {}, timeout_s=20)
        with pytest.raises(TransportError, match="was cancelled"):
            await client.call("cancelled_inside", {}, timeout_s=20)
    assert "method_failed node=train/2 method=fail request=" in caplog.text


async def test_a_busy_server_refuses_instead_of_queueing() -> None:
    async with connected(max_running=2) as (_, methods, client):
        running = [asyncio.create_task(client.call("wait", {}, timeout_s=20)) for _ in range(2)]
        await until(lambda: methods.num_calls == 2)
        with pytest.raises(TransportError, match="runs 2 requests, the limit is 2"):
            await client.call("echo", {}, timeout_s=20)
        methods.go_on.set()
        await asyncio.gather(*running)
        assert await client.call("echo", {}, timeout_s=20) == {}


async def test_a_server_that_ends_fails_what_waits_for_it() -> None:
    async with serving() as (server, methods, address):
        client = RpcClient(address, node_id="train/2", incarnation=LIFE)
        call = asyncio.create_task(client.call("wait", {}, timeout_s=100))
        await methods.started.wait()
        await server.close()
        with pytest.raises(PeerLost, match=r"train/2 at tcp.* is lost: the connection ended"):
            await call
        with pytest.raises(PeerLost, match="echo not sent"):
            await client.call("echo", {}, timeout_s=100)
        await client.close()


async def test_the_last_reply_of_an_ending_server_still_arrives() -> None:
    async with serving() as (server, methods, address):
        client = RpcClient(address, node_id="train/2", incarnation=LIFE)
        call = asyncio.create_task(client.call("wait", {}, timeout_s=20))
        await methods.started.wait()
        methods.go_on.set()
        await until(lambda: server.bytes_sent > 0)
        await server.close()
        assert await call == 1
        await client.close()


async def test_replies_that_arrived_before_the_end_are_delivered() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.bind("tcp://127.0.0.1:0")
        address = server.getsockopt_string(zmq.LAST_ENDPOINT)
        client = RpcClient(address, node_id="train/2", incarnation=LIFE)
        calls = [asyncio.create_task(client.call("step", {}, timeout_s=100)) for _ in range(100)]
        requests: list[list[bytes]] = []
        async with asyncio.timeout(20):
            while len(requests) < len(calls):
                await asyncio.sleep(0)
                if server.poll(0):
                    requests.append(server.recv_multipart())
        # answered, and gone, while the client's event loop has no turn
        for caller, *request in requests:
            message = decode([memoryview(part) for part in request], FrameLimits())
            server.send_multipart([caller, *encode(Reply(message.request_id, 1), FrameLimits())])
        server.close(linger=1000)
        assert select.select([client._monitor._fd], [], [], 20)[0]
        assert await asyncio.gather(*calls) == [1] * 100
        with pytest.raises(PeerLost):
            await client.call("step", {}, timeout_s=100)
        await client.close()


async def test_a_connection_that_ended_is_made_again() -> None:
    async with connected() as (server, methods, client):
        assert await client.call("count", {}, timeout_s=20) == 1
        await server.close()
        await until(lambda: client._lost is not None)
        with pytest.raises(PeerLost):
            await client.call("count", {}, timeout_s=20)
        # the same worker is reachable again, as after a failure of the network
        back = RpcServer(
            methods.handlers(), node_id="train/2", incarnation=LIFE, bind=client.address
        )
        await back.start()
        await until(lambda: client._lost is None)
        assert await client.call("count", {}, timeout_s=20) == 2
        await back.close()


async def test_requests_whose_calls_have_failed_are_never_delivered() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as unread:
        unread.setsockopt(zmq.RCVHWM, 1)
        unread.setsockopt(zmq.RCVBUF, 1 << 14)
        unread.bind("tcp://127.0.0.1:0")
        address = unread.getsockopt_string(zmq.LAST_ENDPOINT)
        client = RpcClient(address, node_id="train/2", incarnation=LIFE)
        calls = [
            asyncio.create_task(
                client.call_frames("bulk", {}, timeout_s=100, frames=[bytes(1 << 17)])
            )
            for _ in range(100)  # more than the kernel's buffers take
        ]
        await until(lambda: bool(unread.poll(0)))
        unread.close(linger=0)
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(end) for end in ends} == {PeerLost}
        async with serving(bind=address) as (_, methods, _):
            await until(lambda: client._lost is None)
            assert await client.call("echo", {"x": 1}, timeout_s=20) == {"x": 1}
            assert methods.num_calls == 0
        await client.close()


async def test_an_address_where_nobody_listens_is_given_up() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        client = RpcClient(address, node_id="train/2", incarnation=LIFE)
        with pytest.raises(PeerLost, match="refused the connection 3 times"):
            await client.call("echo", {}, timeout_s=100)
        await client.close()


async def test_fail_pending_ends_every_waiting_call_and_no_later_one() -> None:
    async with connected() as (_, methods, client):
        calls = [asyncio.create_task(client.call("wait", {}, timeout_s=100)) for _ in range(3)]
        await until(lambda: methods.num_calls == 3)
        client.fail_pending(PeerLost("the scheduler saw train/2 exit"))
        for call in calls:
            with pytest.raises(PeerLost, match="scheduler saw"):
                await call
        assert await client.call("echo", {}, timeout_s=20) == {}


async def test_closing_a_client_ends_its_calls() -> None:
    async with connected() as (_, methods, client):
        call = asyncio.create_task(client.call("wait", {}, timeout_s=100))
        await methods.started.wait()
        await client.close()
        with pytest.raises(PeerLost, match="closed here"):
            await call
        with pytest.raises(PeerLost, match="closed here"):
            await client.call("echo", {}, timeout_s=100)


async def test_connections_can_be_closed_at_any_moment_of_their_life() -> None:
    async with serving() as (_, _, address):
        transport = ZmqTransport()
        for i in range(300):
            client = transport.connect(address if i % 3 else "tcp://127.0.0.1:9", "train/2", LIFE)
            if i % 3 == 1:
                await client.call("echo", {}, timeout_s=20)
            await client.close()
            await client.close()
        await transport.close()


async def test_a_transport_closes_its_connections_and_makes_no_more() -> None:
    async with serving() as (_, _, address):
        ids = iter(f"id{i}" for i in range(100))
        transport = ZmqTransport(new_request_id=lambda: next(ids))
        clients = [transport.connect(address, "train/2", LIFE) for _ in range(3)]
        assert [await c.call("count", {}, timeout_s=20) for c in clients] == [1, 2, 3]
        assert next(ids) == "id3"
        await transport.close()
        with pytest.raises(PeerLost):
            await clients[0].call("count", {}, timeout_s=20)
        with pytest.raises(TransportError, match="transport is closed"):
            transport.connect(address, "train/2", LIFE)


async def test_a_port_in_use_is_an_error_with_the_port() -> None:
    async with serving() as (_, _, address):
        second = RpcServer({}, node_id="train/3", incarnation=LIFE, bind=address)
        with pytest.raises(TransportError, match=rf"train/3 cannot listen on {address}"):
            await second.start()


async def test_the_authenticator_sees_both_sockets_first() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.kinds: list[int] = []

        def configure_server(self, socket: zmq.Socket[bytes]) -> None:
            self.kinds.append(socket.getsockopt(zmq.TYPE))

        def configure_client(self, socket: zmq.Socket[bytes]) -> None:
            self.kinds.append(socket.getsockopt(zmq.TYPE))

    recorder = Recorder()
    async with serving(authenticator=recorder) as (_, _, address):
        transport = ZmqTransport(authenticator=recorder)
        client = transport.connect(address, "train/2", LIFE)
        assert await client.call("echo", {}, timeout_s=20) == {}
        await transport.close()
    assert recorder.kinds == [zmq.ROUTER, zmq.DEALER]


async def test_malformed_messages_are_counted_and_end_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rng = random.Random(0)
    async with connected() as (server, _, client):
        assert await client.call("echo", {}, timeout_s=20) == {}
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(client.address)
            good = encode(Request("id", LIFE, "echo", {"x": 1}), FrameLimits())
            sent = [
                [rng.randbytes(rng.randrange(40)) for _ in range(rng.randrange(1, 4))]
                for _ in range(300)
            ]
            sent.append([*good, *[b""] * 1025])  # one frame over the limit
            sent.append([b"ASC\x02" + bytes(good[0])[4:]])  # another protocol version
            sent.append([bytes(part) for part in encode(Reply("id", 1), FrameLimits())])
            for parts in sent:
                stranger.send_multipart(parts)
            await until(lambda: server.num_malformed == len(sent))
            stranger.send_multipart(good)
            poller = zmq.Poller()
            poller.register(stranger, zmq.POLLIN)
            await until(lambda: bool(poller.poll(0)))
            answer = decode([memoryview(p) for p in stranger.recv_multipart()], FrameLimits())
            assert answer == Reply("id", {"x": 1}, [])
        assert await client.call("echo", {}, timeout_s=20) == {}
        assert caplog.text.count("malformed_message") == 9  # 1, 2, 4 ... 256 of 303


async def test_random_bytes_at_the_tcp_port_end_nothing() -> None:
    rng = random.Random(1)
    async with connected() as (_, _, client):
        host, port = client.address.removeprefix("tcp://").split(":")
        for _ in range(100):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(rng.randbytes(rng.randrange(1, 200)))
            writer.close()
        assert await client.call("echo", {"x": 1}, timeout_s=20) == {"x": 1}


async def test_a_frame_over_the_limit_costs_the_sender_its_connection() -> None:
    limits = FrameLimits(max_header_bytes=1 << 10, max_frame_bytes=1 << 12)
    async with serving(limits=limits) as (_, _, address):
        careless = RpcClient(address, node_id="train/2", incarnation=LIFE)
        with pytest.raises(PeerLost):
            await careless.call_frames("bulk", {}, timeout_s=100, frames=[bytes(1 << 13)])
        await careless.close()
        careful = RpcClient(address, node_id="train/2", incarnation=LIFE, limits=limits)
        with pytest.raises(ProtocolError, match="8192 bytes"):
            await careful.call_frames("bulk", {}, timeout_s=100, frames=[bytes(1 << 13)])
        assert await careful.call("echo", {}, timeout_s=20) == {}
        await careful.close()


async def test_a_caller_that_does_not_read_delays_nobody_and_loses_its_replies() -> None:
    async with connected(reply_timeout_s=0.2) as (server, _, client):
        with zmq.Context() as context, context.socket(zmq.DEALER) as sleeper:
            sleeper.setsockopt(zmq.LINGER, 0)
            sleeper.setsockopt(zmq.RCVHWM, 1)
            sleeper.setsockopt(zmq.RCVBUF, 1 << 16)
            sleeper.connect(client.address)
            for i in range(1100):  # beyond the 1000 messages of ZMQ's own queue
                sleeper.send_multipart(
                    encode(Request(f"s{i}", LIFE, "stuck", {}, []), FrameLimits())
                )
            assert await client.call("echo", {"x": 1}, timeout_s=20) == {"x": 1}
            await until(lambda: server.num_dropped_replies > 0)
            assert await client.call("echo", {"x": 2}, timeout_s=20) == {"x": 2}


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
        await asyncio.gather(*(client.call("echo", {}, timeout_s=20) for _ in range(1000)))
        done = True
        await counting
        assert turns > 30  # 1000 messages in batches of 32
