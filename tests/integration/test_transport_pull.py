"""Lazy pull over real sockets; owners in this process, each with its own store and servers."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import struct
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import torch
from integration.bulk_member import BulkMember
from msgspec.structs import replace

from areal_sc.errors import MetadataError, ProtocolError, RpcTimeout, ShardGone
from areal_sc.metadata import (
    BatchMetadata,
    Columns,
    RowMetadata,
    Run,
    ShardMetadata,
    concat,
)
from areal_sc.transport.bulk import link as link_module
from areal_sc.transport.bulk.client import BulkClient
from areal_sc.transport.bulk.grant import BulkOptions
from areal_sc.transport.bulk.server import BulkServer, _Puller
from areal_sc.transport.bulk.stream import MessageStream, framed
from areal_sc.transport.bulk.wire import DescribedField
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.transport.pull import Puller
from areal_sc.transport.pull_plan import Owner as Address
from areal_sc.transport.rpc.server import RpcServer
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.transport.shards.store import TensorStore
from areal_sc.transport.tensor_bytes import DTYPE_NAMES, dtype_named
from areal_sc.weights import ShardReference, WeightsReference

LARGE = 8 << 20
"""Values of 8 bytes: 64 requests, of which several are under way."""

READ, DESCRIBE, FAILED = 0, 1, 2


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
            runs=(Run(0, 0, len(lengths)),),
        )
        dtypes = {n: str(values.dtype).removeprefix("torch.") for n, values in fields.items()}
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
    bulk = BulkClient(transport, BulkOptions("train/0", **options))
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


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["authenticated", "encrypted"])
@pytest.mark.parametrize("name", DTYPE_NAMES)
async def test_every_dtype_arrives_bit_by_bit(name: str, is_encrypted: bool) -> None:
    values = torch.arange(-50, 50).to(torch.float32).to(dtype_named(name))
    async with (
        owners(1, is_encrypted=is_encrypted) as [owner],
        pulling(chunk_bytes=64, is_encrypted=is_encrypted) as puller,
    ):
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
        assert made[0].bulk.num_reads == 0
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
        own = Puller(BulkClient(ZmqTransport(), BulkOptions("x")), local_store=made[0].store)
        one_rank = WeightsReference(5, reference.shards[:1])
        directly = {name: parts[0] async for name, parts in own.pull_weights(one_rank)}
        assert list(directly) == list(weights_of(5))
        assert own.local_bytes == 20_000 + 12_000 + 14


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
    async with owners(1) as [dead]:
        batch = dead.put({"input_ids": ids_of(0, [30, 4])}, [30, 4])
    successor = Owner(0, "life2")
    successor.store._shards["life1", 1] = dead.store._shards["life1", 1]
    await successor.start()
    own = successor.put({"input_ids": ids_of(2, [5])}, [5])
    adopted = with_shard(batch, node_addr=successor.address)
    async with pulling() as puller:
        pulled = await puller.pull(concat([adopted, own], batch_id="both", global_step=0))
        assert rows_of(pulled, "input_ids") == [
            token_values(i, n) for i, n in enumerate((30, 4, 5))
        ]
    await successor.close()


async def test_sizes_that_differ_from_the_metadata_are_refused() -> None:
    async with owners(1) as [owner], pulling(local_store=None) as puller:
        batch = owner.put({"input_ids": ids_of(0, [3, 5])}, [3, 5])
        swapped = replace(batch, rows=(batch.rows[1], batch.rows[0]))
        as_int64 = replace(batch, columns=(Columns({"input_ids": "int64"}, batch.shards),))
        own = Puller(BulkClient(ZmqTransport(), BulkOptions("x")), local_store=owner.store)
        for puller_of in (puller, own):
            with pytest.raises(
                ProtocolError,
                match=r"life1\.1 on rollout/0, field 'input_ids': expected int32 rows of \[5, 3\] "
                r"values, got int32 rows of \[3, 5\]",
            ):
                await puller_of.pull(swapped)
            with pytest.raises(ProtocolError):
                await puller_of.pull(as_int64)


GOOD = [READ, [["life1.1", ["input_ids"], 0, 12, 0, 0, [0]]]]


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        [READ],
        [7, []],
        [READ, [[1, 2]]],
        [READ, [["life1.1", ["input_ids"], 0, 13, 0, 0, [0]]]],
        [READ, [["life1.1", ["input_ids"], -1, 3, 0, 0, [0]]]],
        [READ, [["life1.1", ["input_ids"], 3, -1, 0, 0, [0]]]],
        [READ, [["life1.1", ["input_ids"], 0, 1 << 60, 0, 0, [0]]]],
        [READ, [["life1.1", ["input_ids"], 0, 3, 0, 1 << 60]]],
        [READ, [["life1.1", ["input_ids"], 0, 3, -1, 1]]],
        [READ, [["life1.1", ["input_ids"], 0, 3, 0, 0, [-1]]]],
        [READ, [["life1.1", ["input_ids"], 0, 3, 0, 0, [1]]]],
        [READ, [["life1.1", ["input_ids"], 0, 3, 0, 0, ["0"]]]],
        [READ, [["life1.1", ["labels"], 0, 3, 0, 0, [0]]]],
        [READ, [["../../etc/passwd", ["x"], 0, 3, 0, 0, [0]]]],
        [READ, [["life0.1", ["input_ids"], 0, 12, 0, 0, [0]]]],
        [DESCRIBE, "life1.2"],
        [DESCRIBE, 5],
    ],
    ids=repr,
)
async def test_an_owner_answers_what_no_correct_puller_asks_with_an_error(body: Any) -> None:
    async with owners(1) as [owner]:
        owner.put({"input_ids": ids_of(0, [3])}, [3])
        asking = BulkMember(owner.bulk.open_session("test"))
        answer, payload = await asking.ask(1, body)
        assert answer[0] == FAILED
        assert payload == b""
        answer, payload = await asking.ask(2, GOOD)
        assert (answer, payload) == ([0, [[["int32"], [3]]]], ids_of(0, [3]).numpy().tobytes())
        asking.close()


async def test_strangers_replays_and_captured_sessions_get_nothing() -> None:
    async with owners(1) as [owner]:
        owner.put({"input_ids": ids_of(0, [3])}, [3])

        def changed(request: bytes, place: int) -> bytes:
            frame = bytearray(request)
            frame[place] ^= 7
            return bytes(frame)

        bystander = BulkMember(owner.bulk.open_session("bystander"))
        cases: list[Callable[[BulkMember], None]] = [
            lambda member: member.send(member.sealed(5, GOOD)),  # replayed
            lambda member: member.send(member.sealed(4, GOOD)),
            lambda member: member.send(changed(member.sealed(6, GOOD), 40)),
            lambda member: member.send(changed(member.sealed(6, GOOD), 3)),  # another version
            lambda member: member.send(member.sealed(6, GOOD)[:30]),
            lambda member: member.send(member.sealed(6, GOOD) + b"more"),
            lambda member: member.send(member.sealed(6, GOOD), [b"more"]),
            lambda member: member.send(b""),
            lambda member: member.send(os.urandom(200)),
            # the session's number, even with its key, is of no use on another connection
            lambda member: member.send(bystander.sealed(6, GOOD)),
            lambda member: member.send(bytes(1 << 20)),  # too large: refused before it is allocated
        ]
        for number, misbehave in enumerate(cases):
            member = BulkMember(owner.bulk.open_session("test"))
            await member.ask(5, GOOD)
            misbehave(member)
            await until(lambda member=member: member.is_lost)
            assert owner.bulk.num_refused == number + 1
            assert not member.has_reply
            member.close()
        assert (await bystander.ask(6, GOOD))[0][0] == READ
        bystander.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - counters have no event
            await asyncio.sleep(0.001)


def forge_answers(monkeypatch: pytest.MonkeyPatch, forge: Callable[[list[bytes]], Any]) -> None:
    """Changes header and payload of every answer on their way."""
    sealed = _Puller._sealed

    def forged(*args: Any) -> list[bytes]:
        frame, *payload = sealed(*args)
        header, *parts = forge([bytes(frame[8:]), b"".join(payload)])
        return framed(header, parts)

    monkeypatch.setattr(_Puller, "_sealed", forged)


def flip(frame: Any, place: int | None = None) -> bytes:
    flipped = bytearray(frame)
    flipped[len(flipped) // 2 if place is None else place] ^= 4
    return bytes(flipped)


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["authenticated", "encrypted"])
@pytest.mark.parametrize(
    "forge",
    [
        lambda frames: [frames[0], flip(frames[1])],
        lambda frames: [flip(frames[0]), frames[1]],
        lambda frames: [flip(frames[0], place=24), frames[1]],
        lambda frames: frames[:1],
        lambda frames: [*frames, b"more"],
        lambda frames: [frames[0], frames[1][:-1]],
    ],
    ids=[
        "payload bit",
        "header bit",
        "answers nothing",
        "no payload",
        "more payload",
        "truncated payload",
    ],
)
async def test_changed_chunks_are_never_handed_out(
    forge: Any, is_encrypted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with owners(1, is_encrypted=is_encrypted) as [owner]:
        batch = owner.put({"input_ids": ids_of(0, [100])}, [100])
        async with pulling(is_encrypted=is_encrypted, timeout_s=20) as puller:
            with monkeypatch.context() as patch:
                forge_answers(patch, forge)
                with pytest.raises(ProtocolError, match=r"tag|bytes of payload|answers nothing"):
                    await puller.pull(batch)
            assert puller._bulk.num_refused == 1
            assert rows_of(await puller.pull(batch), "input_ids") == [token_values(0, 100)]


async def test_both_sides_have_to_agree_on_encryption() -> None:
    async with owners(1, is_encrypted=True) as [owner], pulling() as puller:
        batch = owner.put({"input_ids": ids_of(0, [3])}, [3])
        with pytest.raises(ProtocolError, match=r"transport\.encrypt is False here and True on"):
            await puller.pull(batch)


@pytest.mark.parametrize(
    "description", [[1], [["w", "float32"]], [["w", "float32", [-1]]], [["w", 1, [1]]]]
)
async def test_a_puller_refuses_descriptions_of_no_correct_owner(description: Any) -> None:
    async with owners(1) as [owner], pulling() as puller:
        owner.bulk._reader._describe = lambda shard_id: [DESCRIBE, description]  # type: ignore[assignment, method-assign, return-value]
        with pytest.raises(ProtocolError, match=r"shard life1\.1 on rollout/0: not a message"):
            async for _ in puller.pull_weights(
                WeightsReference(0, (ShardReference(owner.node_id, owner.address, "life1.1"),))
            ):
                pass


async def test_a_silent_owner_ends_the_pull_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with owners(1) as [owner], pulling(timeout_s=0.3) as puller:
        batch = owner.put({"input_ids": ids_of(0, [3])}, [3])
        monkeypatch.setattr(_Puller, "on_message", lambda self: None)
        with pytest.raises(RpcTimeout, match=r"life1\.1 on rollout/0: not pulled by its deadline"):
            await puller.pull(batch)


async def test_concurrent_pulls_share_credits_and_requests() -> None:
    async with (
        owners(1) as [owner],
        pulling(chunk_bytes=4000, max_inflight_chunks=2) as puller,
    ):
        batch = await spread_batch([owner], [[1000, 1000]])
        waiting: list[int] = []
        serve = owner.bulk.answer

        def answer(body: Any) -> Any:
            waiting.append(
                len(puller._bulk._links[next(iter(puller._bulk._links))]._session.inflight)
            )
            return serve(body)

        owner.bulk.answer = answer  # type: ignore[method-assign]
        pulls = await asyncio.gather(*(puller.pull(batch, ["input_ids"]) for _ in range(5)))
        for pulled in pulls:
            assert rows_of(pulled, "input_ids") == [token_values(0, 1000), token_values(1, 1000)]
        assert max(waiting) == 2
        # forty pulls of one row each, of 4 bytes a token: ten fit into a request
        small = await spread_batch([owner], [[100] * 40])
        before = owner.bulk.num_reads
        pulls = await asyncio.gather(*(puller.pull(small, ["input_ids"], [i]) for i in range(40)))
        assert [rows_of(p, "input_ids")[0] for p in pulls] == [
            token_values(i, 100) for i in range(40)
        ]
        assert owner.bulk.num_reads - before == 4


async def test_a_pull_tells_where_its_time_went() -> None:
    async with owners(1) as [owner], pulling() as puller:
        batch = await spread_batch([owner], [[1_000_000]])
        begun_s = time.perf_counter()
        await puller.pull(batch)
        passed_s = time.perf_counter() - begun_s
        seconds = puller._bulk.seconds
        phases = seconds.connecting, seconds.queueing, seconds.wire, seconds.copying
        assert all(phase >= 0 for phase in phases)
        assert min(seconds.connecting, seconds.wire, seconds.copying) > 0
        assert sum(phases) <= passed_s
        connected_s = seconds.connecting
        await puller.pull(batch)
        assert puller._bulk.seconds.connecting == connected_s  # the connection was there


async def test_a_session_that_its_owner_gave_up_is_renewed() -> None:
    async with owners(1) as [owner], pulling() as puller:
        batch = owner.put({"input_ids": ids_of(0, [30])}, [30])
        for _ in range(3):
            assert rows_of(await puller.pull(batch), "input_ids") == [token_values(0, 30)]
            [session] = owner.bulk._pullers
            owner.bulk.drop(session, "a test")
        assert owner.bulk.num_dropped == 3
        assert owner.bulk.num_reads == 3


async def test_a_request_that_was_changed_on_its_way_costs_one_session() -> None:
    async with owners(1) as [owner], pulling() as puller:
        batch = owner.put({"input_ids": ids_of(0, [30])}, [30])
        for number in range(6):  # more than there are credits
            await puller.pull(batch)
            [link] = puller._bulk._links.values()
            stream = link._session.stream  # type: ignore[union-attr]
            assert stream is not None
            send = stream.send

            def changed(make: Any, send: Any = send) -> None:
                send(lambda: [flip(b"".join(make()), place=60)])

            stream.send = changed  # type: ignore[method-assign]
            assert rows_of(await puller.pull(batch), "input_ids") == [token_values(0, 30)]
            assert owner.bulk.num_refused == number + 1


@contextmanager
def unread(stream: MessageStream | None) -> Iterator[None]:
    """What arrives on this side of the connection is left to the kernel."""
    assert stream is not None
    loop = asyncio.get_running_loop()
    loop.remove_reader(stream._socket)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "_read", lambda: False)  # what goes on in later turns of the loop
        yield
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
        await until(lambda: puller._bulk.received_bytes > values.nbytes / 4)
        [link] = puller._bulk._links.values()
        [paused] = owner.bulk._pullers
        with unread(link._session and link._session.stream):
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
            await until(lambda share=share: puller._bulk.received_bytes > share)
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
            chunk_bytes=4096, max_inflight_chunks=2, stalled_timeout_s=1e6, timeout_s=100
        ) as puller,
    ):
        batch = await spread_batch([owner], [[1_000_000]])
        pull = asyncio.create_task(puller.pull(batch))
        await until(lambda: owner.bulk.num_reads > 0)
        [link] = puller._bulk._links.values()
        session = link._session
        assert session is not None
        stream = session.stream
        for _ in range(10):  # it is slow, but it moves
            before = stream.received_bytes
            await until(lambda before=before: stream.received_bytes > before)
            link._look()
            link._look()
            assert link._session is session
        link._look()
        assert link._session is None
        assert rows_of(await pull, "input_ids") == [token_values(0, 1_000_000)]


@pytest.mark.parametrize("num_refused", [2, 10, 1_000_000])
async def test_an_owner_that_lives_but_lets_nobody_in_is_asked_again(
    num_refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "REOPEN_DELAY_S", 0.001)
    is_in_time = num_refused < 1_000_000
    async with owners(1) as [owner], pulling(timeout_s=20 if is_in_time else 0.5) as puller:
        batch = owner.put({"input_ids": ids_of(0, [30])}, [30])
        granted = owner.bulk.granted

        def refuse_some(session_id: bytes) -> Any:
            if owner.bulk.num_refused < num_refused:
                raise ProtocolError("a test")
            return granted(session_id)

        owner.bulk.granted = refuse_some  # type: ignore[method-assign]
        if is_in_time:
            assert rows_of(await puller.pull(batch), "input_ids") == [token_values(0, 30)]
            assert owner.bulk.num_refused == num_refused
        else:
            with pytest.raises(
                RpcTimeout,
                match=r"life1\.1 on rollout/0: not pulled by its deadline; its connection was lost",
            ):
                await puller.pull(batch)


async def test_many_shards_are_described_at_a_time() -> None:
    async with owners(1) as [owner], pulling() as puller:
        shard_ids = [owner.store.put({"w": ids_of(i, [3])}, [3]) for i in range(200)]
        its = Address(owner.node_id, owner.address, owner.store.incarnation)
        deadline = asyncio.get_running_loop().time() + 60
        described = await asyncio.gather(
            *(puller._bulk.describe(its, shard_id, deadline) for shard_id in shard_ids)
        )
        assert described == [[DescribedField("w", "int32", [3])]] * 200
        assert owner.bulk.num_refused == 0


async def test_a_client_that_closes_leaves_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async with owners(1) as [owner], pulling() as puller:
        batch = owner.put({"input_ids": ids_of(0, [30])}, [30])
        await puller.pull(batch)
        with monkeypatch.context() as patch:
            patch.setattr(_Puller, "on_message", lambda self: None)
            waiting = asyncio.create_task(puller.pull(batch))
            await until(
                lambda: any(
                    link._session and link._session.inflight
                    for link in puller._bulk._links.values()
                )
            )
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
        [link] = puller._bulk._links.values()
        link._session.stream._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
        if has_time:
            await asyncio.sleep(0)
        assert rows_of(await puller.pull(batch), "input_ids") == [token_values(0, 30)]


async def test_a_failed_pull_leaves_no_buffer_to_the_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with owners(1) as [owner], pulling(timeout_s=0.3) as puller:
        batch = owner.put({"input_ids": ids_of(0, [90_000])}, [90_000])
        await Puller(puller._bulk).pull(batch)  # opens the session
        monkeypatch.setattr(_Puller, "on_message", lambda self: None)
        taken: list[weakref.ref[Any]] = []
        take = puller._pool.take

        def noted(num_bytes: int) -> Any:
            memory = take(num_bytes)
            taken.append(weakref.ref(memory))
            return memory

        puller._pool.take = noted  # type: ignore[method-assign]
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
        pulled = await puller.pull(batch, rows=order)
        for name, values in fields.items():
            assert torch.equal(pulled.fields[name], values.flip(0))
        asking = BulkMember(owner.bulk.open_session("test"))
        answer, _ = await asking.ask(
            1, [READ, [["life1.1", list(fields), 0, 240_000, 0, 0, list(range(5_000))]]]
        )
        assert answer[0] == FAILED
        assert "at most 16384 rows" in answer[3]
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
