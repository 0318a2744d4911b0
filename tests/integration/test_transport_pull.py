"""Lazy pull over real sockets; owners in this process, each with its own store and servers."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import struct
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from integration.bulk_member import BulkMember
from msgspec.structs import replace
from waiting import until

from areal_sc.config.schema import TransportConfig
from areal_sc.errors import MetadataError, ProtocolError, RpcTimeout, ServerBusy, ShardGone
from areal_sc.metadata import (
    BatchMetadata,
    Columns,
    RowMetadata,
    RowRun,
    ShardMetadata,
    concat,
)
from areal_sc.token_fields import TensorMetadata
from areal_sc.transport.bulk import client, owner_connection
from areal_sc.transport.bulk.client import BulkClient
from areal_sc.transport.bulk.messages import HEAD, PullFailure
from areal_sc.transport.bulk.puller import Puller
from areal_sc.transport.bulk.server import BulkServer, _PullingPeer
from areal_sc.transport.bulk.session import call_owner
from areal_sc.transport.bulk.stream import MessageStream
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.transport.rpc.server import RpcServer
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.transport.shards.store import TensorStore
from areal_sc.transport.sockets.interface import Interface
from areal_sc.transport.tensor_bytes import DTYPE_NAMES, dtype_named, type_name
from areal_sc.weights.published import ShardReference, WeightsReference

LARGE = 8 << 20
"""Values of 8 bytes: 64 requests, of which several are under way."""


class Owner:
    """A store that is served, and the metadata of what is put into it."""

    def __init__(self, number: int, incarnation: str = "life1", **bulk_options: Any) -> None:
        self.node_id = f"rollout/{number}"
        self.store = TensorStore(self.node_id, incarnation, max_bytes=1 << 28)
        self.bulk = BulkServer(self.store, **bulk_options)
        self.server = RpcServer(self.bulk.methods(), node_id=self.node_id, incarnation=incarnation)
        self.address = ""

    async def start(self) -> None:
        await self.bulk.start()
        self.address = await self.server.start()

    async def close(self) -> None:
        await self.server.close()
        await self.bulk.close()

    def put(
        self, fields: dict[str, torch.Tensor], lengths: Sequence[int], first_group: int = 0
    ) -> BatchMetadata:
        shard = ShardMetadata(
            node_id=self.node_id,
            node_addr=self.address,
            shard_id=self.store.put(fields, lengths),
            runs=(RowRun(0, 0, len(lengths)),),
        )
        dtypes = {name: type_name(values) for name, values in fields.items()}
        rows = tuple(
            RowMetadata(first_group + i, 0, length, 1.0, 0, ((0, length),), 0)
            for i, length in enumerate(lengths)
        )
        return BatchMetadata(shard.shard_id, 0, (Columns(dtypes, (shard,)),), rows)


def with_shard(batch: BatchMetadata, **changes: str) -> BatchMetadata:
    """A batch of one shard, of which the metadata says something else."""
    (columns,) = batch.columns
    shards = (replace(columns.shards[0], **changes),)
    return replace(batch, columns=(replace(columns, shards=shards),))


@asynccontextmanager
async def owners(count: int, **bulk_options: Any) -> AsyncIterator[list[Owner]]:
    made = [Owner(number, **bulk_options) for number in range(count)]
    for owner in made:
        await owner.start()
    try:
        yield made
    finally:
        for owner in made:
            await owner.close()


@asynccontextmanager
async def pulling(**options: Any) -> AsyncIterator[Puller]:
    transport = ZmqTransport()
    own = {name: options.pop(name) for name in ("local_store", "timeout_s") if name in options}
    limits = {n: options.pop(n) for n in ("absence_s", "max_inflight_bytes") if n in options}
    bulk = BulkClient(transport, "train/0", TransportConfig(**options), **limits)
    puller = Puller(bulk, **{"timeout_s": 20.0, **own})
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


async def test_a_shape_other_than_promised_is_refused() -> None:
    async with owners(1) as (owner,), pulling() as puller:
        batch = owner.put({"routes": torch.zeros(4, 2, 3)}, [4])
        (columns,) = batch.columns
        for wrong in ("float32[3x2]", "float32[6]", "float32"):
            promised = replace(batch, columns=(replace(columns, dtypes={"routes": wrong}),))
            with pytest.raises(ProtocolError, match="routes"):
                await puller.pull(promised)
        for wrong in ("float32[0]", "float32[2x]", "float32[]", "floaty[2]", "float32[-1]"):
            promised = replace(batch, columns=(replace(columns, dtypes={"routes": wrong}),))
            with pytest.raises(MetadataError, match="one of the dtypes"):
                await puller.pull(promised)


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["authenticated", "encrypted"])
async def test_every_dtype_arrives_bit_by_bit(is_encrypted: bool) -> None:
    numbers = torch.arange(-50, 50).to(torch.float32)
    fields = {name: numbers.to(dtype_named(name)) for name in DTYPE_NAMES}
    async with (
        owners(1, is_encrypted=is_encrypted) as [owner],
        pulling(chunk_bytes=64, encrypt=is_encrypted) as puller,
    ):
        pulled = await puller.pull(owner.put(fields, [30, 70]))
    for name, values in fields.items():
        assert pulled.fields[name].dtype == values.dtype
        assert torch.equal(pulled.fields[name].view(torch.uint8), values.view(torch.uint8)), name
    assert pulled.lengths == (30, 70)


@pytest.mark.parametrize("bind", ["127.0.0.1", "::1"])
async def test_rows_of_very_different_lengths_come_from_many_owners_in_batch_order(
    bind: str,
) -> None:
    lengths = [[10_000, 100], [100, 0, 7], [1], [100, 10_000]]
    async with (
        owners(4, interface=Interface.of(bind)) as made,
        pulling(chunk_bytes=1 << 12, max_inflight_chunks=3) as puller,
    ):
        batch = await spread_batch(made, lengths)
        pulled = await puller.pull(batch)
        flat = [n for its in lengths for n in its]
        assert pulled.lengths == tuple(flat)
        expected = [token_values(row, n) for row, n in enumerate(flat)]
        assert rows_of(pulled, "input_ids") == expected
        assert torch.equal(pulled.fields["loss_mask"], pulled.fields["input_ids"] % 2 == 0)
        assert puller.pulled_bytes == sum(flat) * (4 + 1)
        assert puller.local_bytes == 0


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
        assert made[0].bulk.num_reads == 0
        made[0].store.sweep([], made[0].store.last_sequence)
        with pytest.raises(ShardGone, match="swept"):
            await puller.pull(batch)


async def test_advantages_come_when_all_rows_have_one() -> None:
    async with owners(1) as made, pulling() as puller:
        batch = await spread_batch(made, [[1, 2, 3]])
        assert (await puller.pull(batch)).advantages is None
        advised = batch.with_advantages([0.5, -1.0, 2.0])
        assert (await puller.pull(advised.take([2, 0]))).advantages == (2.0, 0.5)
        partial = replace(advised, rows=(*advised.rows[:2], batch.rows[2]))
        assert (await puller.pull(partial)).advantages is None


def weights_of(rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return {
        "embed.weight": torch.randn(5_000, generator=generator),
        "bias": torch.zeros(0),
        "head.weight": torch.randn(3_000, generator=generator),
        "norm.weight": torch.full((7,), float(rank), dtype=torch.bfloat16),
    }


def seal_weights(made: Sequence[Owner], version: int) -> WeightsReference:
    """Every owner is a rank, with its own part of every parameter."""
    shards = []
    for rank, owner in enumerate(made):
        weights = weights_of(rank + version)
        shard_id = owner.store.put(weights, {n: [w.numel()] for n, w in weights.items()})
        shards.append(ShardReference(owner.node_id, owner.address, shard_id))
    return WeightsReference(version, tuple(shards))


async def test_weights_come_in_parts_of_ranks_and_in_buckets() -> None:
    async with owners(2) as made, pulling(chunk_bytes=999) as puller:
        reference = seal_weights(made, 5)
        before = 0
        async for name, parts in puller.pull_weights(reference, max_bucket_bytes=1 << 15):
            assert all(torch.equal(p, weights_of(5 + rank)[name]) for rank, p in enumerate(parts))
            # no bucket is asked for before the one before it was taken
            assert puller.pulled_bytes - before <= 40_000
            before = puller.pulled_bytes
        assert before == 2 * (20_000 + 12_000 + 14)
        own = Puller(BulkClient(ZmqTransport(), "x"), local_store=made[0].store)
        one_rank = WeightsReference(5, reference.shards[:1])
        directly = {name: parts[0] async for name, parts in own.pull_weights(one_rank)}
        assert list(directly) == list(weights_of(5))
        assert own.local_bytes == 20_000 + 12_000 + 14


async def test_weights_with_a_shape_at_each_place_are_refused() -> None:
    async with owners(1) as (owner,), pulling() as puller:
        shard_id = owner.store.put({"w": torch.zeros(4, 2)}, {"w": [4]})
        shard = ShardReference(owner.node_id, owner.address, shard_id)
        with pytest.raises(ProtocolError, match=r"weights 'w' .* got float32\[2\]"):
            _ = [it async for it in puller.pull_weights(WeightsReference(1, (shard,)))]


async def test_the_time_of_whoever_loads_weights_is_not_the_pulls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, loading_s = asyncio.get_running_loop(), 0.0
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + loading_s)
    async with owners(2) as made, pulling(timeout_s=60) as puller:
        names = []
        async for name, _ in puller.pull_weights(seal_weights(made, 0), max_bucket_bytes=1):
            names.append(name)
            loading_s += 100
        assert names == list(weights_of(0))


async def test_several_workers_pull_weights_and_a_late_one_gets_the_newest() -> None:
    async with owners(2) as made, pulling() as first, pulling() as second:

        async def embedding(puller: Puller, weights: WeightsReference) -> torch.Tensor:
            pulled = {name: parts async for name, parts in puller.pull_weights(weights)}
            return torch.cat(pulled["embed.weight"])

        old, new = seal_weights(made, 0), seal_weights(made, 1)
        expected = torch.cat([weights_of(1)["embed.weight"], weights_of(2)["embed.weight"]])
        both = await asyncio.gather(embedding(first, new), embedding(second, new))
        assert all(torch.equal(pulled, expected) for pulled in both)
        for owner, (_, _, shard_id) in zip(made, old.shards, strict=True):
            owner.store.remove(shard_id)
        async with pulling() as late:
            assert torch.equal(await embedding(late, new), expected)
            with pytest.raises(ShardGone, match=r"life1\.1 on rollout/[01] is gone: it was swept"):
                await embedding(late, old)


async def test_ranks_may_hold_different_parameters() -> None:
    """As shares of whole tensors do, which are cut where one rank's ends."""
    whole = {name: torch.randn(size) for name, size in (("a", 9000), ("b", 40), ("c", 3000))}
    shares = [
        {"a": whole["a"][:6000]},
        {"a": whole["a"][6000:], "b": whole["b"]},
        {"c": whole["c"]},
    ]
    async with owners(3) as made, pulling(chunk_bytes=4096) as puller:
        shards = []
        for owner, share in zip(made, shares, strict=True):
            shard_id = owner.store.put(share, {name: [len(v)] for name, v in share.items()})
            shards.append(ShardReference(owner.node_id, owner.address, shard_id))
        reference = WeightsReference(0, tuple(shards))
        pulled = {
            name: parts
            async for name, parts in puller.pull_weights(reference, max_bucket_bytes=1 << 14)
        }
        assert {name: len(parts) for name, parts in pulled.items()} == {"a": 2, "b": 1, "c": 1}
        assert all(torch.equal(torch.cat(pulled[name]), whole[name]) for name in whole)


