"""Lazy pull over real sockets; owners in this process, each with its own store and server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from areal_sc.errors import MetadataError, ProtocolError, RpcTimeout, ShardGone
from areal_sc.metadata import BatchMetadata, RowMetadata, ShardMetadata, TensorMetadata, concat
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.transport.pull import DESCRIBE, READ, Puller, pull_handlers
from areal_sc.transport.rpc import Connection, Frame, Frames, RpcServer, ZmqTransport
from areal_sc.transport.tensor_bytes import DTYPE_NAMES, dtype_named
from areal_sc.transport.tensor_store import TensorStore


class Owner:
    """A store that is served, and the metadata of what is put into it."""

    def __init__(self, number: int, incarnation: str = "life1") -> None:
        self.node_id = f"rollout/{number}"
        self.store = TensorStore(self.node_id, incarnation, max_bytes=1 << 28)
        self.max_running_reads = 0
        self._running_reads = 0
        self._handlers = pull_handlers(self.store)
        self.server = RpcServer(
            {**self._handlers, READ: self._read}, node_id=self.node_id, incarnation=incarnation
        )
        self.address = ""

    async def _read(self, args: dict[str, Any], frames: list[Frame]) -> Any:
        self._running_reads += 1
        self.max_running_reads = max(self.max_running_reads, self._running_reads)
        await asyncio.sleep(0)
        try:
            return await self._handlers[READ](args, frames)
        finally:
            self._running_reads -= 1

    def put(
        self, fields: dict[str, torch.Tensor], lengths: Sequence[int], first_group: int = 0
    ) -> BatchMetadata:
        shard = ShardMetadata(
            node_id=self.node_id,
            node_addr=self.address,
            shard_id=self.store.put(fields, lengths),
            batch_size=len(lengths),
            offset=0,
            fields={
                name: TensorMetadata((values.numel(),), str(values.dtype).removeprefix("torch."))
                for name, values in fields.items()
            },
            shard_rows=tuple(range(len(lengths))),
        )
        rows = tuple(
            RowMetadata(first_group + i, 0, length, 1.0, 0, ((0, length),))
            for i, length in enumerate(lengths)
        )
        return BatchMetadata(shard.shard_id, 0, len(rows), (shard,), rows)


@asynccontextmanager
async def owners(count: int) -> AsyncIterator[list[Owner]]:
    made = [Owner(number) for number in range(count)]
    for owner in made:
        owner.address = await owner.server.start()
    try:
        yield made
    finally:
        for owner in made:
            await owner.server.close()


@asynccontextmanager
async def pulling(**options: Any) -> AsyncIterator[Puller]:
    transport = ZmqTransport()
    puller = Puller(transport, **{"timeout_s": 20.0, **options})
    try:
        yield puller
    finally:
        await puller.close()
        await transport.close()


def rows_of(packed: PackedRows, name: str) -> list[list[float]]:
    return [part.tolist() for part in packed.fields[name].split(list(packed.lengths))]


def token_values(row: int, length: int) -> list[int]:
    return [row * 100_000 + i for i in range(length)]


def ids_of(first_row: int, lengths: Sequence[int]) -> torch.Tensor:
    """[T] int32, in which each token tells its row and its place in it."""
    values = [v for i, n in enumerate(lengths) for v in token_values(first_row + i, n)]
    return torch.tensor(values, dtype=torch.int32)


async def spread_batch(made: list[Owner], lengths: list[list[int]]) -> BatchMetadata:
    """One shard an owner; row numbers run on from owner to owner."""
    batches: list[BatchMetadata] = []
    first = 0
    for owner, its in zip(made, lengths, strict=True):
        ids = ids_of(first, its)
        batches.append(owner.put({"input_ids": ids, "loss_mask": ids % 2 == 0}, its, first))
        first += len(its)
    return concat(batches, batch_id="all", global_step=1)


@pytest.mark.parametrize("name", DTYPE_NAMES)
async def test_every_dtype_arrives_bit_by_bit(name: str) -> None:
    values = torch.arange(-50, 50).to(torch.float32).to(dtype_named(name))
    async with owners(1) as [owner], pulling(chunk_bytes=64) as puller:
        pulled = await puller.pull(owner.put({"x": values}, [30, 70]))
    assert pulled.fields["x"].dtype == values.dtype
    assert torch.equal(pulled.fields["x"].view(torch.uint8), values.view(torch.uint8))
    assert pulled.lengths == (30, 70)


async def test_rows_of_very_different_lengths_come_from_many_owners_in_batch_order() -> None:
    lengths = [[10_000, 100], [100, 0, 7], [1], [100, 10_000]]
    async with owners(4) as made, pulling(chunk_bytes=1 << 12, max_inflight_chunks=3) as puller:
        batch = await spread_batch(made, lengths)
        pulled = await puller.pull(batch)
        flat = [n for its in lengths for n in its]
        assert pulled.lengths == tuple(flat)
        expected = [token_values(row, n) for row, n in enumerate(flat)]
        assert rows_of(pulled, "input_ids") == expected
        assert torch.equal(pulled.fields["loss_mask"], pulled.fields["input_ids"] % 2 == 0)
        assert puller.pulled_bytes == sum(flat) * (4 + 1)
        assert puller.local_bytes == 0
        # receiver credits
        assert 1 <= max(owner.max_running_reads for owner in made) <= 3


async def test_only_the_asked_columns_and_rows_move() -> None:
    lengths = [[300, 5, 60], [40, 2]]
    async with owners(2) as made, pulling() as puller:
        batch = await spread_batch(made, lengths)
        pulled = await puller.pull(batch, fields=["input_ids"], rows=[4, 1, 3])
        assert list(pulled.fields) == ["input_ids"]
        assert rows_of(pulled, "input_ids") == [
            token_values(4, 2),
            token_values(1, 5),
            token_values(3, 40),
        ]
        assert puller.pulled_bytes == (2 + 5 + 40) * 4


async def test_rows_follow_take_split_and_union() -> None:
    lengths = [[30, 5, 60, 1], [40, 2, 9]]
    flat = [n for its in lengths for n in its]
    async with owners(3) as made, pulling(chunk_bytes=100) as puller:
        batch = await spread_batch(made[:2], lengths)
        order = [6, 0, 3, 2, 5, 1, 4]
        shuffled = batch.take(order)
        # another worker adds a column in the shuffled order, under shards of its own
        added = torch.cat([torch.full((flat[row],), float(row)) for row in order])
        extra = made[2].put({"proximal_logprobs": added}, [flat[row] for row in order])
        united = shuffled.union(replace(extra, rows=shuffled.rows))
        for part in [united, united.take([5, 0, 2]), *united.split(3)]:
            wanted = [row.group_id for row in part.rows]
            pulled = await puller.pull(part)
            assert rows_of(pulled, "input_ids") == [token_values(r, flat[r]) for r in wanted]
            assert rows_of(pulled, "proximal_logprobs") == [[float(r)] * flat[r] for r in wanted]


async def test_own_rows_are_read_without_a_socket() -> None:
    async with owners(2) as made, pulling(local_store=made[0].store) as puller:
        batch = await spread_batch(made, [[3, 4], [5]])
        pulled = await puller.pull(batch)
        assert rows_of(pulled, "input_ids") == [token_values(i, n) for i, n in enumerate((3, 4, 5))]
        assert (puller.local_bytes, puller.pulled_bytes) == (7 * 5, 5 * 5)
        assert made[0].server.bytes_received == 0
        made[0].store.sweep([], made[0].store.last_sequence)
        with pytest.raises(ShardGone, match="swept"):
            await puller.pull(batch)


async def test_empty_batches_have_empty_fields() -> None:
    async with owners(1) as made, pulling() as puller:
        batch = await spread_batch(made, [[3, 4]])
        for empty in [
            await puller.pull(batch.take([]), fields=["input_ids", "proximal_logprobs"]),
            await puller.pull(batch, fields=["input_ids"], rows=[]),
        ]:
            assert (empty.num_rows, empty.num_tokens, empty.advantages) == (0, 0, None)
            assert empty.fields["input_ids"].dtype == torch.int32
        assert (await puller.pull(batch.take([]))).fields == {}
        zero_tokens = await puller.pull(made[0].put({"input_ids": ids_of(0, [])}, [0, 0]))
        assert zero_tokens.lengths == (0, 0)
        assert puller.pulled_bytes == 0


async def test_advantages_come_when_all_rows_have_one() -> None:
    async with owners(1) as made, pulling() as puller:
        batch = await spread_batch(made, [[1, 2, 3]])
        assert (await puller.pull(batch)).advantages is None
        advised = batch.with_advantages([0.5, -1.0, 2.0])
        assert (await puller.pull(advised, rows=[2, 0])).advantages == (2.0, 0.5)
        partial = replace(advised, rows=(*advised.rows[:2], batch.rows[2]))
        assert (await puller.pull(partial)).advantages is None


async def test_whole_shards_of_weights_are_pulled_flat() -> None:
    weights = {
        "embed.weight": torch.randn(5_000, generator=torch.Generator().manual_seed(0)),
        "bias": torch.zeros(0),
        "norm.weight": torch.ones(7, dtype=torch.bfloat16),
    }
    async with owners(1) as [owner], pulling(chunk_bytes=999, local_store=None) as puller:
        shard_id = owner.store.put(weights, {n: [w.numel()] for n, w in weights.items()})
        over_the_wire = await puller.pull_shard(owner.node_id, owner.address, shard_id)
        assert puller.pulled_bytes == 20_000 + 14
        own = Puller(ZmqTransport(), local_store=owner.store)
        directly = await own.pull_shard(owner.node_id, owner.address, shard_id)
        assert own.local_bytes == 20_000 + 14
        await own._transport.close()
        for pulled in (over_the_wire, directly):
            assert pulled.keys() == weights.keys()
            assert all(torch.equal(pulled[name], weights[name]) for name in weights)
        owner.store.remove(shard_id)
        with pytest.raises(ShardGone, match=f"{shard_id} on rollout/0 is gone: it was swept"):
            await puller.pull_shard(owner.node_id, owner.address, shard_id)


async def test_missing_shards_name_shard_and_owner() -> None:
    async with owners(1) as [owner], pulling() as puller:
        batch = owner.put({"input_ids": ids_of(0, [3])}, [3])
        owner.store.sweep([], owner.store.last_sequence)
        with pytest.raises(ShardGone, match=r"life1\.1 on rollout/0 is gone: it was swept"):
            await puller.pull(batch)
        earlier = replace(batch, shards=(replace(batch.shards[0], shard_id="life0.1"),))
        with pytest.raises(ShardGone, match=r"life0\.1 on rollout/0 is gone .*restarted"):
            await puller.pull(earlier)
        with pytest.raises(ShardGone, match=r"life0\.1 on rollout/0 is gone .*restarted"):
            await puller.pull_shard(owner.node_id, owner.address, "life0.1")


async def test_sizes_that_differ_from_the_metadata_are_refused() -> None:
    async with owners(1) as [owner], pulling(local_store=None) as puller:
        batch = owner.put({"input_ids": ids_of(0, [3, 5])}, [3, 5])
        swapped = replace(batch, rows=(batch.rows[1], batch.rows[0]))
        as_int64 = replace(
            batch,
            shards=(replace(batch.shards[0], fields={"input_ids": TensorMetadata((8,), "int64")}),),
        )
        own = Puller(ZmqTransport(), local_store=owner.store)
        for puller_of in (puller, own):
            with pytest.raises(
                ProtocolError,
                match=r"life1\.1 on rollout/0, field 'input_ids': expected int32 rows of \[5, 3\] "
                r"values, got int32 rows of \[3, 5\]",
            ):
                await puller_of.pull(swapped)
            with pytest.raises(ProtocolError):
                await puller_of.pull(as_int64)
        await own._transport.close()
        mixed = concat([batch, as_int64], batch_id="mixed", global_step=0)
        with pytest.raises(MetadataError, match="holds int64, others hold int32"):
            await puller.pull(mixed)


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"segments": [], "start": 0, "stop": 1},
        {"segments": [["life1.1", "input_ids", [0]]], "start": 0, "stop": 13},
        {"segments": [["life1.1", "input_ids", [0]]], "start": -1, "stop": 3},
        {"segments": [["life1.1", "input_ids", [0]]], "start": 3, "stop": 2},
        {"segments": [["life1.1", "input_ids", [0]]], "start": 0, "stop": 1 << 40},
        {"segments": [["life1.1", "input_ids", 0, 1 << 60]], "start": 0, "stop": 3},
        {"segments": [["life1.1", "input_ids", -1, 1]], "start": 0, "stop": 3},
        {"segments": [["life1.1", "input_ids", [-1]]], "start": 0, "stop": 3},
        {"segments": [["life1.1", "input_ids", ["0"]]], "start": 0, "stop": 3},
        {"segments": [[1, 2]], "start": 0, "stop": 3},
    ],
    ids=repr,
)
async def test_an_owner_refuses_windows_that_no_correct_puller_asks(args: dict[str, Any]) -> None:
    async with owners(1) as [owner]:
        owner.put({"input_ids": ids_of(0, [3])}, [3])
        transport = ZmqTransport()
        connection = transport.connect(owner.address, owner.node_id, "life1")
        with pytest.raises(ProtocolError):
            await connection.call_frames(READ, args, timeout_s=20)
        good = {"segments": [["life1.1", "input_ids", [0]]], "start": 0, "stop": 12}
        _, frames = await connection.call_frames(READ, good, timeout_s=20)
        assert b"".join(frames) == ids_of(0, [3]).numpy().tobytes()
        await transport.close()


@pytest.mark.parametrize(
    "description", [None, [1], [["w", "float32"]], [["w", "float32", [-1]]], [["w", 1, [1]]]]
)
async def test_a_puller_refuses_descriptions_of_no_correct_owner(description: Any) -> None:
    async def describe(args: dict[str, Any], frames: list[Frame]) -> Any:
        return description

    server = RpcServer({DESCRIBE: describe}, node_id="train/0", incarnation="life1")
    address = await server.start()
    async with pulling() as puller:
        with pytest.raises(ProtocolError, match=r"shard life1\.1 on train/0: expected name"):
            await puller.pull_shard("train/0", address, "life1.1")
    await server.close()


async def test_a_silent_owner_ends_the_pull_at_its_deadline() -> None:
    asked = asyncio.Event()

    async def read(args: dict[str, Any], frames: list[Frame]) -> Frames:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with owners(1) as [owner]:
        batch = owner.put({"input_ids": ids_of(0, [3])}, [3])
        server = RpcServer({READ: read}, node_id="rollout/0", incarnation="life1")
        silent = replace(batch.shards[0], node_addr=await server.start())
        async with pulling(timeout_s=0.3) as puller:
            with pytest.raises(
                RpcTimeout, match=r"life1\.1 on rollout/0, field 'input_ids'.*0\.3 s"
            ):
                await puller.pull(replace(batch, shards=(silent,)))
        assert asked.is_set()
        await server.close()


async def test_concurrent_pulls_share_the_credits_of_an_owner() -> None:
    async with owners(1) as [owner], pulling(chunk_bytes=400, max_inflight_chunks=2) as puller:
        batch = await spread_batch([owner], [[1000, 1000]])
        pulls = await asyncio.gather(*(puller.pull(batch, ["input_ids"]) for _ in range(5)))
        assert owner.max_running_reads <= 2
        for pulled in pulls:
            assert rows_of(pulled, "input_ids") == [token_values(0, 1000), token_values(1, 1000)]


async def test_a_cancelled_pull_leaves_nothing_running() -> None:
    async with owners(1) as [owner], pulling(chunk_bytes=100) as puller:
        batch = await spread_batch([owner], [[10_000]])
        pull = asyncio.create_task(puller.pull(batch))
        async with asyncio.timeout(20):
            while not puller.pulled_bytes:  # noqa: ASYNC110 - progress has no event
                await asyncio.sleep(0)
        pull.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pull
        pulled = await puller.pull(batch)
        assert rows_of(pulled, "input_ids") == [token_values(0, 10_000)]


async def test_another_transport_may_take_the_place_of_zmq() -> None:
    class DirectConnection:
        """Calls the owner's handlers without a wire."""

        node_id = "rollout/0"
        bytes_sent = bytes_received = 0

        def __init__(self, owner: Owner) -> None:
            self._owner = owner

        async def call(self, method: str, args: dict[str, Any], **_: Any) -> Any:
            return await self._owner._handlers[method](args, [])

        async def call_frames(
            self, method: str, args: dict[str, Any], **_: Any
        ) -> tuple[Any, list[Frame]]:
            answer = await self._owner._handlers[method](args, [])
            return answer.header, [memoryview(buffer) for buffer in answer.buffers]

        def fail_pending(self, error: Exception) -> None: ...

        async def close(self) -> None: ...

    class DirectTransport:
        def connect(self, address: str, node_id: str, incarnation: str) -> Connection:
            return DirectConnection(owner)

        async def close(self) -> None: ...

    owner = Owner(0)
    batch = await spread_batch([owner], [[3, 400]])
    pulled = await Puller(DirectTransport(), chunk_bytes=64).pull(batch)
    assert rows_of(pulled, "input_ids") == [token_values(0, 3), token_values(1, 400)]
