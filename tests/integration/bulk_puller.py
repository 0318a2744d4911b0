"""A process that pulls one shard again and again, until it is stopped or killed.

Run as `python bulk_puller.py GRANT MAX_INFLIGHT_CHUNKS`; the grant is a JSON list with the keys in
hexadecimal.
Prints one line after the first pull.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import torch

from areal_sc.config.schema import TransportConfig
from areal_sc.transport.bulk.client import BulkClient
from areal_sc.transport.bulk.plan import Transfer, shard_slice
from areal_sc.transport.bulk.session import SessionGrant, ShardOwner

NUM_BYTES = 64 << 20


class Granted:
    """A transport whose only call gives the grant."""

    def __init__(self, grant: SessionGrant) -> None:
        self.grant = grant

    def connect(self, *address: str) -> Granted:
        return self

    async def call(self, *args: Any, timeout_s: float) -> SessionGrant:
        return self.grant

    async def close(self) -> None: ...


async def main(grant: SessionGrant, max_inflight_chunks: int) -> None:
    owner = ShardOwner("rollout/0", "tcp://127.0.0.1:1", "life1")
    client = BulkClient(
        Granted(grant),  # type: ignore[arg-type]
        "stopped",
        TransportConfig(chunk_bytes=1 << 20, max_inflight_chunks=max_inflight_chunks),
    )
    target = memoryview(bytearray(NUM_BYTES))
    rows = shard_slice("life1.1", {"x": "uint8"}, [0], (NUM_BYTES,))
    while True:
        deadline = asyncio.get_running_loop().time() + 60
        await client.fetch(owner, [Transfer(rows, [target])], deadline)
        sys.stdout.write("pulled\n")
        sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    address, *keys, is_encrypted = json.loads(sys.argv[1])
    granted = SessionGrant(address, *map(bytes.fromhex, keys), is_encrypted)
    asyncio.run(main(granted, int(sys.argv[2])))