async def test_weights_of_an_owner_that_has_ended_are_gone() -> None:
    async with owners(1) as made:
        reference = seal_weights(made, 0)
    async with pulling() as puller:
        with pytest.raises(ShardGone, match=r"life1\.1 on rollout/0 is gone with its owner"):
            async for _ in puller.pull_weights(reference):
                pass


@pytest.mark.parametrize("is_in_time", [True, False])
async def test_a_busy_owner_is_asked_again_for_its_weights(
    is_in_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_calls = 0

    async def busy(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls < 3 or not is_in_time:
            raise ServerBusy("a test")
        return await call_owner(*args)

    monkeypatch.setattr(client, "call_owner", busy)
    monkeypatch.setattr(client, "REOPEN_DELAY_S", 0.01)
    async with owners(1) as made, pulling(timeout_s=20 if is_in_time else 0.1) as puller:
        pulled = puller.pull_weights(seal_weights(made, 0))
        if is_in_time:
            assert [name async for name, _ in pulled] == list(weights_of(0))
        else:
            with pytest.raises(RpcTimeout, match=r"life1\.1 on rollout/0: not described by"):
                await anext(pulled)


async def test_missing_shards_name_shard_and_owner() -> None:
    async with owners(1) as [owner], pulling() as puller:
        batch = owner.put({"input_ids": ids_of(0, [3])}, [3])
        owner.store.sweep([], owner.store.last_sequence)
        with pytest.raises(ShardGone, match=r"life1\.1 on rollout/0 is gone: it was swept"):
            await puller.pull(batch)
        earlier = with_shard(batch, shard_id="life0.1")
        with pytest.raises(ShardGone, match=r"life0\.1 on rollout/0 is gone: .*restarted"):
            await puller.pull(earlier)


async def test_adopted_shards_are_pulled_from_the_next_life_of_their_worker() -> None:
    """Which has the address of the one before, and comes while it is waited for."""
    async with owners(1) as [dead]:
        batch = dead.put({"input_ids": ids_of(0, [30, 4])}, [30, 4])
    successor = Owner(0, "life2")
    successor.store._shards["life1", 1] = dead.store._shards["life1", 1]
    successor.server = RpcServer(
        successor.bulk.methods(),
        node_id=successor.node_id,
        incarnation="life2",
        bind=dead.address,
    )
    async with pulling(absence_s=20.0) as puller:
        early = asyncio.create_task(puller.pull(batch))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(early), 0.5)
        await successor.start()
        assert rows_of(await early, "input_ids") == [
            token_values(i, n) for i, n in enumerate((30, 4))
        ]
        own = successor.put({"input_ids": ids_of(2, [5])}, [5])
        pulled = await puller.pull(concat([batch, own], batch_id="both", global_step=0))
        assert rows_of(pulled, "input_ids") == [
            token_values(i, n) for i, n in enumerate((30, 4, 5))
        ]
    await successor.close()


async def test_sizes_that_differ_from_the_metadata_are_refused() -> None:
    async with owners(1) as [owner], pulling(local_store=None) as puller:
        batch = owner.put({"input_ids": ids_of(0, [3, 5])}, [3, 5])
        swapped = replace(batch, rows=(batch.rows[1], batch.rows[0]))
        as_int64 = replace(batch, columns=(Columns({"input_ids": "int64"}, batch.shards),))
        own = Puller(BulkClient(ZmqTransport(), "x"), local_store=owner.store)
        for puller_of in (puller, own):
            with pytest.raises(
                ProtocolError,
                match=r"life1\.1 on rollout/0, field 'input_ids': expected int32 rows of \[5, 3\] "
                r"values, got int32 rows of \[3, 5\]",
            ):
                await puller_of.pull(swapped)
            with pytest.raises(ProtocolError):
                await puller_of.pull(as_int64)


IDS = {"input_ids": "int32"}
GOOD = [["life1.1", IDS, [0], [3], 0, 12]]


@pytest.mark.parametrize(
    "body",
    [
        None,
        [["life1.1", IDS, [0], [3], 0, 13]],
        [["life1.1", IDS, [1], [3], 0, 3]],
        [["life1.1", IDS, [], [], 0, 3]],
        [["../../etc/passwd", {"x": "int32"}, [0], [3], 0, 3]],
        [["life0.1", IDS, [0], [3], 0, 12]],
    ],
    ids=repr,
)
async def test_an_owner_answers_what_no_correct_puller_asks_with_an_error(body: Any) -> None:
    async with owners(1) as [owner]:
        owner.put({"input_ids": ids_of(0, [3])}, [3])
        asking = BulkMember(owner.bulk.open_session("test"))
        assert isinstance(await asking.ask(body), PullFailure)
        assert await asking.ask(GOOD) == ids_of(0, [3]).numpy().tobytes()
        asking.close()


async def test_strangers_replays_and_captured_sessions_get_nothing() -> None:
    async with owners(1) as [owner]:
        owner.put({"input_ids": ids_of(0, [3])}, [3])
        content = ids_of(0, [3]).numpy().tobytes()
        captured: list[bytes] = []

        def changed(request: bytes, place: int) -> bytes:
            frame = bytearray(request)
            frame[place] ^= 7
            return bytes(frame)

        bystander = BulkMember(owner.bulk.open_session("bystander"))
        cases: list[Callable[[BulkMember], Any]] = [
            lambda member: member.send(captured[-1]),  # replayed
            lambda member: (member.request(GOOD), member.send(member.request(GOOD))),  # left out
            lambda member: member.send(changed(member.request(GOOD), 40)),
            lambda member: member.send(changed(member.request(GOOD), 9)),  # in the tag
            lambda member: member.send(changed(member.request(GOOD), 0) + bytes(9)),  # its length
            lambda member: member.send(changed(member.request(GOOD), 4)),  # another kind
            lambda member: (member.send(member.request(GOOD)[:30]), member.send(bytes(100))),
            lambda member: member.send(os.urandom(200)),
            # a request of another session is of no use on this connection
            lambda member: member.send(elsewhere.request(GOOD)),
            lambda member: member.send(HEAD.pack(0, 1, bytes(16))),
            # too large: refused before it is allocated
            lambda member: member.send(HEAD.pack(1 << 20, 1, bytes(16))),
        ]
        elsewhere = BulkMember(owner.bulk.open_session("elsewhere"))
        for number, misbehave in enumerate(cases):
            member = BulkMember(owner.bulk.open_session("test"))
            captured.append(member.request(GOOD))
            member.send(captured[-1])
            assert await asyncio.to_thread(member.receive) == content
            misbehave(member)
            await until(lambda member=member: member.is_lost)
            assert owner.bulk.refused.num == number + 1
            assert not member.has_reply
            member.close()
        assert await bystander.ask(GOOD) == content
        bystander.close()
        elsewhere.close()


def forge_answers(monkeypatch: pytest.MonkeyPatch, forge: Callable[[bytes], bytes]) -> None:
    """Changes every answer on its way."""
    reply = _PullingPeer._reply
    monkeypatch.setattr(_PullingPeer, "_reply", lambda *args: [forge(b"".join(reply(*args)))])


def flip(message: bytes, place: int = -1) -> bytes:
    flipped = bytearray(message)
    flipped[place] ^= 4
    return bytes(flipped)


def resized(message: bytes, change: int) -> bytes:
    """More or less content, and a length that fits."""
    num_bytes, kind, tag = HEAD.unpack_from(message)
    content = message[HEAD.size :] + bytes(max(change, 0))
    return HEAD.pack(num_bytes + change, kind, tag) + content[: num_bytes + change]


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["authenticated", "encrypted"])
@pytest.mark.parametrize(
    "forge",
    [
        flip,
        lambda message: flip(message, 10),
        lambda message: flip(message, 4),
        lambda message: resized(message, -400),
        lambda message: resized(message, 4),
        lambda message: resized(message, -1),
        lambda message: message * 2,
        lambda message: HEAD.pack(HEAD.size, 3, bytes(16)) + message[: HEAD.size],
    ],
    ids=["bit", "tag", "kind", "nothing", "more", "truncated", "replay", "forged failure"],
)
async def test_changed_answers_are_never_handed_out(
    forge: Any, is_encrypted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with owners(1, is_encrypted=is_encrypted) as [owner]:
        # two requests: the second answer may be that to the first once more
        batch = owner.put({"input_ids": ids_of(0, [200])}, [200])
        async with pulling(encrypt=is_encrypted, chunk_bytes=400, timeout_s=20) as puller:
            with monkeypatch.context() as patch:
                forge_answers(patch, forge)
                with pytest.raises(ProtocolError, match=r"life1\.1 on rollout/0: .*(tag|payload)"):
                    await puller.pull(batch)
            assert puller._bulk.refused.num == 1
            assert rows_of(await puller.pull(batch), "input_ids") == [token_values(0, 200)]


async def test_both_sides_have_to_agree_on_encryption() -> None:
    async with owners(1, is_encrypted=True) as [owner], pulling() as puller:
        batch = owner.put({"input_ids": ids_of(0, [3])}, [3])
        with pytest.raises(ProtocolError, match=r"transport\.encrypt is False here and True on"):
            await puller.pull(batch)


@pytest.mark.parametrize(
    "description", [[1], [["w", "float32"]], [["w", "float32", [-1]]], [["w", 1, [1]]]]
)
async def test_a_puller_refuses_descriptions_of_no_correct_owner(
    description: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BulkServer, "describe", lambda self, shard_id: description)
    async with owners(1) as [owner], pulling() as puller:
        with pytest.raises(
            ProtocolError, match=r"bulk\.describe: the reply is not of the declared"
        ):
            async for _ in puller.pull_weights(
                WeightsReference(0, (ShardReference(owner.node_id, owner.address, "life1.1"),))
            ):
                pass


async def test_concurrent_pulls_share_credits_and_requests() -> None:
    async with (
        owners(1) as [owner],
        pulling(chunk_bytes=4000, max_inflight_chunks=2) as puller,
    ):
        batch = await spread_batch([owner], [[1000, 1000]])
        waiting: list[int] = []
        serve = owner.bulk.answer

        def answer(body: Any) -> Any:
            [connection] = puller._bulk._connections.values()
            waiting.append(len(connection._unanswered))
            return serve(body)

        owner.bulk.answer = answer  # type: ignore[method-assign]
        pulls = await asyncio.gather(*(puller.pull(batch.select(["input_ids"])) for _ in range(5)))
        for pulled in pulls:
            assert rows_of(pulled, "input_ids") == [token_values(0, 1000), token_values(1, 1000)]
        assert max(waiting) == 2
        # forty pulls of one row each, of 4 bytes a token: ten fit into a request
        small = await spread_batch([owner], [[100] * 40])
        before = owner.bulk.num_reads
        pulls = await asyncio.gather(
            *(puller.pull(small.select(["input_ids"]).take([i])) for i in range(40))
        )
        assert [rows_of(p, "input_ids")[0] for p in pulls] == [
            token_values(i, 100) for i in range(40)
        ]
        assert owner.bulk.num_reads - before == 4


async def test_all_owners_together_send_no_more_than_was_asked_for() -> None:
    async with (
        owners(6) as made,
        pulling(chunk_bytes=4000, max_inflight_bytes=9000) as puller,
    ):
        batch = await spread_batch(made, [[1000] * 5] * 6)
        outstanding: list[int] = []
        for owner in made:

            def answer(body: Any, serve: Any = owner.bulk.answer) -> Any:
                outstanding.append(puller._bulk._credits.outstanding_bytes)
                return serve(body)

            owner.bulk.answer = answer  # type: ignore[method-assign]
        pulled = await puller.pull(batch.select(["input_ids"]))
        assert rows_of(pulled, "input_ids") == [token_values(row, 1000) for row in range(30)]
        assert max(outstanding) == 8000
        assert puller._bulk._credits.outstanding_bytes == 0


async def test_a_request_that_was_changed_on_its_way_costs_one_session() -> None:
    async with owners(1) as [owner], pulling() as puller:
        batch = owner.put({"input_ids": ids_of(0, [30])}, [30])
        for number in range(6):  # more than there are credits
            await puller.pull(batch)
            [connection] = puller._bulk._connections.values()
            stream = connection._stream
            assert stream is not None
            send = stream.send

            def changed(make: Any, send: Any = send) -> None:
                send(lambda: [flip(b"".join(make()), place=30)])

            stream.send = changed  # type: ignore[method-assign]
            assert rows_of(await puller.pull(batch), "input_ids") == [token_values(0, 30)]
            assert owner.bulk.refused.num == number + 1


@contextmanager
def unread(stream: MessageStream | None) -> Iterator[None]:
    """What arrives on this side of the connection is left to the kernel."""
    assert stream is not None
    loop = asyncio.get_running_loop()
    loop.remove_reader(stream._socket)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "_read", lambda: False)  # what goes on in later turns of the loop
        yield
    if not stream._is_closed:
        loop.add_reader(stream._socket, stream._on_readable)


