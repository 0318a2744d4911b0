"""RPC over real sockets on loopback, both ends in this process: calls and their outcomes."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import pytest
import zmq
from integration.rpc_methods import LIFE, connected, named, own_transport, serving, transport
from waiting import until

from areal_sc.errors import (
    IncarnationMismatch,
    ProtocolError,
    RemoteError,
    RpcTimeout,
    ServerBusy,
    ShardGone,
    TransportError,
)
from areal_sc.transport.rpc.client import RpcClient
from areal_sc.transport.rpc.method import Method
from areal_sc.transport.rpc.server import RpcServer
from areal_sc.transport.security.keys import RunKeys
from areal_sc.transport.security.passes import KnownCallers


async def call_as(client: RpcClient, request_id: str, method: Method[Any, Any]) -> Any:
    """A call under an id of the test's choice."""
    ids = itertools.chain([request_id], iter(client.new_request_id, None))
    client.new_request_id = lambda: next(ids)
    return await client.call(method, {}, timeout_s=20)


async def test_values_travel_both_ways_and_bytes_are_counted() -> None:
    async with connected() as (_, _, client):
        args = {"x": [1, 2.5, None, b"b", "é"], "nested": {"y": True}}
        for method in ("echo", "quick"):
            assert await client.call(named(method), args, timeout_s=20) == args
        blob = random.Random(0).randbytes(3 << 20)
        assert await client.call(named("quick"), {"blob": blob}, timeout_s=20) == {"blob": blob}
        assert client._route.hub.num_bytes > 6 << 20


async def test_a_coroutine_method_runs_as_a_task_of_its_own() -> None:
    async with connected() as (_, _, client):
        names = [await client.call(named("within_a_timeout"), {}, timeout_s=20) for _ in range(2)]
        assert len(set(names)) == 2


@pytest.mark.parametrize("method", ["count", "quick_count"])
async def test_a_repeated_request_is_answered_from_memory(method: str) -> None:
    async with connected() as (_, methods, client):
        other, again = own_transport(client)
        first = await call_as(client, "a", named(method))
        repeats = [await call_as(caller, "a", named(method)) for caller in (client, again)]
        assert (first, repeats, methods.num_calls) == (1, [1, 1], 1)
        await other.close()


@pytest.mark.parametrize("method", ["fail", "quick_fail"])
async def test_a_repeated_request_that_failed_fails_again_without_running(method: str) -> None:
    async with connected() as (_, methods, client):
        for _ in range(2):
            with pytest.raises(RemoteError, match="absent"):
                await call_as(client, "b", named(method))
        assert methods.num_calls == 1


async def test_a_repeat_of_a_running_request_joins_it() -> None:
    async with connected() as (_, methods, client):
        transport, other = own_transport(client)
        callers = [client, other]
        waiting = [asyncio.create_task(call_as(caller, "a", named("wait"))) for caller in callers]
        await methods.started.wait()
        # the server has both requests once it answers what was sent after them
        for caller in callers:
            await caller.call(named("echo"), {}, timeout_s=20)
        methods.go_on.set()
        assert await asyncio.gather(*waiting) == [1, 1]
        assert (methods.num_calls, methods.num_cancelled) == (1, 0)
        await transport.close()


async def test_a_reply_too_large_to_keep_is_not_computed_twice() -> None:
    async with connected() as (_, methods, client):
        assert len(await call_as(client, "a", named("large"))) == 1 << 20
        with pytest.raises(TransportError, match="too large to be kept"):
            await call_as(client, "a", named("large"))
        assert methods.num_calls == 1


async def test_another_incarnation_is_refused_whatever_is_remembered() -> None:
    async with connected() as (_, methods, client), transport() as callers:
        late = callers.connect(client.address, "train/2", "life0")
        with pytest.raises(IncarnationMismatch, match=r"life0 of train/2, this is life1"):
            await late.call(named("count"), {}, timeout_s=20)
        assert methods.num_calls == 0
        await call_as(client, "a", named("count"))
        with pytest.raises(IncarnationMismatch):
            await call_as(late, "a", named("count"))


async def test_a_deadline_names_method_node_and_seconds_and_frees_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    now = loop.time
    async with connected() as (_, methods, client):
        call = asyncio.create_task(client.call(named("wait"), {}, timeout_s=20))
        await methods.started.wait()
        with monkeypatch.context() as patch:
            patch.setattr(loop, "time", lambda: now() + 20)
            with pytest.raises(RpcTimeout, match=r"wait on train/2 .* within 20 s"):
                await call
        await until(lambda: methods.num_cancelled == 1)
        assert await client.call(named("echo"), {}, timeout_s=20) == {}


async def test_a_cancelled_call_is_cancelled_at_the_server() -> None:
    async with connected() as (_, methods, client):
        call = asyncio.create_task(call_as(client, "a", named("wait")))
        await methods.started.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: methods.num_cancelled == 1)
        with pytest.raises(TransportError, match="wait on train/2 was cancelled"):
            await call_as(client, "a", named("wait"))
        assert methods.num_calls == 1


async def test_a_call_cancelled_before_its_request_has_begun_still_counts_as_run() -> None:
    async with connected() as (_, methods, client):
        await client.call(named("echo"), {}, timeout_s=20)
        call = asyncio.create_task(call_as(client, "a", named("wait")))
        await asyncio.sleep(0)  # the request is sent
        call.cancel()  # and so is its cancellation, before the server reads either
        await asyncio.wait({call})
        with pytest.raises(TransportError, match="wait on train/2 was cancelled"):
            await call_as(client, "a", named("wait"))
        assert methods.num_calls in (0, 1)
        assert methods.num_waiting == 0


