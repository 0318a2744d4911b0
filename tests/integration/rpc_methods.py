"""Methods that tests of RPC call, and both ends of a connection in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from areal_sc.errors import ShardGone
from areal_sc.transport.rpc.client import RpcClient
from areal_sc.transport.rpc.codec import MAX_MESSAGE_BYTES
from areal_sc.transport.rpc.method import Method, Served
from areal_sc.transport.rpc.server import RpcServer
from areal_sc.transport.rpc.transport import ZmqTransport

LIFE = "life1"


@cache
def named(name: str) -> Method[Any, Any]:
    """A method of any arguments and any reply."""
    return Method(name, Any, Any)


class Methods:
    """Methods whose progress a test can observe and steer; plain ones are answered at once."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_cancelled = 0
        self.num_waiting = 0
        self.started = asyncio.Event()
        self.go_on = asyncio.Event()

    async def echo(self, args: dict[str, Any]) -> Any:
        return args

    def quick(self, args: dict[str, Any]) -> Any:
        return args

    async def count(self, args: dict[str, Any]) -> int:
        self.num_calls += 1
        return self.num_calls

    def quick_count(self, args: dict[str, Any]) -> int:
        self.num_calls += 1
        return self.num_calls

    async def large(self, args: dict[str, Any]) -> bytes:
        self.num_calls += 1
        return bytes(1 << 20)

    async def too_large(self, args: dict[str, Any]) -> bytes:
        return bytes(MAX_MESSAGE_BYTES)

    async def wait(self, args: dict[str, Any]) -> int:
        self.num_calls += 1
        self.num_waiting += 1
        self.started.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_waiting -= 1
        return self.num_calls

    async def within_a_timeout(self, args: dict[str, Any]) -> str:
        async with asyncio.timeout(20):
            await asyncio.sleep(0)
            task = asyncio.current_task()
            assert task is not None
            return task.get_name()

    async def fail(self, args: dict[str, Any]) -> None:
        self.num_calls += 1
        if args.get("typed"):
            raise ShardGone("shard 7 on train/2 is gone")
        raise KeyError("absent")

    def quick_fail(self, args: dict[str, Any]) -> None:
        self.num_calls += 1
        raise KeyError("absent")

    async def unsendable(self, args: dict[str, Any]) -> object:
        return object()

    def quick_unsendable(self, args: dict[str, Any]) -> object:
        return object()

    async def cancelled_inside(self, args: dict[str, Any]) -> None:
        raise asyncio.CancelledError

    def served(self) -> list[Served]:
        names = [name for name in vars(Methods) if not name.startswith("_") and name != "served"]
        return [named(name).served_by(getattr(self, name)) for name in names]


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[tuple[RpcServer, Methods, str]]:
    methods = Methods()
    server = RpcServer(methods.served(), node_id="train/2", incarnation=LIFE, **options)
    address = await server.start()
    try:
        yield server, methods, address
    finally:
        await server.close()


@asynccontextmanager
async def transport(**options: Any) -> AsyncIterator[ZmqTransport]:
    made = ZmqTransport(**options)
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def connected(**options: Any) -> AsyncIterator[tuple[RpcServer, Methods, RpcClient]]:
    async with serving(**options) as (server, methods, address), transport() as callers:
        yield server, methods, callers.connect(address, "train/2", LIFE)


def own_transport(client: RpcClient) -> tuple[ZmqTransport, RpcClient]:
    """Another process's connection to the same server, as far as the server can tell."""
    other = ZmqTransport()
    return other, other.connect(client.address, "train/2", LIFE)
