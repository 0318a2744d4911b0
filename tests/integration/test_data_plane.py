"""The data plane of workers on one node: what is mapped, what is copied, what travels."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from areal_sc.config.schema import TransportConfig
from areal_sc.errors import ShardGone, StoreFull
from areal_sc.metadata import (
    BatchMetadata,
    Columns,
    RowMetadata,
    RowRun,
    ShardMetadata,
    concat,
)
from areal_sc.transport.bulk.puller import MAX_QUICK_SLICES
from areal_sc.transport.plane import DataPlane
from areal_sc.transport.rpc.server import RpcServer
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.transport.shards.layout import ShardLayout
from areal_sc.transport.shards.memory_folder import ArenaFolder
from areal_sc.weights.adopter import HeldWeights
from areal_sc.weights.changes import seal_changes
from areal_sc.weights.methods import CopyWeights
from areal_sc.weights.published import ShardReference, WeightChanges, WeightsReference

STORE_BYTES = 64 << 20


class Worker:
    """A worker's control socket and data plane."""

    def __init__(self, plane: DataPlane, server: RpcServer, address: str) -> None:
        self.plane = plane
        self.server = server
        self.address = address

    def put(self, lengths: Sequence[int], first: int = 0) -> BatchMetadata:
        """A shard in which each token tells its place, counted from `first`."""
        total = sum(lengths)
        ids = torch.arange(first, first + total, dtype=torch.int32)
        fields = {"input_ids": ids, "behavior_logprobs": ids.to(torch.float32) / 7}
        shard = ShardMetadata(
            self.plane.store.node_id,
            self.address,
            self.plane.store.put(fields, lengths),
            (RowRun(0, 0, len(lengths)),),
        )
        columns = Columns({"input_ids": "int32", "behavior_logprobs": "float32"}, (shard,))
        rows = tuple(RowMetadata(0, 0, n, 0.0, 0, (), 0) for n in lengths)
        return BatchMetadata(shard.shard_id, 0, (columns,), rows)


def life_of(name: str) -> str:
    return "life-of-" + name.replace("/", "-")


@asynccontextmanager
async def workers(folder: ArenaFolder | None, *names: str) -> AsyncIterator[list[Worker]]:
    async with AsyncExitStack() as stack:
        made = []
        for name in names:
            transport = ZmqTransport()
            stack.push_async_callback(transport.close)
            plane = DataPlane(
                name,
                life_of(name),
                TransportConfig(chunk_bytes=4096, pull_timeout_s=20),
                store_bytes=STORE_BYTES,
                transport=transport,
                arenas=folder,
            )
            stack.push_async_callback(plane.close)
            server = RpcServer(await plane.start(), node_id=name, incarnation=life_of(name))
            address = await server.start()
            stack.push_async_callback(server.close)
            made.append(Worker(plane, server, address))
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[ArenaFolder]:
    folder = ArenaFolder(tmp_path, "run")
    yield folder
    folder.remove()


async def test_rows_that_lie_together_are_views(folder: ArenaFolder) -> None:
    async with workers(folder, "rollout/0", "train/0") as (owner, puller):
        batch = owner.put([100, 20, 7, 300])
        whole = await puller.plane.puller.pull(batch)
        part = await puller.plane.puller.pull(batch.select(["input_ids"]).take([1, 2]))
        assert whole.fields["input_ids"].tolist() == list(range(427))
        assert part.fields["input_ids"].tolist() == list(range(100, 127))
        # the same memory, twice: nothing was copied, and no socket was used
        start = whole.fields["input_ids"].data_ptr()
        assert part.fields["input_ids"].data_ptr() == start + 400
        assert puller.plane.puller.mapped_bytes == 427 * 8 + 27 * 4
        assert puller.plane.stats().pulled_bytes == owner.plane.stats().bulk_requests == 0


