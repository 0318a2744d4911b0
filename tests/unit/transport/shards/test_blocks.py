"""The writer's side, in one process; `tests/integration/test_arena_processes.py` kills writers."""

from __future__ import annotations

import resource
import subprocess
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from areal_sc.errors import StoreFull, TransportError
from areal_sc.transport.shards.arena_map import ArenaMap
from areal_sc.transport.shards.blocks import IDLE_SWEEPS, ArenaBackend
from areal_sc.transport.shards.memory_folder import ArenaFolder
from areal_sc.transport.shards.store import TensorStore

PAGE = 4096
MIB = 1 << 20
HEADER_BYTES = 64
"""Of a shard with one field and one row."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[ArenaFolder]:
    folder = ArenaFolder(tmp_path, "run")
    yield folder
    folder.remove()


def store_in(folder: ArenaFolder, incarnation: str = "life1") -> TensorStore:
    backend = ArenaBackend(folder, "train/0", incarnation)
    return TensorStore("train/0", incarnation, max_bytes=64 * MIB, backend=backend)


def put_pages(store: TensorStore, num_pages: int, value: int = 1) -> int:
    """Sequence number of a shard that fills so many pages with its header."""
    size = num_pages * PAGE - HEADER_BYTES
    store.put({"x": torch.full((size,), value, dtype=torch.uint8)}, [size])
    return store.last_sequence


def blocks(folder: ArenaFolder) -> list[int]:
    """Pages of each block, in the order in which they were made; all are really allocated."""
    found = sorted(folder.path.glob("*/block-*"), key=lambda p: int(p.name.split("-")[1]))
    assert all(path.stat().st_blocks * 512 >= path.stat().st_size for path in found)
    return [path.stat().st_size // PAGE for path in found]


def test_shards_read_as_they_were_put(folder: ArenaFolder) -> None:
    store = store_in(folder)
    values = torch.arange(-3, 4)
    fields = {
        str(dtype): values.to(dtype)
        for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.float8_e4m3fn)
    }
    shard = store.put({**fields, "empty": torch.zeros(0)}, {name: [2, 0, 5] for name in fields})
    for name, expected in fields.items():
        read = store.describe(shard)[name].values
        assert read.readonly
        assert bytes(read) == expected.view(torch.uint8).numpy().tobytes()
    assert store.describe(shard)["empty"].slices(range(0)) == []
    (last,) = store.describe(shard)["torch.int64"].slices([2])
    assert bytes(last) == values[2:].numpy().tobytes()
    assert store.describe(store.put({}, [])) == {}


def test_what_comes_and_goes_finds_its_memory_in_place(folder: ArenaFolder) -> None:
    """Two batches are alive at a time, as in training."""
    store = store_in(folder)
    store.sweep([], 0)
    before: list[int] = []
    for step in range(40):
        for size in (1, 5, 3, 11, 2, 7):
            put_pages(store, size, step % 251)
        first = store.last_sequence - 11
        store.sweep(range(first, store.last_sequence + 1), store.last_sequence)
        if step == 3:
            before = blocks(folder)
    assert store.num_shards == 12
    assert blocks(folder) == before
    assert len(before) == 18
    # tickets, the lock, and that of the readers
    assert len(list(folder.path.glob("*/*"))) == len(before) + 12 + 2


def test_a_shard_takes_the_smallest_free_block_up_to_twice_its_size(folder: ArenaFolder) -> None:
    store = store_in(folder)
    numbers = [put_pages(store, pages) for pages in (9, 6, 4)]
    store.sweep([], numbers[-1])
    for pages in (3, 5, 4):  # in the blocks of 4, 6, and a new one: 9 pages are too many
        put_pages(store, pages)
    assert blocks(folder) == [9, 6, 4, 4]
    put_pages(store, 9)
    put_pages(store, 10)
    assert blocks(folder) == [9, 6, 4, 4, 10]


def test_a_burst_does_not_keep_its_memory(folder: ArenaFolder) -> None:
    store = store_in(folder)
    for _ in range(200):
        put_pages(store, 1)
    steady: list[int] = []
    for sweep in range(IDLE_SWEEPS + 2):
        assert sum(blocks(folder)) >= (200 if sweep < IDLE_SWEEPS else 0), sweep
        steady.append(put_pages(store, 1))
        store.sweep(steady[-2:], store.last_sequence)
    # two that live, and those that were in use a moment ago
    assert sum(blocks(folder)) <= 4
    assert store.num_shards == 2


def test_memory_that_this_process_reads_is_not_reused(folder: ArenaFolder) -> None:
    store = store_in(folder)
    held_bytes = 8 * PAGE - HEADER_BYTES
    shard = f"life1.{put_pages(store, 8, value=1)}"
    view = store.describe(shard)["x"].values[5:6]
    store.remove(shard)
    assert (store.num_bytes, store.mapped_retired_bytes) == (held_bytes, held_bytes)
    put_pages(store, 8, value=2)
    assert (view[0], blocks(folder)) == (1, [8, 8])
    del view
    assert store.num_bytes == 2 * held_bytes  # nobody has looked yet
    put_pages(store, 8, value=3)  # fits nowhere else
    assert (store.num_bytes, store.mapped_retired_bytes) == (2 * held_bytes, 0)
    assert blocks(folder) == [8, 8]


def test_a_put_that_fails_gives_its_block_back(folder: ArenaFolder) -> None:
    store = store_in(folder)
    put_pages(store, 1)
    # the next ticket cannot be written
    ticket = folder.path / "train-0.life1" / "2"
    ticket.mkdir()
    for _ in range(20):
        with pytest.raises(TransportError, match="File exists"):
            put_pages(store, 4)
    assert (store.num_bytes, store.last_sequence) == (PAGE - HEADER_BYTES, 1)
    assert blocks(folder) == [1, 4]
    ticket.rmdir()
    assert put_pages(store, 4) == 2


def test_a_full_file_system_is_a_typed_error_that_says_what_to_do(tmp_path: Path) -> None:
    root = tmp_path / "small"
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96k,mode=0700", f"test-{uuid.uuid4()}", str(root)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting is not permitted here")
    try:
        folder = ArenaFolder(root, "run")
        store = store_in(folder)
        put_pages(store, 2)
        put_pages(store, 15)
        with pytest.raises(StoreFull, match=rf"{root}.*of 98304 bytes free.*--shm-size"):
            put_pages(store, 8)
        assert blocks(folder) == [2, 15]
        store.sweep([1], 2)
        put_pages(store, 7)  # too small for the free block
        assert blocks(folder) == [2, 15, 7] or blocks(folder) == [2, 7]
        put_pages(store, 14 if len(blocks(folder)) == 3 else 13)
        store.close()
        folder.remove()
        assert list(root.iterdir()) == []
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True)


def test_a_limit_of_the_process_is_a_typed_error(folder: ArenaFolder) -> None:
    store = store_in(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 * PAGE, hard))
    try:
        put_pages(store, 3)
        with pytest.raises(StoreFull, match=r"no file may be larger than .*ulimit -f"):
            put_pages(store, 11)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (store.num_bytes, blocks(folder)) == (3 * PAGE - HEADER_BYTES, [3])


def test_a_folder_that_was_deleted_is_a_typed_error(folder: ArenaFolder) -> None:
    store = store_in(folder)
    put_pages(store, 3, value=7)
    view = store.describe("life1.1")["x"].values
    folder.remove()
    with pytest.raises(TransportError, match=r"train-0\.life1 cannot be used"):
        put_pages(store, 3)
    with pytest.raises(TransportError, match=r"train-0\.life1 cannot be used"):
        put_pages(store, 30)
    assert view[-1] == 7


def test_a_closed_store_leaves_nothing_but_what_is_viewed(folder: ArenaFolder) -> None:
    store = store_in(folder)
    put_pages(store, 3, value=7)
    view = store.describe("life1.1")["x"].values
    store.close()
    assert [path.name for path in folder.path.iterdir()] == ["lock"]
    assert (bytes(view[:2]), store.num_shards) == (b"\7\7", 0)
    with pytest.raises(TransportError, match="was closed"):
        put_pages(store, 1)


def test_threads_put_map_and_sweep_at_once(folder: ArenaFolder) -> None:
    """Every shard holds its own id's hash; nobody may ever see another's."""
    store = store_in(folder)
    arenas = ArenaMap(folder)
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for i in range(300):
                value = thread * 1000 + i
                size = 100 + 997 * (value % 13)
                shard = store.put({"x": torch.full((size,), value, dtype=torch.int32)}, [size])
                mapped = arenas.open_shard(shard).tensor("x")
                if i % 2:
                    store.remove(shard)
                if i % 5 == 0:
                    store.sweep([], 0)
                assert len(mapped) == size
                assert bool((mapped == value).all())
                if i % 2 == 0:
                    again = arenas.open_shard(shard)
                    store.remove(shard)
                    assert bool((again.tensor("x") == value).all())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    store.sweep([], 0)
    assert (store.last_sequence, store.num_shards, store.num_bytes) == (1200, 0, 0)
    arenas.close()
