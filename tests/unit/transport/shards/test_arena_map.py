"""The reader's side, in one process: to the kernel its locks are another's than the writer's."""

from __future__ import annotations

import gc
import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import Clock

from areal_sc.errors import MetadataError, ProtocolError, ShardGone, TransportError
from areal_sc.transport.shards.arena_map import LOOK_AGAIN_S, ArenaMap, MappedShard
from areal_sc.transport.shards.blocks import ArenaBackend
from areal_sc.transport.shards.memory_folder import ArenaFolder
from areal_sc.transport.shards.store import TensorStore

PAGE = 4096


@dataclass
class Node:
    """A writer and a reader."""

    folder: ArenaFolder
    store: TensorStore
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.arenas = ArenaMap(self.folder, clock=self.clock)

    def put(self, value: int, num_pages: int = 1) -> str:
        size = num_pages * PAGE
        return self.store.put({"x": torch.full((size,), value, dtype=torch.uint8)}, [size])

    def sweep_all(self) -> int:
        return self.store.sweep([], self.store.last_sequence)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    folder = ArenaFolder(tmp_path, "run")
    yield Node(folder, store_in(folder, "life1"))
    folder.remove()


def store_in(folder: ArenaFolder, incarnation: str) -> TensorStore:
    backend = ArenaBackend(folder, "train/0", incarnation)
    return TensorStore("train/0", incarnation, max_bytes=1 << 30, backend=backend)


def test_tensors_are_views_of_the_writers_memory(node: Node) -> None:
    values = torch.arange(-3, 4)
    fields = {
        str(dtype): values.to(dtype)
        for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.float8_e4m3fn)
    }
    shard = node.arenas.open_shard(
        node.store.put({**fields, "empty": torch.zeros(0)}, {name: [2, 0, 5] for name in fields})
    )
    for name, expected in fields.items():
        tensor = shard.tensor(name)
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))
        assert tensor.data_ptr() == shard.tensor(name).data_ptr()
        assert shard.fields[name].row_lengths == (2, 0, 5)
        assert shard.fields[name].values.readonly
    assert bytes(shard.fields["torch.int64"].slices([2])[0]) == values[2:].numpy().tobytes()
    assert (shard.tensor("empty").numel(), shard.tensor("empty").dtype) == (0, torch.float32)


def first_byte(view: object) -> int:
    if isinstance(view, MappedShard):
        return int(view.tensor("x")[0])
    return int(view.flatten()[0] if isinstance(view, torch.Tensor) else view[0])


@pytest.mark.parametrize(
    "view_of",
    [
        lambda shard: shard,
        lambda shard: shard.tensor("x"),
        lambda shard: shard.tensor("x")[8:24].view(torch.int32).reshape(2, 2)[1:],
        lambda shard: shard.tensor("x").numpy()[5:6],
        lambda shard: shard.fields["x"].values[3:4],
        lambda shard: memoryview(shard.tensor("x").numpy()).cast("I"),
    ],
    ids=["shard", "tensor", "part", "array", "bytes", "cast bytes"],
)
def test_a_block_is_kept_until_the_last_view_of_it_is_gone(
    node: Node, view_of: Callable[[MappedShard], object]
) -> None:
    view = view_of(node.arenas.open_shard(node.put(7, num_pages=4)))
    for value in range(8, 12):
        node.sweep_all()
        assert (node.store.num_bytes, node.store.mapped_retired_bytes) == (4 * PAGE, 4 * PAGE)
        node.put(value, num_pages=4)
        assert first_byte(view) & 0xFF == 7
    del view
    node.sweep_all()
    assert (node.store.num_bytes, node.store.mapped_retired_bytes) == (0, 0)


def test_a_swept_shard_is_gone_also_for_those_who_knew_it(node: Node) -> None:
    shard = node.put(1)
    assert node.arenas.open_shard(shard).tensor("x")[0] == 1
    held = node.arenas.open_shard(shard)
    node.sweep_all()
    for _ in range(2):  # remembered, and not remembered any more
        with pytest.raises(ShardGone, match=rf"{shard} is gone"):
            node.arenas.open_shard(shard)
    assert held.tensor("x")[0] == 1