async def test_a_deadline_that_passes_does_not_fail_the_pulls_of_others() -> None:
    async with owners(1) as [owner], pulling() as puller:
        batch = owner.put({"input_ids": ids_of(0, [30])}, [30])
        hasty = Puller(puller._bulk, timeout_s=0.2)
        await puller.pull(batch)
        [session] = owner.bulk._pullers
        with unread(session.stream):
            patient = asyncio.create_task(puller.pull(batch))
            with pytest.raises(RpcTimeout, match=r"life1\.1 on rollout/0: not pulled by"):
                await hasty.pull(batch)
        assert rows_of(await patient, "input_ids") == [token_values(0, 30)]
        assert owner.bulk._pullers == {session: None}


async def test_a_puller_that_paused_opens_its_session_again() -> None:
    values = torch.arange(LARGE)
    async with (
        owners(1, reply_timeout_s=0.2) as [owner],
        # more than fits between the two ends: the pause begins within a reply
        pulling(max_inflight_chunks=64, timeout_s=100) as puller,
    ):
        pull = asyncio.create_task(puller.pull(owner.put({"x": values}, [LARGE])))
        await until(lambda: owner.bulk.sent_bytes > values.nbytes / 4)
        [connection] = puller._bulk._connections.values()
        [paused] = owner.bulk._pullers
        with unread(connection._stream):
            await until(lambda: owner.bulk.num_dropped > 0)
        assert torch.equal((await pull).fields["x"], values)
        assert paused not in owner.bulk._pullers
        assert len(owner.bulk._pullers) == 1