async def test_rows_that_lie_apart_are_copied_together(folder: ArenaFolder) -> None:
    async with workers(folder, "rollout/0", "rollout/1", "train/0") as (first, second, puller):
        batch = concat(
            [first.put([5, 6]), second.put([7, 0, 8], first=1000), first.put([9], first=2000)],
            batch_id="all",
            global_step=0,
        )
        expected = [*range(11), *range(1000, 1015), *range(2000, 2009)]
        pulled = await puller.plane.puller.pull(batch)
        assert pulled.fields["input_ids"].tolist() == expected
        turned = await puller.plane.puller.pull(batch.select(["input_ids"]).take([5, 2, 0]))
        assert turned.fields["input_ids"].tolist() == [
            *range(2000, 2009),
            *range(1000, 1007),
            *range(5),
        ]
        turned.fields["input_ids"] += 1  # a copy is the puller's own
        assert puller.plane.stats().pulled_bytes == 0
        # a worker's own rows come from its own store
        mixed = await second.plane.puller.pull(batch)
        assert mixed.fields["input_ids"].tolist() == expected
        assert second.plane.puller.local_bytes == 15 * 8


async def test_many_small_shards_leave_the_loop_its_turns(folder: ArenaFolder) -> None:
    num_shards = 3 * MAX_QUICK_SLICES
    async with workers(folder, "rollout/0", "train/0") as (owner, puller):
        shards = [owner.put([1], first=number) for number in range(num_shards)]
        batch = concat(shards, batch_id="all", global_step=0)
        in_turns: list[str] = []
        opened = puller.plane.puller._open_mapped

        def noted(*args: Any) -> Any:
            in_turns.append(threading.current_thread().name)
            return opened(*args)

        puller.plane.puller._open_mapped = noted  # type: ignore[method-assign]
        pulled = await puller.plane.puller.pull(batch)
        assert pulled.fields["input_ids"].tolist() == list(range(num_shards))
        assert len(in_turns) == num_shards
        assert threading.main_thread().name not in in_turns


async def test_a_view_outlives_the_sweep_of_its_shard(folder: ArenaFolder) -> None:
    async with workers(folder, "rollout/0", "train/0") as (owner, puller):
        size = STORE_BYTES // 32
        batch = owner.put([size])
        view = (await puller.plane.puller.pull(batch.select(["input_ids"]))).fields["input_ids"]
        owner.plane.store.sweep([], owner.plane.store.last_sequence)
        with pytest.raises(ShardGone, match=r"life-of-rollout-0\.1 on rollout/0"):
            await puller.plane.puller.pull(batch)
        # memory that is read is not written: the store is full before it touches the view
        while owner.plane.store.num_bytes + 2 * size * 8 <= STORE_BYTES:
            owner.put([size], first=7)
        with pytest.raises(StoreFull):
            owner.put([2 * size], first=7)
        assert torch.equal(view, torch.arange(size, dtype=torch.int32))
        del view
        gc.collect()
        owner.plane.store.sweep([], owner.plane.store.last_sequence)
        for _ in range(20):  # all of it is used again
            owner.put([size], first=7)
            owner.plane.store.sweep([], owner.plane.store.last_sequence)
        assert owner.plane.store.num_bytes == 0


async def test_weights_are_views_of_the_ranks_memory(folder: ArenaFolder) -> None:
    async with workers(folder, "train/0", "train/1", "rollout/0") as (*ranks, puller):
        shards = []
        for number, rank in enumerate(ranks):
            parts = {"a": torch.full((50_000,), float(number)), "b": torch.zeros(0)}
            shard_id = rank.plane.store.put(parts, {n: [p.numel()] for n, p in parts.items()})
            shards.append(ShardReference(rank.plane.store.node_id, rank.address, shard_id))
        weights = WeightsReference(3, tuple(shards))
        pulled = {name: parts async for name, parts in puller.plane.puller.pull_weights(weights)}
        assert [part.unique().tolist() for part in pulled["a"]] == [[0.0], [1.0]]
        assert [part.numel() for part in pulled["b"]] == [0, 0]
        assert puller.plane.stats().pulled_bytes == 0
        assert puller.plane.stats().mapped_bytes == 2 * 50_000 * 4