async def test_remote_errors_arrive_typed_with_their_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with connected() as (_, _, client):
        with pytest.raises(ShardGone, match="shard 7 on train/2 is gone") as typed:
            await client.call(named("fail"), {"typed": True}, timeout_s=20)
        assert str(typed.value) == "shard 7 on train/2 is gone"
        assert "raise ShardGone" in typed.value.__notes__[0]
        for method in ("fail", "quick_fail"):
            with pytest.raises(RemoteError, match=f"{method} on train/2 raised KeyErr") as untyped:
                await client.call(named(method), {}, timeout_s=20)
            assert 'raise KeyError("absent")' in untyped.value.remote_traceback
        for method in ("unsendable", "quick_unsendable"):
            with pytest.raises(ProtocolError, match="msgpack"):
                await client.call(named(method), {}, timeout_s=20)
        with pytest.raises(ProtocolError, match=r"a message has .* the limit is"):
            await client.call(named("too_large"), {}, timeout_s=20)
        with pytest.raises(ProtocolError, match="msgpack"):
            await client.call(named("echo"), {"x": object()}, timeout_s=20)
        with pytest.raises(ProtocolError, match="no method 'absent'"):
            await client.call(named("absent"), {}, timeout_s=20)
        with pytest.raises(TransportError, match="was cancelled"):
            await client.call(named("cancelled_inside"), {}, timeout_s=20)
    assert "method_failed node=train/2 method=fail request=" in caplog.text
    assert "never retrieved" not in caplog.text


async def test_a_busy_server_refuses_and_the_same_request_may_be_sent_again() -> None:
    async with connected(max_running=2) as (_, methods, client):
        running = [
            asyncio.create_task(client.call(named("wait"), {}, timeout_s=20)) for _ in range(2)
        ]
        await until(lambda: methods.num_calls == 2)
        with pytest.raises(ServerBusy, match=r"runs 2 requests .* the limits are 2 and"):
            await call_as(client, "a", named("count"))
        methods.go_on.set()
        await asyncio.gather(*running)
        assert await call_as(client, "a", named("count")) == 3


async def test_what_running_requests_hold_is_bounded_in_bytes() -> None:
    async with connected(max_running_bytes=1 << 20) as (_, methods, client):
        blob = bytes(600 << 10)
        running = asyncio.create_task(client.call(named("wait"), {"blob": blob}, timeout_s=20))
        await methods.started.wait()
        with pytest.raises(ServerBusy, match="call echo again later"):
            await client.call(named("echo"), {"blob": blob}, timeout_s=20)
        assert await client.call(named("echo"), {}, timeout_s=20) == {}
        methods.go_on.set()
        await running
        assert await client.call(named("echo"), {"blob": blob}, timeout_s=20) == {"blob": blob}


async def test_many_requests_may_stay_open() -> None:
    async with connected() as (_, methods, client):
        calls = [
            asyncio.create_task(client.call(named("wait"), {}, timeout_s=100)) for _ in range(5000)
        ]
        await until(lambda: methods.num_waiting == 5000)
        methods.go_on.set()
        assert await asyncio.gather(*calls) == [5000] * 5000


async def test_a_port_in_use_is_an_error_with_the_port() -> None:
    async with serving() as (_, _, address):
        second = RpcServer([], node_id="train/3", incarnation=LIFE, bind=address)
        with pytest.raises(TransportError, match=rf"train/3 cannot listen on {address}"):
            await second.start()


async def test_a_socket_is_guarded_before_it_is_used_and_known_servers_are_expected() -> None:
    seen: list[tuple[str, bytes]] = []

    class Guard:
        def __init__(self, guarded: zmq.Socket[bytes]) -> None:
            self.guarded = guarded

        def close(self) -> None:
            seen.append(("guard", b"closed" if self.guarded.closed else b"open"))

    class Security:
        callers = KnownCallers(RunKeys.create().controller.public)

        def configure(self, context: Any, socket: zmq.Socket[bytes]) -> Guard:
            assert isinstance(context, zmq.Context)
            seen.append(("server", socket.getsockopt(zmq.LAST_ENDPOINT)))
            return Guard(socket)

    class Client:
        shown_pass = b""

        def configure(self, socket: zmq.Socket[bytes]) -> None:
            seen.append(("client", socket.getsockopt(zmq.LAST_ENDPOINT)))

        def expect(self, socket: zmq.Socket[bytes], server_key: str) -> None:
            seen.append((server_key, socket.getsockopt(zmq.LAST_ENDPOINT)))

    async with (
        serving(security=Security()) as (_, _, address),
        transport(client=Client()) as callers,
    ):
        callers.connect(address, "train/2", LIFE, server_key="its key")
    assert seen == [("server", b""), ("client", b""), ("its key", b""), ("guard", b"open")]


async def test_arguments_and_replies_of_other_types_fail_the_call_and_nothing_else() -> None:
    halve = Method("halve", int, float)
    server = RpcServer([halve.served_by(lambda n: n / 2)], node_id="train/2", incarnation=LIFE)
    address = await server.start()
    async with transport() as callers:
        client = callers.connect(address, "train/2", LIFE)
        with pytest.raises(ProtocolError, match=r"halve: the arguments are .*got `str`"):
            await client.call(Method("halve", str, float), "five", timeout_s=20)
        with pytest.raises(ProtocolError, match=r"halve: the reply is .*got `float`"):
            await client.call(Method("halve", int, str), 5, timeout_s=20)
        others = [(client, 5), (client, 6)]
        outcomes = await callers.call_all(others, Method("halve", int, str), timeout_s=20)
        assert all(isinstance(outcome, ProtocolError) for outcome in outcomes)
        assert await client.call(halve, 5, timeout_s=20) == 2.5
        assert server.malformed.num == client.malformed.num == 0
    await server.close()
