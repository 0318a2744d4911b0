"""Pulls that take turns at one owner."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from areal_sc.config.schema import TransportConfig
from areal_sc.transport.bulk.credits import Credits
from areal_sc.transport.bulk.messages import MAX_REQUEST_FIELDS
from areal_sc.transport.bulk.owner_connection import Fetch, OwnerConnection
from areal_sc.transport.bulk.plan import Transfer, cut, shard_slice
from areal_sc.transport.bulk.session import SessionGrant, ShardOwner

OWNER = ShardOwner("rollout/0", "tcp://10.0.0.1:5", "life1")
REQUEST_BYTES = 100


async def never() -> SessionGrant:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


@asynccontextmanager
async def owner_connection(chunk_bytes: int = REQUEST_BYTES) -> AsyncIterator[OwnerConnection]:
    config = TransportConfig(chunk_bytes=chunk_bytes)
    connection = OwnerConnection(OWNER, config, never, Credits(1 << 20, 4096), cast(Any, None))
    try:
        yield connection
    finally:
        await connection.close()


def fetch_of(name: str, sizes: list[int], num_fields: int = 1) -> Fetch:
    """A pull of one row of so many bytes from each of its shards."""
    parts: deque[Transfer] = deque()
    for number, size in enumerate(sizes):
        fields = {f"f{i}": "uint8" for i in range(num_fields)}
        places = [memoryview(bytearray(size)) for _ in fields]
        rows = shard_slice(f"{name}.{number}", fields, [0], (size,))
        parts.extend(cut(Transfer(rows, places), REQUEST_BYTES))
    loop = asyncio.get_running_loop()
    return Fetch(f"{name}.0", parts, sum(sizes) * num_fields, loop.create_future())


async def test_a_request_names_a_limited_number_of_fields() -> None:
    async with owner_connection(1 << 20) as connection:
        connection.submit(fetch_of("A", [0, 0], num_fields=MAX_REQUEST_FIELDS - 1))
        connection.submit(fetch_of("B", [1] * 300))
        requests = iter(connection._next_request, [])
        named = [sum(len(it.rows.fields) for _, it in request) for request in requests]
        assert named == [MAX_REQUEST_FIELDS, 300 - MAX_REQUEST_FIELDS]