@pytest.mark.parametrize("has_reset", [False, True], ids=["end", "reset"])
async def test_a_pull_outlives_its_connections(has_reset: bool) -> None:
    values = torch.arange(LARGE)
    async with owners(1) as [owner], pulling(timeout_s=100) as puller:
        pull = asyncio.create_task(puller.pull(owner.put({"x": values}, [LARGE])))
        for number in range(1, 4):
            share = values.nbytes * number / 8
            await until(lambda share=share: owner.bulk.sent_bytes > share)
            await until(lambda: len(owner.bulk._pullers) == 1)
            [session] = owner.bulk._pullers
            assert session.stream is not None
            if has_reset:
                hard = struct.pack("ii", 1, 0)
                session.stream._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, hard)
            owner.bulk.drop(session, "a test")
            assert not pull.done()
        assert torch.equal((await pull).fields["x"], values)


async def test_an_owner_is_asked_for_a_new_session_when_nothing_moves() -> None:
    async with (
        owners(1) as [owner],
        pulling(
            chunk_bytes=4096, max_inflight_chunks=2, stalled_peer_timeout_s=1.0, timeout_s=100
        ) as puller,
    ):
        batch = await spread_batch([owner], [[1_000_000]])
        pull = asyncio.create_task(puller.pull(batch))
        await until(lambda: owner.bulk.num_reads > 0)
        [connection] = puller._bulk._connections.values()
        stream = connection._stream
        assert stream is not None
        for _ in range(10):  # it is slow, but it moves
            before = stream.moved_bytes
            await until(lambda before=before: stream.moved_bytes > before)
        assert connection._stream is stream
        troubles, disconnect = list[str](), connection._disconnect

        def note_and_disconnect() -> None:
            troubles.append(connection.trouble)
            disconnect()

        connection._disconnect = note_and_disconnect  # type: ignore[method-assign]
        with unread(stream):
            await until(lambda: connection._stream is not stream)
        assert "it was silent" in troubles[0]
        assert rows_of(await pull, "input_ids") == [token_values(0, 1_000_000)]


