"""A process that serves a group of rows with one picture, as a rollout worker seals it.

Run as `python picture_owner.py NUM_ROWS PICTURE_BYTES`. Prints the metadata of the rows in JSON,
and serves them until its standard input closes.
"""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch

from areal_sc.metadata import PromptReference
from areal_sc.sizing.pictures import MAX_ROW_BYTES
from areal_sc.sources.pictures import packed
from areal_sc.token_fields import PICTURES, TensorMetadata
from areal_sc.transport.bulk.server import BulkServer
from areal_sc.transport.rpc.server import RpcServer
from areal_sc.transport.shards.store import TensorStore
from areal_sc.workers.calls import RunGroup
from areal_sc.workers.finished_episodes import EndedEpisode, FinishedEpisodes
from areal_sc.workflows.trajectory import Trajectory

PICTURE = TensorMetadata((None,), "uint8", per_group=True, max_bytes=MAX_ROW_BYTES)
NODE = "rollout/0"


def trajectory(seed: int, picture: bytes, num_tokens: int = 64) -> Trajectory:
    rng = np.random.default_rng(seed)
    mask = np.arange(num_tokens) >= 32
    return Trajectory(
        input_ids=rng.integers(0, 99, num_tokens, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=rng.normal(size=num_tokens).astype(np.float32) * mask,
        versions=np.where(mask, 0, -1).astype(np.int32),
        temperatures=np.ones(num_tokens, np.float32),
        reward=1.0,
        fields={PICTURES: packed([picture])},
    )


async def main(num_rows: int, num_bytes: int) -> None:
    store = TensorStore(NODE, "life", max_bytes=1 << 24)
    bulk = BulkServer(store)
    await bulk.start()
    server = RpcServer(bulk.methods(), node_id=NODE, incarnation="life")
    address = await server.start()
    plane: Any = SimpleNamespace(store=store, puller=None)
    episodes = FinishedEpisodes(NODE, lambda: address, plane)
    group = RunGroup(0, 0, 0, PromptReference(0, 0, 1), 0, num_rows, ())
    picture = np.random.default_rng(0).bytes(num_bytes)
    ended = dict[int, EndedEpisode]()
    for number in range(num_rows):  # each alone, as those of long episodes are
        shared = next((it.shared_id for it in ended.values()), "")
        rows = [trajectory(number, picture)]
        ended[number] = episodes.seal(group, number, rows, {PICTURES: PICTURE}, shared_id=shared)
    batch = episodes.batch_of(group, ended, {PICTURES: PICTURE})
    sys.stdout.write(msgspec.json.encode(batch).decode() + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.close()
    await bulk.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