async def test_an_owner_elsewhere_is_reached_over_its_socket(
    folder: ArenaFolder, tmp_path: Path
) -> None:
    other_node = ArenaFolder(tmp_path / "other", "run")
    async with workers(other_node, "rollout/0") as (owner,), workers(folder, "train/0") as made:
        # the same run on another node: its arena is not here
        batch = owner.put([100])
        (puller,) = made
        pulled = await puller.plane.puller.pull(batch)
        assert pulled.fields["input_ids"].tolist() == list(range(100))
        assert puller.plane.stats().pulled_bytes == 800
    other_node.remove()


async def test_an_owner_that_ended_leaves_a_typed_error(folder: ArenaFolder) -> None:
    async with workers(folder, "train/0") as (puller,):
        async with workers(folder, "rollout/0", "rollout/1") as (_, owner):
            batch = owner.put([100])
            view = await puller.plane.puller.pull(batch)
        async with asyncio.timeout(20):
            with pytest.raises(ShardGone, match=r"life-of-rollout-1\.1 on rollout/1"):
                await puller.plane.puller.pull(batch)
        assert view.fields["input_ids"].tolist() == list(range(100))


@asynccontextmanager
async def nodes(root: Path, *counts: int) -> AsyncIterator[list[list[Worker]]]:
    """Nodes with so many workers; none sees another one's shared memory."""
    async with AsyncExitStack() as stack:
        made = []
        for node, count in enumerate(counts):
            folder = ArenaFolder(root / f"node-{node}", "run")
            stack.callback(folder.remove)
            names = [f"rollout/{node}{number}" for number in range(count)]
            made.append(await stack.enter_async_context(workers(folder, *names)))
        yield made


def sealed_weights(ranks: Sequence[Worker], version: int) -> WeightsReference:
    """Each rank holds a part of `a`, and the last one `b`."""
    shards = []
    for number, rank in enumerate(ranks):
        parts = {"a": torch.full((50_000 + number,), float(10 * version + number))}
        if rank is ranks[-1]:
            parts["b"] = torch.arange(7, dtype=torch.int16)
            parts["empty"] = torch.zeros(0)
        shard_id = rank.plane.store.put(parts, {n: [p.numel()] for n, p in parts.items()})
        shards.append(ShardReference(rank.plane.store.node_id, rank.address, shard_id))
    return WeightsReference(version, tuple(shards))


def check_weights(read: list[tuple[str, torch.Tensor]], version: int) -> None:
    values = dict(read)
    assert list(values) == ["a", "b", "empty"]
    halves = values["a"].split([50_000, 50_001])
    assert [half.unique().tolist() for half in halves] == [[10.0 * version], [10.0 * version + 1]]
    assert values["b"].tolist() == list(range(7))
    assert values["empty"].numel() == 0


def copy_of(
    weights: WeightsReference, keeper: Worker, shard_ids: Sequence[str]
) -> WeightsReference:
    (shard_id,) = shard_ids
    shard = ShardReference(keeper.plane.store.node_id, keeper.address, shard_id)
    return replace(weights, shards=(shard,))