@pytest.mark.parametrize("num_refused", [2, 10, 1_000_000])
async def test_an_owner_that_lives_but_lets_nobody_in_is_asked_again(
    num_refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_connection, "REOPEN_DELAY_S", 0.001)
    is_in_time = num_refused < 1_000_000
    async with owners(1) as [owner], pulling(timeout_s=20 if is_in_time else 0.5) as puller:
        batch = owner.put({"input_ids": ids_of(0, [30])}, [30])
        granted = owner.bulk.granted

        def refuse_some(session_id: bytes) -> Any:
            if owner.bulk.refused.num < num_refused:
                raise ProtocolError("a test")
            return granted(session_id)

        owner.bulk.granted = refuse_some  # type: ignore[method-assign]
        if is_in_time:
            assert rows_of(await puller.pull(batch), "input_ids") == [token_values(0, 30)]
            assert owner.bulk.refused.num == num_refused
        else:
            with pytest.raises(
                RpcTimeout,
                match=r"life1\.1 on rollout/0: not pulled by its deadline; its connection was lost",
            ):
                await puller.pull(batch)


async def test_a_client_that_closes_leaves_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async with owners(1) as [owner], pulling() as puller:
        batch = owner.put({"input_ids": ids_of(0, [30])}, [30])
        await puller.pull(batch)
        with monkeypatch.context() as patch:
            patch.setattr(_PullingPeer, "on_message", lambda *message: None)
            waiting = asyncio.create_task(puller.pull(batch))
            [connection] = puller._bulk._connections.values()
            await until(lambda: bool(connection._unanswered))
            [session] = owner.bulk._pullers
            owner.bulk.drop(session, "a test")  # the client would ask again
            await puller.close()
            with pytest.raises(ShardGone, match=r"life1\.1 on rollout/0 is gone"):
                await waiting
        with pytest.raises(ShardGone, match="this side is closed"):
            await puller.pull(batch)
        names = {task.get_name() for task in asyncio.all_tasks()}
        assert not any("session with" in name for name in names)
        await until(lambda: not owner.bulk._pullers)


