"""A process that owns shards: serves a tensor store until its standard input closes.

Run as `python transport_owner.py NODE_ID INCARNATION STALL_AFTER`. Prints one JSON line with its
address and the metadata of a shard whose values anyone can compute. After STALL_AFTER chunk reads
(negative: never) it answers no more, as a process does that is about to be killed.
"""

from __future__ import annotations

import asyncio
import json
import sys

import torch

from areal_sc.transport.bulk.server import BulkServer, _PullingPeer
from areal_sc.transport.rpc.server import RpcServer
from areal_sc.transport.shards.store import TensorStore

LENGTHS = [100, 10_000, 1, 0, 3_000]


def values_of(node_id: str) -> torch.Tensor:
    """[T] int32, different for every owner and every token."""
    start = int(node_id.rpartition("/")[2]) * 1_000_000
    return torch.arange(start, start + sum(LENGTHS), dtype=torch.int32)


def stall(server: BulkServer, stall_after: int) -> None:
    """Lets the server answer `stall_after` requests, or all when that is negative."""
    answer = _PullingPeer.on_message

    def answer_or_not(puller: _PullingPeer, kind: int, tag: bytes) -> None:
        if server.num_reads != stall_after:
            answer(puller, kind, tag)

    _PullingPeer.on_message = answer_or_not  # type: ignore[method-assign]


async def main(node_id: str, incarnation: str, stall_after: int) -> None:
    store = TensorStore(node_id, incarnation, max_bytes=1 << 24)
    values = values_of(node_id)
    shard_id = store.put(
        {"input_ids": values, "behavior_logprobs": values.to(torch.bfloat16)}, LENGTHS
    )
    bulk = BulkServer(store)
    stall(bulk, stall_after)
    await bulk.start()
    server = RpcServer(bulk.methods(), node_id=node_id, incarnation=incarnation)
    address = await server.start()
    sys.stdout.write(json.dumps({"address": address, "shard_id": shard_id}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.close()
    await bulk.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