async def test_a_copy_of_weights_serves_its_node_and_the_next_one(tmp_path: Path) -> None:
    async with nodes(tmp_path, 2, 2, 1) as (ranks, (keeper, mate), (last,)):
        held = {worker: HeldWeights(worker.plane) for worker in (keeper, mate, last)}
        weights, store = sealed_weights(ranks, 1), keeper.plane.store
        copy = copy_of(weights, keeper, await held[keeper].copy(CopyWeights(weights, 0)))
        second = copy_of(weights, last, await held[last].copy(CopyWeights(copy, 0)))
        sent = [rank.plane.stats().served_bytes for rank in ranks]
        for worker, reference in ((keeper, copy), (mate, copy), (last, second)):
            check_weights(await held[worker].read(reference), 1)
        assert [rank.plane.stats().served_bytes for rank in ranks] == sent, "one pull in all"
        assert 400_000 < sum(sent) < 410_000
        assert mate.plane.stats().pulled_bytes == 0
        # a copy takes nothing of the room for rows, and outlives marks, which know rows alone
        assert store.num_bytes == 0
        keeper.put([5])
        store.sweep([], store.last_sequence)
        assert store.num_bytes == 0
        view = dict(await held[mate].read(copy))["a"]
        # one copy at a time
        newer = sealed_weights(ranks, 2)
        newest = copy_of(newer, keeper, await held[keeper].copy(CopyWeights(newer, 0)))
        with pytest.raises(ShardGone):
            await held[last].read(copy)
        check_weights(await held[keeper].read(newest), 2)
        assert view.unique().tolist() == [10.0, 11.0]
        held[keeper].keep_only(newest)
        assert store.num_shards == 1
        held[keeper].keep_only(weights)
        assert store.num_shards == 0


async def test_a_copy_that_fails_gives_its_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = os.statvfs(tmp_path)
    whole_folder = room.f_blocks * room.f_frsize
    async with nodes(tmp_path, 2, 1) as (ranks, (keeper,)):
        weights, store, held = (
            sealed_weights(ranks, 1),
            keeper.plane.store,
            HeldWeights(keeper.plane),
        )
        with pytest.raises(StoreFull, match="to be left to others"):
            await held.copy(CopyWeights(weights, whole_folder))
        await held.copy(CopyWeights(weights, 0))
        begin = store.begin

        def begin_late(*args: Any, **options: Any) -> Any:
            ranks[1].plane.store.remove(weights.shards[1].shard_id)
            return begin(*args, **options)

        monkeypatch.setattr(store, "begin", begin_late)
        with pytest.raises(ShardGone):
            await held.copy(CopyWeights(weights, whole_folder))
        assert store.num_shards == store.num_bytes == 0
        gc.collect()  # what the traceback has kept
        newer = sealed_weights(ranks, 2)
        shard_ids = await held.copy(CopyWeights(newer, whole_folder))  # in the same memory
        check_weights(await held.read(copy_of(newer, keeper, shard_ids)), 2)


@pytest.mark.parametrize("num_there", [0, 1], ids=["of the changes", "of the changed copy"])
async def test_who_has_no_room_for_changes_pulls_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_there: int
) -> None:
    async with nodes(tmp_path, 1, 1) as ((rank,), (keeper,)):
        its, held = rank.plane.store, HeldWeights(keeper.plane)
        values = torch.arange(50_000, dtype=torch.int16)
        old = its.put({"a": values}, [50_000])
        new = its.put({"a": values.index_fill(0, torch.tensor([7]), -1)}, [50_000])
        old_at, new_at, changes_at = (
            ShardReference(its.node_id, rank.address, shard_id)
            for shard_id in (old, new, seal_changes(its, old, new, 1))
        )
        ids = await held.copy(CopyWeights(WeightsReference(1, (old_at,)), 0))
        base = ShardReference(keeper.plane.store.node_id, keeper.address, ids[0])
        store = keeper.plane.store
        begin, tried = store.begin, list[ShardLayout]()

        def begin_or_not(layout: ShardLayout, **options: Any) -> Any:
            tried.append(layout)
            if len(tried) == num_there + 1:
                raise StoreFull("no room")
            return begin(layout, **options)

        monkeypatch.setattr(store, "begin", begin_or_not)
        changes = WeightChanges((0, 1), (changes_at,), 1)
        newer = WeightsReference(2, (new_at,), changes=changes)
        ids = await held.copy(CopyWeights(newer, 0, base))
        assert len(ids) == 1 + num_there, "what there is of the changes is handed on"
        assert held.counters == {"whole_copies": 2, "changed_copies": 0, "unfit_changes": num_there}
        assert store.num_shards == len(ids)
        assert dict(await held.read(copy_of(newer, keeper, ids[:1])))["a"][7] == -1