@pytest.mark.parametrize("has_time", [False, True], ids=["at once", "later"])
async def test_a_connection_that_ended_in_silence_loses_no_shard(has_time: bool) -> None:
    async with owners(1) as [owner], pulling() as puller:
        batch = owner.put({"input_ids": ids_of(0, [30])}, [30])
        await puller.pull(batch)
        [connection] = puller._bulk._connections.values()
        connection._stream._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
        if has_time:
            await asyncio.sleep(0)
        assert rows_of(await puller.pull(batch), "input_ids") == [token_values(0, 30)]


async def test_a_failed_pull_leaves_no_buffer_to_the_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with owners(1) as [owner], pulling(timeout_s=0.3) as puller:
        batch = owner.put({"input_ids": ids_of(0, [90_000])}, [90_000])
        await Puller(puller._bulk).pull(batch)  # opens the session
        monkeypatch.setattr(_PullingPeer, "on_message", lambda *message: None)
        taken: list[weakref.ref[Any]] = []
        take = puller._pool.take_buffer

        def noted(num_bytes: int) -> Any:
            memory = take(num_bytes)
            taken.append(weakref.ref(memory))
            return memory

        puller._pool.take_buffer = noted  # type: ignore[method-assign]
        gc.disable()
        try:
            is_late = False
            try:
                await puller.pull(batch)
            except RpcTimeout:
                is_late = True
            assert is_late
            [session] = owner.bulk._pullers
            owner.bulk.drop(session, "a test")  # till then the answer may still come
            await until(lambda: taken[0]() is None)
            assert len(taken) == 1
        finally:
            gc.enable()


