"""Shared memory between processes that are killed and stopped."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.agent_forks import end_with_pipes, start_with_pipes
from integration.arena_program import ENOUGH, MIB, is_intact, lengths_of, shard_of
from waiting import wait_until

from areal_sc.errors import ShardGone
from areal_sc.transport.shards.arena_map import ArenaMap
from areal_sc.transport.shards.blocks import ArenaBackend
from areal_sc.transport.shards.memory_folder import ArenaFolder, clean_leftovers
from areal_sc.transport.shards.store import TensorStore

PROGRAM = Path(__file__).with_name("arena_program.py")
WAIT_S = 240.0


class Worker:
    """A started program."""

    def __init__(self, folder: ArenaFolder, worker: str, incarnation: str) -> None:
        self.incarnation = incarnation
        root = folder.path.parent.parent
        self.process = start_with_pipes(PROGRAM, root, folder.path.name, worker, incarnation)

    def start(self, method: str, *arguments: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, *arguments]).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the program ended with {self.process.wait()}"
        return json.loads(line)

    def call(self, method: str, *arguments: object) -> Any:
        self.start(method, *arguments)
        return self.answer()

    def kill(self) -> None:
        end_with_pipes(self.process)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[ArenaFolder]:
    folder = ArenaFolder(tmp_path, "run")
    yield folder
    folder.remove()


@pytest.fixture
def start(folder: ArenaFolder) -> Iterator[Callable[[str, str], Worker]]:
    with ExitStack() as stack:

        def start(worker: str, incarnation: str) -> Worker:
            started = Worker(folder, worker, incarnation)
            stack.callback(started.kill)
            return started

        yield start


def store_in(folder: ArenaFolder, worker: str, incarnation: str) -> TensorStore:
    backend = ArenaBackend(folder, worker, incarnation)
    return TensorStore(worker, incarnation, max_bytes=256 * MIB, backend=backend)


def put(store: TensorStore, seed: int) -> str:
    return store.put(shard_of(seed), lengths_of(seed))


def holds(store: TensorStore, shard_id: str, seed: int) -> bool:
    """Whether the store serves what was put."""
    fields = store.describe(shard_id)
    return list(fields) == list(shard_of(seed)) and all(
        fields[name].dtype == str(expected.dtype).removeprefix("torch.")
        and fields[name].row_lengths == tuple(lengths_of(seed)[name])
        and bytes(fields[name].values) == bytes(expected.view(torch.uint8).numpy())
        for name, expected in shard_of(seed).items()
    )


def blocks_bytes(folder: ArenaFolder, incarnation: str) -> int:
    """What the blocks of an arena really take."""
    return sum(p.stat().st_blocks * 512 for p in folder.path.glob(f"*.{incarnation}/block-*"))


def test_shards_outlive_their_writer_and_are_adopted(
    folder: ArenaFolder, start: Callable[[str, str], Worker], caplog: pytest.LogCaptureFixture
) -> None:
    writer = start("rollout/0", "dead")
    seeds = list(range(100, 140))
    ids = writer.call("put", seeds)
    arenas = ArenaMap(folder)
    mapped = {shard_id: arenas.open_shard(shard_id) for shard_id in ids[:5]}
    writer.call("put_half")
    # a shard that was swept, but is still mapped when its owner dies
    (swept,) = start("rollout/1", "other").call("put", [999])
    arenas_at_other = ArenaMap(folder)
    kept = arenas_at_other.open_shard(swept)

    assert store_in(folder, "rollout/0", "too_early").adopt() == 0  # it is alive
    writer.kill()
    for shard_id, seed in zip(ids, seeds, strict=True):
        assert is_intact(arenas.open_shard(shard_id), seed)
    # what a successor has to cope with
    arena = folder.path / "rollout-0.dead"
    (arena / "41").write_bytes(b"\xc1 not a ticket")
    (arena / "42").symlink_to("block-99")
    (arena / "block-98").touch()  # no space was reserved yet

    successor = store_in(folder, "rollout/0", "next")
    own = put(successor, 7)
    assert successor.adopt() == len(ids)
    assert "shard dead.41 is lost" in caplog.text
    assert "shard dead.42 is lost" in caplog.text
    assert (successor.num_shards, successor.last_sequence) == (len(ids) + 1, 1)
    assert all(map(lambda shard_id, seed: holds(successor, shard_id, seed), ids, seeds))
    # what was not sealed is given back: only the pages of shards are left
    assert blocks_bytes(folder, "dead") <= successor.num_bytes + 4096 * len(ids)
    assert is_intact(arenas.open_shard(ids[9]), seeds[9])
    assert successor.adopt() == 0

    # the mark of the controller; the readers of a dropped shard keep it
    assert successor.sweep([1], 1, adopted_live=ids[3:]) == 3
    assert all(is_intact(mapped[ids[i]], seeds[i]) for i in range(5))
    for gone in ids[:3]:
        with pytest.raises(ShardGone, match=gone):
            successor.describe(gone)
        with pytest.raises(ShardGone, match=gone):
            arenas.open_shard(gone)
    assert successor.mapped_retired_bytes > 0
    mapped.clear()
    before = blocks_bytes(folder, "dead")
    successor.sweep([1], 1)
    assert (successor.mapped_retired_bytes, successor.num_shards) == (0, len(ids) - 2)
    assert blocks_bytes(folder, "dead") < before

    # the last shard takes the arena along
    successor.remove(ids[3])
    assert successor.sweep([1], 1, adopted_live=[]) == len(ids) - 4
    assert sorted(folder.by_incarnation()) == ["next", "other", "too_early"]
    assert holds(successor, own, 7)
    assert is_intact(kept, 999)
    successor.close()


def test_what_is_mapped_survives_its_owner_and_the_adoption(
    folder: ArenaFolder, start: Callable[[str, str], Worker]
) -> None:
    """Shards that were swept before their owner died have no ticket, but readers."""
    writer = start("rollout/0", "dead")
    arenas = ArenaMap(folder)
    first, second = (arenas.open_shard(name) for name in writer.call("put", [1_234, 1_235]))
    assert writer.call("sweep_all")[1] > 0
    (third,) = writer.call("put", [1_236])
    writer.kill()
    successor = store_in(folder, "rollout/0", "next")
    assert successor.adopt() == 1
    assert holds(successor, third, 1_236)
    assert is_intact(first, 1_234)
    assert is_intact(second, 1_235)
    successor.sweep([], 0, adopted_live=[])
    assert is_intact(first, 1_234)
    del first, second
    successor.sweep([], 0)
    assert list(folder.by_incarnation()) == ["next"]
    successor.close()


def test_blocks_wait_for_pullers_that_are_stopped_and_not_for_dead_ones(
    folder: ArenaFolder, start: Callable[[str, str], Worker]
) -> None:
    store = store_in(folder, "train/0", "life1")
    doomed, other = start("rollout/0", "a"), start("rollout/1", "b")
    shards = {put(store, seed): seed for seed in range(4_000, 4_020)}
    assert doomed.call("hold", shards)
    held_bytes = store.num_bytes
    os.kill(doomed.process.pid, signal.SIGSTOP)
    store.sweep([], store.last_sequence)
    assert (store.num_bytes, store.mapped_retired_bytes) == (held_bytes, held_bytes)

    # nobody else waits for it
    for first in range(5_000, 5_200, 20):
        more = {put(store, seed): seed for seed in range(first, first + 20)}
        assert other.call("hold", more)
        store.sweep([], store.last_sequence)
        other.call("drop")
    store.sweep([], store.last_sequence)
    assert store.num_bytes == held_bytes
    num_blocks = len(list((folder.path / "train-0.life1").glob("block-*")))
    os.kill(doomed.process.pid, signal.SIGCONT)
    assert doomed.call("are_held_intact")

    doomed.kill()
    store.sweep([], store.last_sequence)
    assert (store.num_bytes, store.mapped_retired_bytes) == (0, 0)
    for seed in range(4_000, 4_020):
        put(store, seed)
    assert len(list((folder.path / "train-0.life1").glob("block-*"))) <= num_blocks
    store.close()


def test_children_of_a_fork_keep_nothing_locked_and_delete_nothing(
    folder: ArenaFolder, start: Callable[[str, str], Worker]
) -> None:
    store = store_in(folder, "train/0", "life1")
    shard = put(store, 4_000)
    worker = start("rollout/0", "dead")
    (theirs,) = worker.call("put", [55])
    assert worker.call("hold", {shard: 4_000})
    children = worker.call("fork")
    try:
        # the locks of the parent hold, whatever a child has dropped
        assert worker.call("are_held_intact")
        store.sweep([], store.last_sequence)
        assert store.mapped_retired_bytes > 0
        assert worker.call("put", [56])
        worker.process.send_signal(signal.SIGKILL)
        worker.process.wait()
        # the children live, and hold neither the block nor the arena
        for child in children:
            os.kill(child, 0)
        store.sweep([], store.last_sequence)
        assert store.num_bytes == 0
        successor = store_in(folder, "rollout/0", "next")
        assert successor.adopt() == 2
        assert holds(successor, theirs, 55)
        successor.close()
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    store.close()


def test_writing_to_what_is_mapped_ends_the_writer_and_not_the_data(
    folder: ArenaFolder, start: Callable[[str, str], Worker]
) -> None:
    store = store_in(folder, "train/0", "life1")
    shard = put(store, 3)
    worker = start("rollout/0", "careless")
    worker.start("write_into", shard)
    assert worker.process.wait(WAIT_S) == -signal.SIGSEGV
    assert holds(store, shard, 3)
    store.close()


def test_everything_at_once(
    folder: ArenaFolder, tmp_path: Path, start: Callable[[str, str], Worker]
) -> None:
    """Owners put and sweep in threads, one of them is killed and succeeded, pullers open and hold.

    No puller ever sees bytes that are not those of the shard it asked for.
    """
    log = tmp_path / "shards"
    log.touch()
    doomed, steady = start("train/0", "t0"), start("train/1", "t1")
    successor = start("train/0", "t2")
    pullers = [start("rollout/0", "r0"), start("rollout/1", "r1")]
    have_enough = [tmp_path / f"enough-{number}" for number in range(2)]
    for puller in pullers:
        puller.call("drop")  # it has imported
    for number, puller in enumerate(pullers):
        puller.start("consume", str(log), number, str(have_enough[number]))
    doomed.start("produce", str(log), 100_000, 1_000_000)
    wait_until(lambda: log.read_bytes().count(b"t0.") > 1_000)
    doomed.kill()
    adopted, num_shards = successor.call("adopt")
    assert 1 <= adopted == num_shards
    successor.start("produce", str(log), 2_000_000, 1_200)
    steady.start("produce", str(log), 3_000_000, 1_200)
    produced = [successor.answer(), steady.answer()]
    wait_until(lambda: all(path.exists() for path in have_enough))
    with log.open("ab") as file:
        file.write(b"END\n")
    consumed = [puller.answer() for puller in pullers]

    assert [told["sealed"] for told in produced] == [1_200, 1_200]
    assert [told["spoiled"] for told in consumed] == [0, 0]
    for told in consumed:
        assert told["mapped"] > ENOUGH, told
        assert told["gone"] > 0, told
    assert [owner.call("sweep_all") for owner in (successor, steady)] == [[0, 0], [0, 0]]
    assert not any("t0" in name for name in folder.by_incarnation())
    for owner in (successor, steady):
        # 61 live shards of 18 KB on average, 80 held, and what three threads were writing
        assert blocks_bytes(folder, owner.incarnation) <= 31 * MIB


def test_a_run_that_was_killed_whole_is_deleted_by_the_next(
    tmp_path: Path, start: Callable[[str, str], Worker], folder: ArenaFolder
) -> None:
    workers = [start("train/0", "a"), start("rollout/0", "b")]
    shards = dict(zip(workers[0].call("put", [1, 2]), [1, 2], strict=True))
    assert workers[1].call("hold", shards)
    folder.close()  # the script dies first
    next_run = ArenaFolder(tmp_path, "next")
    assert clean_leftovers(tmp_path) == 0
    workers[0].kill()
    assert clean_leftovers(tmp_path) == 0
    assert workers[1].call("hold", shards)
    workers[1].kill()
    assert clean_leftovers(tmp_path) == 1
    assert not folder.path.exists()
    next_run.remove()
    assert not list(tmp_path.glob("areal-sc-*"))
