"""Pulls from owners that are processes of their own, and that are killed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
import pytest
import torch
from integration.agent_forks import end_with_pipes, start_with_pipes
from waiting import until

from areal_sc.config.schema import TransportConfig
from areal_sc.errors import PeerSilent, ShardGone
from areal_sc.metadata import BatchMetadata, Columns, RowMetadata, RowRun, ShardMetadata, concat
from areal_sc.sources.pictures import unpacked
from areal_sc.transport.bulk.client import BulkClient
from areal_sc.transport.bulk.puller import Puller
from areal_sc.transport.rpc.transport import ZmqTransport

OWNER_SCRIPT = Path(__file__).with_name("transport_owner.py")
PICTURE_SCRIPT = Path(__file__).with_name("picture_owner.py")

NUM_KILLS = 5
PULL_TIMEOUT_S = 250
LIMIT_S = 60
"""Far under the pulls' own deadline; an owner's end is noticed in less than a second."""

NUM_ARRIVED = 3
"""Chunks of up to 2 MiB after which a silent owner answers no more. Of others, up to 8 more are on
their way when they are killed."""

NUM_COPIES = 2_000
"""Of an owner's rows in one pull: 157 MB, 75 chunks at least."""


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
        self.process = start_with_pipes(OWNER_SCRIPT, self.node_id, f"life{number}", stall_after)

    def batch(self) -> BatchMetadata:
        """Waits until the process serves; metadata of its shard."""
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        lengths = owner_module().LENGTHS
        shard = ShardMetadata(
            self.node_id,
            said["address"],
            said["shard_id"],
            (RowRun(0, 0, len(lengths)),),
        )
        columns = Columns({"input_ids": "int32", "behavior_logprobs": "bfloat16"}, (shard,))
        rows = tuple(RowMetadata(0, i, n, 0.0, 0, (), 0) for i, n in enumerate(lengths))
        return BatchMetadata(self.node_id, 0, (columns,), rows)

    def end(self) -> None:
        end_with_pipes(self.process)


def received_bytes(bulk: BulkClient) -> int:
    """Bytes that came from owners, over the connections that are open."""
    streams = [connection._stream for connection in bulk._connections.values()]
    return sum(stream.moved_bytes for stream in streams if stream is not None)


def copies_of(batch: BatchMetadata, num_copies: int) -> BatchMetadata:
    """The same rows again and again: a large pull from a small store."""
    return concat([batch] * num_copies, batch_id="copies", global_step=0)


@pytest.fixture
def owners() -> Iterator[list[OwnerProcess]]:
    """The first one lives on. Of those to be killed, every second one falls silent before.

    So some die with chunks on their way, and some while only their connection can tell of it.
    """
    with ExitStack() as stack:
        made = []
        for number in range(1 + NUM_KILLS):
            is_silent = number > 0 and number % 2 == 0
            made.append(OwnerProcess(number, stall_after=NUM_ARRIVED if is_silent else -1))
            stack.callback(made[-1].end)
        yield made