async def test_names_that_no_request_can_carry_are_refused() -> None:
    async with owners(1) as [owner], pulling(timeout_s=20) as puller:
        for name in ("x" * 257, "a\ud800"):
            with pytest.raises(MetadataError, match="name of a field"):
                owner.put({name: ids_of(0, [3])}, [3])
        good = owner.put({"input_ids": ids_of(0, [3])}, [3])
        bad = replace(good, columns=(Columns({"a\ud800": "int32"}, good.shards),))
        with pytest.raises(MetadataError, match="name of a field"):
            await puller.pull(bad)
        await puller.pull(good)


async def test_many_fields_of_many_rows_are_asked_for_in_turns() -> None:
    lengths = [1] * 5_000
    async with owners(1) as [owner], pulling() as puller:
        fields = {f"field{i}": ids_of(i, [5_000]) for i in range(12)}
        batch = owner.put(fields, lengths)
        order = list(range(4_999, -1, -1))
        pulled = await puller.pull(batch.take(order))
        for name, values in fields.items():
            assert torch.equal(pulled.fields[name], values.flip(0))
        asking = BulkMember(owner.bulk.open_session("test"))
        dtypes = dict.fromkeys(fields, "int32")
        rows = list(range(5_000))
        answer = await asking.ask([["life1.1", dtypes, rows, [1] * 5_000, 0, 240_000]])
        assert isinstance(answer, PullFailure)
        assert "of 16384 rows" in answer.message
        asking.close()


