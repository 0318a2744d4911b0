"""One call to many servers: outcomes in place, whatever happens to some of them."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from integration.rpc_methods import LIFE, Methods, named, serving, transport
from integration.rpc_process import server_process
from waiting import until

from areal_sc.errors import (
    IncarnationMismatch,
    PeerLost,
    ProtocolError,
    RemoteError,
    RpcTimeout,
    ShardGone,
)
from areal_sc.transport.rpc.client import CALLS_PER_TURN, RpcClient
from areal_sc.transport.rpc.codec import decode
from areal_sc.transport.rpc.server import RpcServer
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.transport.security.keys import RunKeys


@asynccontextmanager
async def fleet(
    size: int,
) -> AsyncIterator[tuple[ZmqTransport, list[RpcClient], list[Methods], list[RpcServer]]]:
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(serving()) for _ in range(size)]
        callers = await stack.enter_async_context(transport())
        clients = [callers.connect(address, "train/2", LIFE) for _, _, address in served]
        yield callers, clients, [made[1] for made in served], [made[0] for made in served]


async def test_values_come_in_the_order_of_the_calls() -> None:
    async with fleet(8) as (callers, clients, _, _):
        calls = [(clients[i % 8], {"i": i}) for i in range(400)]
        for method in ("echo", "quick"):
            values = await callers.call_all(calls, named(method), timeout_s=20)
            assert values == [{"i": i} for i in range(400)]
        assert await callers.call_all([], named("echo"), timeout_s=20) == []


async def test_each_failure_stands_in_the_place_of_its_call() -> None:
    async with fleet(5) as (callers, clients, methods, servers):
        late = callers.connect(clients[0].address, "train/2", "life0")
        await clients[3].call(named("echo"), {}, timeout_s=20)
        await servers[3].close()
        await until(lambda: clients[3].is_lost is not None)
        calls: list[tuple[RpcClient, dict[str, Any]]] = [
            (clients[0], {}),
            (clients[1], {"typed": True}),
            (late, {}),
            (clients[3], {}),
            (clients[4], {"x": object()}),
        ]
        kinds = [
            type(outcome) for outcome in await callers.call_all(calls, named("fail"), timeout_s=20)
        ]
        assert kinds == [RemoteError, ShardGone, IncarnationMismatch, PeerLost, ProtocolError]
        mixed = [(clients[1], {"x": 1}), (clients[3], {}), (clients[2], {"x": 2})]
        first, lost, second = await callers.call_all(mixed, named("echo"), timeout_s=20)
        assert (first, second) == ({"x": 1}, {"x": 2})
        assert isinstance(lost, PeerLost)
        assert "echo not sent: train/2 at tcp" in str(lost)
        assert methods[4].num_calls == 0


async def test_a_server_that_is_lost_meanwhile_fails_its_call_alone() -> None:
    async with fleet(4) as (callers, clients, methods, servers):
        calls: list[tuple[RpcClient, dict[str, Any]]] = [(client, {}) for client in clients]
        gathering = asyncio.create_task(callers.call_all(calls, named("wait"), timeout_s=60))
        await until(lambda: all(method.num_waiting == 1 for method in methods))
        await servers[2].close()
        await until(lambda: clients[2].is_lost is not None)
        assert not gathering.done()
        for method in methods:
            method.go_on.set()
        outcomes = await gathering
        assert [outcomes[i] for i in (0, 1, 3)] == [1, 1, 1]
        assert isinstance(outcomes[2], PeerLost)


async def test_who_is_late_is_given_up_and_told_so() -> None:
    async with fleet(4) as (callers, clients, methods, _):
        methods[1].go_on.set()
        calls: list[tuple[RpcClient, dict[str, Any]]] = [(client, {}) for client in clients]
        assert await callers.call_all(calls, named("echo"), timeout_s=20) == [{}] * 4
        outcomes = await callers.call_all(calls, named("wait"), timeout_s=5)
        assert outcomes[1] == 1
        for i in (0, 2, 3):
            assert isinstance(outcomes[i], RpcTimeout)
            assert "wait on train/2 (tcp://" in str(outcomes[i])
            assert "within 5 s" in str(outcomes[i])
        await until(lambda: [m.num_cancelled for m in methods] == [1, 0, 1, 1])
        assert not any(client._pending for client in clients)


async def test_a_cancellation_is_passed_on_to_all() -> None:
    async with fleet(4) as (callers, clients, methods, _):
        calls = [(client, {"i": i}) for i in range(50) for client in clients]
        gathering = asyncio.create_task(callers.call_all(calls, named("wait"), timeout_s=60))
        await until(lambda: all(method.num_waiting == 50 for method in methods))
        gathering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gathering
        await until(lambda: all(method.num_cancelled == 50 for method in methods))
        assert not any(client._pending for client in clients)
        assert await clients[0].call(named("echo"), {}, timeout_s=20) == {}


async def test_the_first_error_may_end_all(caplog: pytest.LogCaptureFixture) -> None:
    async with fleet(3) as (callers, clients, methods, _):
        late = callers.connect(clients[1].address, "train/2", "life0")
        for method in methods:
            method.go_on.clear()
        calls: list[tuple[RpcClient, dict[str, Any]]] = [
            (clients[0], {}),
            *[(late, {})] * 2,
            *[(client, {"i": i}) for i in range(200) for client in clients],
        ]
        outcomes = await callers.call_all(calls, named("wait"), timeout_s=60, stops_at_error=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        assert [type(error) for error in errors] == [IncarnationMismatch]
        await until(lambda: not any(method.num_waiting for method in methods))
        assert not any(client._pending for client in clients)
        values = await callers.call_all(calls[3:], named("echo"), timeout_s=20, stops_at_error=True)
        assert values == [args for _, args in calls[3:]]
    assert "never retrieved" not in caplog.text


async def test_full_queues_delay_only_their_own_calls() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as unread:
        unread.setsockopt(zmq.RCVHWM, 1)
        unread.setsockopt(zmq.RCVBUF, 1 << 16)
        unread.bind("tcp://127.0.0.1:0")
        async with fleet(1) as (callers, clients, _, _):
            address = unread.getsockopt_string(zmq.LAST_ENDPOINT)
            mute = callers.connect(address, "rollout/0", LIFE)
            args = {"blob": bytes(1 << 14)}
            calls = [(mute, args)] * 1500 + [(clients[0], {})] * 10
            gathering = asyncio.create_task(callers.call_all(calls, named("quick"), timeout_s=200))
            assert await clients[0].call(named("echo"), {}, timeout_s=20) == {}
            received = []
            async with asyncio.timeout(100):
                while len(received) < 1500:  # it reads, after all
                    if unread.poll(0):
                        received.append(unread.recv_multipart()[1])
                    await asyncio.sleep(0)
            ids = {decode([memoryview(frame)]).request_id for frame in received}
            assert len(ids) == 1500  # each exactly once
            gathering.cancel()
            await asyncio.wait({gathering})


@pytest.mark.parametrize("method", ["quick", "wait"])
async def test_a_fan_out_leaves_the_loop_its_turns(method: str) -> None:
    """Also where it begins, and where it gives up what is late."""
    async with fleet(2) as (callers, clients, _, _):
        calls: list[tuple[RpcClient, dict[str, Any]]] = [(clients[i % 2], {}) for i in range(4000)]
        num_open = []
        limit_s = 3 if method == "wait" else 60
        gathering = asyncio.create_task(callers.call_all(calls, named(method), timeout_s=limit_s))
        while not gathering.done():
            num_open.append(sum(len(client._pending) for client in clients))
            await asyncio.sleep(0)
        num_open.append(0)
        kinds = {type(outcome) for outcome in await gathering}
        assert kinds == {dict if method == "quick" else RpcTimeout}
        changes = [abs(after - before) for before, after in itertools.pairwise(num_open)]
        assert max(changes) <= 2 * CALLS_PER_TURN
        assert max(num_open) > 2 * CALLS_PER_TURN


async def test_a_killed_process_fails_its_calls_alone(tmp_path: Path) -> None:
    keys = RunKeys.create()
    with server_process(tmp_path, keys) as kept, server_process(tmp_path, keys) as killed:
        async with transport(client=kept.member()) as callers:
            alive, doomed = kept.connect(callers), killed.connect(callers)
            calls = [(client, {"i": i}) for i in range(20) for client in (alive, doomed)]
            expected = [args for _, args in calls]
            assert await callers.call_all(calls, named("echo"), timeout_s=30) == expected
            killed.process.send_signal(signal.SIGSTOP)  # it takes the calls and answers none
            gathering = asyncio.create_task(callers.call_all(calls, named("echo"), timeout_s=60))
            await until(lambda: not alive._pending and len(doomed._pending) == 20)
            assert not gathering.done()
            killed.process.kill()
            outcomes = await gathering
    assert outcomes[0::2] == expected[0::2]
    assert [type(outcome) for outcome in outcomes[1::2]] == [PeerLost] * 20
