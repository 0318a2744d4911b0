"""Pulls from owners that are processes of their own, and that are killed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest
import torch

from areal_sc.errors import ShardGone
from areal_sc.metadata import BatchMetadata, RowMetadata, ShardMetadata, TensorMetadata, concat
from areal_sc.transport.bulk.client import BulkClient
from areal_sc.transport.bulk.link import BulkOptions
from areal_sc.transport.pull import Puller
from areal_sc.transport.rpc.transport import ZmqTransport

OWNER_SCRIPT = Path(__file__).with_name("transport_owner.py")


def owner_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("transport_owner", OWNER_SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class OwnerProcess:
    """A started owner process."""

    def __init__(self, number: int, stall_after: int = -1) -> None:
        self.node_id = f"rollout/{number}"
        self.process = subprocess.Popen(
            [sys.executable, str(OWNER_SCRIPT), self.node_id, f"life{number}", str(stall_after)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def batch(self) -> BatchMetadata:
        """Waits until the process serves; metadata of its shard."""
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        lengths = owner_module().LENGTHS
        total = sum(lengths)
        shard = ShardMetadata(
            self.node_id,
            said["address"],
            said["shard_id"],
            len(lengths),
            0,
            {
                "input_ids": TensorMetadata((total,), "int32"),
                "behavior_logprobs": TensorMetadata((total,), "bfloat16"),
            },
            tuple(range(len(lengths))),
        )
        rows = tuple(RowMetadata(0, i, n, 0.0, 0, ()) for i, n in enumerate(lengths))
        return BatchMetadata(self.node_id, 0, len(rows), (shard,), rows)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def two_owners() -> Iterator[list[OwnerProcess]]:
    """The second one stops to answer after three chunks."""
    with ExitStack() as stack:
        made = [OwnerProcess(0), OwnerProcess(1, stall_after=3)]
        for owner in made:
            stack.callback(owner.end)
        yield made


async def test_rows_come_from_processes_until_one_is_killed(two_owners: list[OwnerProcess]) -> None:
    steady, doomed = two_owners
    batches = [await asyncio.to_thread(owner.batch) for owner in two_owners]
    transport = ZmqTransport()
    # 13,101 tokens of 6 bytes are 20 chunks
    bulk = BulkClient(transport, BulkOptions("train/0", 4_096, max_inflight_chunks=4))
    puller = Puller(bulk, timeout_s=250)

    pulled = await puller.pull(batches[0])
    values = owner_module().values_of(steady.node_id)
    assert torch.equal(pulled.fields["input_ids"], values)
    assert torch.equal(pulled.fields["behavior_logprobs"], values.to(torch.bfloat16))
    before = bulk.received_bytes

    both = concat(batches, batch_id="both", global_step=0)
    pull = asyncio.create_task(puller.pull(both))
    async with asyncio.timeout(60):
        # all of the first owner's rows, and three chunks of the second one's
        while bulk.received_bytes < 2 * before + 3 * 4_096:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)
    assert not pull.done()
    doomed.end()
    shard_id = batches[1].shards[0].shard_id
    async with asyncio.timeout(20):  # far under the pull's own deadline
        with pytest.raises(ShardGone, match=rf"shard {shard_id} on rollout/1 is gone"):
            await pull
        # one that is dead already is found out, too
        with pytest.raises(ShardGone, match=rf"shard {shard_id} on rollout/1 is gone"):
            await puller.pull(batches[1])
    # the other owner is served as before
    assert torch.equal((await puller.pull(batches[0])).fields["input_ids"], values)
    await puller.close()
    await transport.close()