async def test_a_pull_that_fails_does_not_fail_its_neighbours() -> None:
    async with owners(1) as [owner], pulling() as puller:
        good = owner.put({"input_ids": ids_of(0, [30, 40])}, [30, 40])
        swept = owner.put({"input_ids": ids_of(0, [50])}, [50])
        wrong = replace(good, rows=good.rows[::-1])
        owner.store.remove(swept.shards[0].shard_id)
        results = await asyncio.gather(
            *(puller.pull(batch) for batch in (good, swept, good, wrong, good)),
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [
            PackedRows,
            ShardGone,
            PackedRows,
            ProtocolError,
            PackedRows,
        ]
        for result in results[::2]:
            assert rows_of(result, "input_ids") == [token_values(0, 30), token_values(1, 40)]


async def test_a_small_pull_does_not_wait_for_the_end_of_a_large_one() -> None:
    async with (
        owners(1) as [owner],
        pulling(chunk_bytes=4096, max_inflight_chunks=2) as puller,
    ):
        large = await spread_batch([owner], [[1_000_000]])
        small = await spread_batch([owner], [[10]])
        pulls = [asyncio.create_task(puller.pull(batch)) for batch in (large, small)]
        done, _ = await asyncio.wait(pulls, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        assert done == {pulls[1]}
        assert rows_of(await pulls[0], "input_ids") == [token_values(0, 1_000_000)]


async def test_a_cancelled_pull_leaves_nothing_running() -> None:
    async with owners(1) as [owner], pulling(chunk_bytes=100) as puller:
        batch = await spread_batch([owner], [[10_000]])
        pull = asyncio.create_task(puller.pull(batch))
        await until(lambda: owner.bulk.num_reads > 3)
        pull.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pull
        pulled = await puller.pull(batch)
        assert rows_of(pulled, "input_ids") == [token_values(0, 10_000)]


KINDS = {
    "routes": TensorMetadata((2, 3), "int8"),
    "style": TensorMetadata((3,), "float32", per_row=True),
    "found": TensorMetadata((None, 2), "int16", per_row=True, max_bytes=1 << 10),
    "picture": TensorMetadata((4,), "uint8", per_group=True),
    "page": TensorMetadata((None,), "int64", per_group=True, max_bytes=1 << 10),
}


def group_of_kinds(
    owner: Owner, number: int, rng: np.random.Generator
) -> tuple[BatchMetadata, Any]:
    """A group of some rows, in a shard of theirs and one of what they share; and its values."""
    lengths = rng.integers(0, 40, rng.integers(1, 5)).tolist()
    sizes = rng.integers(0, 9, len(lengths)).tolist()
    shared = {
        "picture": torch.from_numpy(rng.integers(0, 255, (1, 4), dtype=np.uint8)),
        "page": torch.from_numpy(rng.integers(0, 99, int(rng.integers(0, 30)))),
    }
    fields = {
        "input_ids": ids_of(100 * number, lengths),
        "routes": torch.from_numpy(rng.integers(-9, 9, (sum(lengths), 2, 3), dtype=np.int8)),
        "style": torch.from_numpy(rng.normal(size=(len(lengths), 3)).astype(np.float32)),
        "found": torch.from_numpy(rng.integers(-9, 9, (sum(sizes), 2), dtype=np.int16)),
    }
    places = {"input_ids": lengths, "routes": lengths, "style": [1] * len(lengths), "found": sizes}
    runs = (RowRun(0, 0, len(lengths)),)
    where = owner.node_id, owner.address
    own = ShardMetadata(*where, owner.store.put(fields, places), runs)
    shared_id = owner.store.put(shared, {name: [len(it)] for name, it in shared.items()})
    types = {name: it.type_name for name, it in KINDS.items()}
    columns = (
        Columns({"input_ids": "int32"} | dict(list(types.items())[:3]), (own,)),
        Columns(dict(list(types.items())[3:]), (ShardMetadata(*where, shared_id, runs),)),
    )
    rows = tuple(
        RowMetadata(number, 0, length, 1.0, 0, (), it) for it, length in enumerate(lengths)
    )
    split = {name: fields[name].split(places[name]) for name in fields}
    values = [
        {name: its[row] for name, its in split.items()} | shared for row in range(len(lengths))
    ]
    return BatchMetadata(f"g{number}", 0, columns, rows), values


async def test_any_mix_of_fields_of_tokens_rows_and_groups() -> None:
    """Some rows and some fields of them, in any order, from other owners and from its own.

    Most rows take several requests.
    """
    async with owners(3) as made, pulling(local_store=made[1].store, chunk_bytes=64) as puller:
        for seed in range(25):
            rng = np.random.default_rng(seed)
            groups = [group_of_kinds(made[it % 3], it, rng) for it in range(rng.integers(1, 6))]
            batch = concat([it for it, _ in groups], batch_id="all", global_step=1)
            values = [row for _, its in groups for row in its]
            order = rng.permutation(len(values))[: rng.integers(0, len(values) + 1)].tolist()
            names = [it for it in batch.fields if rng.random() < 0.7]
            asked = concat(batch.select(names).take(order).split(2), batch_id="b", global_step=1)
            pulled = puller.pulled_bytes + puller.local_bytes
            packed = await puller.pull(asked)
            pulled = puller.pulled_bytes + puller.local_bytes - pulled
            order = [order[row] for part in batch.take(order).partition(2) for row in part]
            assert {*packed.fields, *packed.row_fields} == ({*names} if order else {*asked.fields})
            again = packed.take(list(range(len(order)))[::-1])
            for name, its in packed.fields.items():
                expected = [values[row][name] for row in order]
                found = its.split(list(packed.lengths))
                assert all(map(torch.equal, found, expected)), name
            expected_bytes = sum(it.nbytes for it in packed.fields.values())
            for name, its in packed.row_fields.items():
                expected = [values[row][name] for row in order]
                if not KINDS[name].has_own_length:
                    expected = [it[0] for it in expected]
                assert its.values.dtype == getattr(torch, KINDS[name].dtype)
                assert all(map(torch.equal, its.of_rows, expected)), name
                assert all(map(torch.equal, again.row_fields[name].of_rows, expected[::-1])), name
                expected_bytes += its.values.nbytes
                if KINDS[name].per_group:  # once of each group
                    its_values = {batch.rows[row].group_id: values[row][name] for row in order}
                    assert its.values.nbytes == sum(it.nbytes for it in its_values.values())
            assert pulled == expected_bytes, "nothing else is asked for"


async def test_a_field_of_rows_that_an_owner_does_not_have_is_named() -> None:
    async with owners(1) as (owner,), pulling() as puller:
        batch, _ = group_of_kinds(owner, 0, np.random.default_rng(0))
        for name, of in (("gone", "row:int8[?]"), ("style", "row:float32[?x3]")):
            own, shared = batch.columns
            wrong = replace(batch, columns=(replace(own, dtypes={name: of}), shared))
            if name == "style":  # one value each is a length that it may have
                assert len((await puller.pull(wrong)).row_fields[name].spans) == len(batch.rows)
                continue
            with pytest.raises(ProtocolError, match=r"field 'gone': expected row .*, got 0 rows"):
                await puller.pull(wrong)