@pytest.mark.parametrize("is_known", [False, True], ids=["first time", "held"])
def test_a_sweep_just_before_the_ticket_is_read_is_noticed(
    node: Node, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    shard = node.put(1, num_pages=4)
    held = [node.arenas.open_shard(shard)] if is_known else []
    read_link = os.readlink

    def sweep_first(path: str) -> str:
        node.sweep_all()
        node.put(2, num_pages=4)
        return read_link(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "readlink", sweep_first)
        with pytest.raises(ShardGone):
            node.arenas.open_shard(shard)
    assert all(view.tensor("x")[0] == 1 for view in held)
    held.clear()
    node.sweep_all()
    assert node.store.num_bytes == 0  # no lock is left


def test_a_sweep_after_the_ticket_was_read_keeps_the_block(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = node.put(1, num_pages=4)
    read_link = os.readlink

    def sweep_then(path: str) -> str:
        target = read_link(path)
        node.sweep_all()
        node.put(2, num_pages=4)
        return target

    with monkeypatch.context() as patch:
        patch.setattr(os, "readlink", sweep_then)
        opened = node.arenas.open_shard(shard)
    assert opened.tensor("x")[0] == 1
    assert node.store.mapped_retired_bytes == 4 * PAGE


def test_a_puller_that_comes_just_before_the_sweep_keeps_its_block(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opens the shard right before the writer deletes the ticket."""
    shard = node.put(1)
    found = []
    unlink = os.unlink

    def open_first(path: str) -> None:
        if path.endswith("/train-0.life1/1"):
            found.append(node.arenas.open_shard(shard))
        unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", open_first)
        assert node.sweep_all() == 1
    assert node.store.mapped_retired_bytes == PAGE
    node.put(2)
    assert found[0].tensor("x")[0] == 1


class LateMap(ArenaMap):
    """Threads that drop a shard stop on the way to telling so."""

    def __init__(self, folder: ArenaFolder) -> None:
        super().__init__(folder)
        self.late: list[tuple[Any, ...]] = []

    def _on_dropped(self, *told: Any) -> None:
        self.late.append(told)

    def deliver(self) -> None:
        while self.late:
            super()._on_dropped(*self.late.pop())


def test_news_of_a_drop_that_come_late_unlock_nothing_that_is_in_use(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    arenas = LateMap(node.folder)
    first = node.put(1, num_pages=4)
    arenas.open_shard(first)
    again = arenas.open_shard(first)
    arenas.deliver()  # of the first time
    node.sweep_all()
    assert node.store.mapped_retired_bytes == 4 * PAGE
    del again
    arenas.deliver()
    node.sweep_all()
    assert node.store.num_bytes == 0

    # the news come between the lock and the look for the ticket
    second = node.put(2, num_pages=4)
    arenas.open_shard(second)
    read_link = os.readlink

    def deliver_first(path: str) -> str:
        arenas.deliver()
        return read_link(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "readlink", deliver_first)
        held = arenas.open_shard(second)
    node.sweep_all()
    assert node.store.mapped_retired_bytes == 4 * PAGE
    assert held.tensor("x")[0] == 2


def test_other_spellings_of_an_id_are_the_same_shard(node: Node) -> None:
    shard = node.put(3)
    one, other = node.arenas.open_shard(shard), node.arenas.open_shard("life1.001")
    del one
    node.sweep_all()
    assert node.store.mapped_retired_bytes == PAGE
    assert other.tensor("x")[0] == 3


@pytest.mark.parametrize(
    "shard_id",
    ["life1.9", "life0.1", "../train-0.life1.1", "/.1", ".1", "life1/../life1.1"],
)
def test_ids_of_nothing_are_gone(node: Node, shard_id: str) -> None:
    node.put(1)
    with pytest.raises(ShardGone, match="is gone"):
        node.arenas.open_shard(shard_id)


def test_absurd_ids_are_typed_errors(node: Node) -> None:
    node.put(1)
    with pytest.raises(ShardGone):
        node.arenas.open_shard(f"life1.{'9' * 19}")
    for shard_id in ("", "life1", "life1.-1", "life1.x", f"life1.{'9' * 5000}"):
        with pytest.raises(MetadataError):
            node.arenas.open_shard(shard_id)


def test_arenas_are_looked_for_once_a_second_at_most(node: Node) -> None:
    assert node.arenas.find("life1")
    late = store_in(node.folder, "life2")
    shard = late.put({"x": torch.zeros(1)}, [1])
    assert not node.arenas.find("life2")
    with pytest.raises(ShardGone, match="no arena"):
        node.arenas.open_shard(shard)
    node.clock.now_s += LOOK_AGAIN_S
    assert node.arenas.find("life2")
    assert not node.arenas.find("life3")
    assert not node.arenas.find("../run/train-0.life1")
    node.arenas.open_shard(shard)
    late.close()
    assert node.arenas.find("life2")  # believed until it matters
    with pytest.raises(ShardGone):
        node.arenas.open_shard(shard)


def maps_of(path: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]


def num_open(folder: Path) -> int:
    """Files of a folder that this process has open, deleted or not."""
    with os.scandir("/proc/self/fd") as fds:
        links = [os.readlink(fd.path) for fd in fds if os.path.lexists(fd.path)]
    return sum(link.startswith(str(folder)) for link in links)


def test_memory_of_deleted_blocks_is_let_go(node: Node) -> None:
    store = store_in(node.folder, "life2")
    node.clock.now_s += LOOK_AGAIN_S
    node.arenas.find("life2")
    shards = [node.arenas.open_shard(store.put({"x": torch.zeros(9)}, [9])) for _ in range(2)]
    path = node.folder.path / "train-0.life2"
    tensor = shards[1].tensor("x")
    num_files = num_open(node.folder.path)
    store.close()
    assert len(maps_of(path)) == 2  # the reader's
    shards.clear()
    node.arenas.find("life1")
    assert len(maps_of(path)) == 2
    node.clock.now_s += LOOK_AGAIN_S
    node.arenas.find("life1")
    del store
    gc.collect()
    assert len(maps_of(path)) == 1  # of the tensor
    assert tensor.tolist() == [0.0] * 9
    del tensor
    assert maps_of(path) == []
    assert num_open(node.folder.path) < num_files


def test_a_closed_map_keeps_what_is_in_use(node: Node) -> None:
    tensor = node.arenas.open_shard(node.put(5)).tensor("x")
    node.arenas.close()
    del node.arenas
    gc.collect()
    node.sweep_all()
    node.put(6)
    assert (node.store.mapped_retired_bytes, tensor[0]) == (PAGE, 5)
    del tensor
    node.sweep_all()
    assert node.store.num_bytes == 0


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self, held: object) -> None:
        self.held = held
        self.itself = self


def test_garbage_may_be_collected_inside_of_the_map(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that ends while its own thread holds the lock of the map neither waits nor stays."""
    shards = [node.put(value) for value in range(3)]
    read_link = os.readlink

    def collect_first(path: str) -> str:
        assert gc.collect() > 0
        Cycle(None)
        return read_link(path)

    gc.disable()  # so that nothing is collected before
    try:
        Cycle(node.arenas.open_shard(shards[0]).tensor("x"))
        monkeypatch.setattr(os, "readlink", collect_first)
        last = node.arenas.open_shard(shards[1])
        monkeypatch.undo()
    finally:
        gc.enable()
    assert node.sweep_all() == 3
    assert node.store.mapped_retired_bytes == PAGE
    assert last.tensor("x")[0] == 1


def test_tensors_may_end_in_any_thread(node: Node) -> None:
    """One thread opens all the time, others drop what it opened; no lock is left."""
    shards = [node.put(value) for value in range(50)]
    handed: list[queue.SimpleQueue[torch.Tensor | None]] = [queue.SimpleQueue() for _ in range(3)]

    def drop(tensors: queue.SimpleQueue[torch.Tensor | None]) -> None:
        while tensors.get() is not None:
            pass

    threads = [threading.Thread(target=drop, args=(tensors,)) for tensors in handed]
    for thread in threads:
        thread.start()
    for i in range(6_000):
        tensor = node.arenas.open_shard(shards[i % 50]).tensor("x")
        assert tensor[-1] == i % 50
        handed[i % 3].put(tensor)
    for tensors, thread in zip(handed, threads, strict=True):
        tensors.put(None)
        thread.join()
    del tensor
    assert node.sweep_all() == 50
    assert node.store.num_bytes == 0


@pytest.mark.parametrize("target", ["../train-0.life1/block-1", "/etc/passwd", "1", "block-1/x"])
def test_tickets_that_lead_elsewhere_are_refused(node: Node, target: str) -> None:
    ticket = node.folder.path / "train-0.life1" / node.put(1).rpartition(".")[2]
    ticket.unlink()
    ticket.symlink_to(target)
    with pytest.raises(ProtocolError, match="not the ticket of a shard"):
        node.arenas.open_shard("life1.1")


def test_tickets_and_headers_that_lie_are_refused(node: Node) -> None:
    arena = node.folder.path / "train-0.life1"
    shard = node.put(1)
    (arena / "1").rename(arena / "kept")
    (arena / "1").write_text("no link")
    with pytest.raises(ProtocolError, match="not the ticket of a shard"):
        node.arenas.open_shard(shard)
    (arena / "1").unlink()
    (arena / "1").symlink_to("block-9")
    with pytest.raises(ShardGone):
        node.arenas.open_shard(shard)
    (arena / "kept").rename(arena / "1")
    with (arena / "block-1").open("r+b") as block:
        block.write(b"\xff" * 64)
    with pytest.raises(ProtocolError, match="header"):
        node.arenas.open_shard(shard)
    node.sweep_all()
    assert node.store.num_bytes == 0  # no lock is left


def test_want_of_descriptors_is_a_typed_error(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = node.put(1)

    def refuse(*args: object, **kwargs: object) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(TransportError, match=rf"{shard} cannot be mapped: Too many open files"):
            node.arenas.open_shard(shard)
    assert node.arenas.open_shard(shard).tensor("x")[0] == 1
