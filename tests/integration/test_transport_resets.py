"""RPC over connections that end while both processes live: requests are repeated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from integration.cutting_proxy import CuttingProxy, cutting_proxy
from integration.rpc_methods import LIFE, Methods, named, serving, transport
from waiting import until

from areal_sc.errors import PeerLost, RpcTimeout
from areal_sc.transport.rpc.client import RpcClient


@asynccontextmanager
async def proxied(
    *, keeps_trying: bool = False
) -> AsyncIterator[tuple[CuttingProxy, Methods, RpcClient]]:
    async with (
        serving() as (_, methods, address),
        cutting_proxy(address) as proxy,
        transport() as callers,
    ):
        client = callers.connect(proxy.address, "train/2", LIFE, keeps_trying=keeps_trying)
        await client.call(named("echo"), {}, timeout_s=20)
        yield proxy, methods, client


async def test_calls_in_flight_outlive_a_reset_and_run_once() -> None:
    async with proxied() as (proxy, methods, client):
        calls = [
            asyncio.create_task(client.call(named("wait"), {}, timeout_s=60)) for _ in range(50)
        ]
        await until(lambda: methods.num_waiting == 50)
        for num_cuts in range(1, 4):
            proxy.cut()
            await until(lambda num_cuts=num_cuts: proxy.num_accepted == 1 + num_cuts)  # type: ignore[misc]
            await client.call(named("echo"), {}, timeout_s=20)
        methods.go_on.set()
        await asyncio.gather(*calls)
        assert methods.num_calls == 50


async def test_a_reply_that_was_lost_on_its_way_is_replayed() -> None:
    async with proxied() as (proxy, methods, client):
        proxy.passes_replies = False
        call = asyncio.create_task(client.call(named("count"), {}, timeout_s=60))
        await until(lambda: methods.num_calls == 1)
        proxy.passes_replies = True
        proxy.cut()
        assert await call == 1
        assert methods.num_calls == 1


async def test_a_call_that_was_repeated_is_still_cancelled_by_its_caller() -> None:
    async with proxied() as (proxy, methods, client):
        call = asyncio.create_task(client.call(named("wait"), {}, timeout_s=60))
        await methods.started.wait()
        proxy.cut()
        await until(lambda: proxy.num_accepted == 2)
        await client.call(named("echo"), {}, timeout_s=20)
        call.cancel()
        await until(lambda: methods.num_cancelled == 1)


async def test_a_fan_out_outlives_resets() -> None:
    async with proxied() as (proxy, methods, client), transport() as callers:
        other = callers.connect(proxy.address, "train/2", LIFE)
        await other.call(named("echo"), {}, timeout_s=20)
        calls = [(peer, {"i": i}) for i in range(300) for peer in (client, other)]
        gathering = asyncio.create_task(callers.call_all(calls, named("wait"), timeout_s=60))
        await until(lambda: methods.num_waiting > 100)
        proxy.cut()
        await until(lambda: methods.num_waiting == 600)
        proxy.cut()
        methods.go_on.set()
        assert {type(outcome) for outcome in await gathering} == {int}
        assert methods.num_calls == 600


async def test_who_keeps_trying_waits_until_the_network_is_back() -> None:
    async with proxied(keeps_trying=True) as (proxy, methods, client):
        call = asyncio.create_task(client.call(named("wait"), {}, timeout_s=60))
        await methods.started.wait()
        await proxy.refuse()
        proxy.cut()
        await until(lambda: client.is_lost is not None)
        begun_meanwhile = asyncio.create_task(client.call(named("echo"), {"x": 1}, timeout_s=60))
        with pytest.raises(RpcTimeout):
            await client.call(named("echo"), {}, timeout_s=0.1)
        await proxy.listen()
        methods.go_on.set()
        assert await call == 1
        assert await begun_meanwhile == {"x": 1}
        assert methods.num_calls == 1


async def test_who_keeps_trying_hears_of_the_end_by_fail_pending() -> None:
    async with proxied(keeps_trying=True) as (proxy, _, client):
        await proxy.refuse()
        proxy.cut()
        await until(lambda: client.is_lost is not None)
        call = asyncio.create_task(client.call(named("echo"), {}, timeout_s=60))
        await until(lambda: bool(client._pending))
        client.fail_pending(PeerLost("the scheduler saw train/2 exit"))
        with pytest.raises(PeerLost, match="scheduler saw"):
            await call


async def test_a_server_that_ends_every_connection_is_lost() -> None:
    """As it does to a request that is over its limit: repeating it for ever helps nobody."""
    async with proxied() as (proxy, methods, client):
        call = asyncio.create_task(client.call(named("wait"), {}, timeout_s=60))
        await methods.started.wait()
        async with asyncio.timeout(60):
            while client.is_lost is None:
                proxy.cut()
                await asyncio.sleep(0.01)
            with pytest.raises(PeerLost):
                await call