async def test_pulls_from_processes_fail_soon_after_their_owners_death(
    owners: list[OwnerProcess],
) -> None:
    steady, *doomed = owners
    of_steady, *of_doomed = [await asyncio.to_thread(owner.batch) for owner in owners]
    transport = ZmqTransport()
    # an owner's silence alone ends no pull here
    config = TransportConfig(stalled_peer_timeout_s=PULL_TIMEOUT_S)
    bulk = BulkClient(transport, "train/0", config)
    puller = Puller(bulk, timeout_s=PULL_TIMEOUT_S)

    pulled = await puller.pull(of_steady)
    num_steady_bytes = puller.pulled_bytes
    values = owner_module().values_of(steady.node_id)
    assert torch.equal(pulled.fields["input_ids"], values)
    assert torch.equal(pulled.fields["behavior_logprobs"], values.to(torch.bfloat16))
    pulled = await puller.pull(copies_of(of_steady, 100))  # in several chunks
    assert torch.equal(pulled.fields["input_ids"], values.repeat(100))

    for owner, batch in zip(doomed, of_doomed, strict=True):
        gone = rf"shard {batch.shards[0].shard_id} on {owner.node_id} is gone"
        asked, arrived = puller.pulled_bytes, received_bytes(bulk)
        both = concat([of_steady, copies_of(batch, NUM_COPIES)], batch_id="both", global_step=0)
        pull = asyncio.create_task(puller.pull(both))
        async with asyncio.timeout(60):
            # all of the first owner's rows, and some of the other one's; not every chunk is full
            enough = arrived + num_steady_bytes + NUM_ARRIVED * config.chunk_bytes // 2
            while received_bytes(bulk) < enough and not pull.done():  # noqa: ASYNC110 - no event
                await asyncio.sleep(0)
        assert not pull.done()
        assert received_bytes(bulk) - arrived < (puller.pulled_bytes - asked) / 2

        owner.process.kill()
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(ShardGone, match=gone):
                await pull  # it hands out nothing, not even the first owner's rows
            # one that is dead already is found out, too
            with pytest.raises(ShardGone, match=gone):
                await puller.pull(batch)
        # the other owner is served as before
        assert torch.equal((await puller.pull(of_steady)).fields["input_ids"], values)
    await puller.close()
    await transport.close()


@pytest.mark.parametrize("goes_on", [False, True], ids=["for good", "for a while"])
async def test_a_stopped_owner_is_given_up_unless_it_goes_on(goes_on: bool) -> None:
    with ExitStack() as stack:
        owner = OwnerProcess(0)
        stack.callback(owner.end)
        batch = await asyncio.to_thread(owner.batch)
        transport = ZmqTransport()
        config = TransportConfig(stalled_peer_timeout_s=6 if goes_on else 3)
        bulk = BulkClient(transport, "train/0", config)
        puller = Puller(bulk, timeout_s=PULL_TIMEOUT_S)
        pull = asyncio.create_task(puller.pull(copies_of(batch, NUM_COPIES)))
        async with asyncio.timeout(LIMIT_S):
            while received_bytes(bulk) < 1 << 20:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0)
            owner.process.send_signal(signal.SIGSTOP)
            [connection] = bulk._connections.values()
            await until(lambda: connection.trouble)  # its silence is noticed
            assert not pull.done()
            if goes_on:
                owner.process.send_signal(signal.SIGCONT)
                values = owner_module().values_of(owner.node_id)
                assert torch.equal((await pull).fields["input_ids"], values.repeat(NUM_COPIES))
            else:
                silent = r"shard life0\.1 on rollout/0: rollout/0 at tcp\S+ gives no sign of life"
                with pytest.raises(PeerSilent, match=silent):
                    await pull
        await puller.close()
        await transport.close()


async def test_the_picture_of_a_group_crosses_the_wire_once() -> None:
    """Bytes that the kernel has given: of eight rows with a picture of 75 kB."""
    num_rows, num_bytes = 8, 75_000
    process = start_with_pipes(PICTURE_SCRIPT, num_rows, num_bytes)
    try:
        assert process.stdout is not None
        told = await asyncio.to_thread(process.stdout.readline)
        batch = msgspec.json.decode(told, type=BatchMetadata)
        transport = ZmqTransport()
        bulk = BulkClient(transport, "train/0", TransportConfig())
        puller = Puller(bulk, timeout_s=PULL_TIMEOUT_S)
        pulled = await puller.pull(batch)
        moved = received_bytes(bulk)
        expected = np.random.default_rng(0).bytes(num_bytes)
        assert [unpacked(it) for it in pulled.picture_bytes(range(num_rows))] == [(expected,)] * 8
        assert num_bytes < moved <= 1.2 * num_bytes
        await puller.close()
        await transport.close()
    finally:
        end_with_pipes(process)
