"""Episodes that have ended are taken over as they were, by the worker's next life and by others."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import msgpack
from msgspec.structs import replace

from areal_sc.controller.rollout.kept_episodes import KeptEpisodes
from areal_sc.metadata import BatchMetadata, PromptReference, concat
from areal_sc.rejection import Rejection, RejectionKind
from areal_sc.token_fields import TRAJECTORY_FIELDS, TensorMetadata
from areal_sc.transport.bulk.puller import Puller
from areal_sc.transport.shards.arena_map import ArenaMap
from areal_sc.transport.shards.blocks import ArenaBackend
from areal_sc.transport.shards.memory_folder import ArenaFolder
from areal_sc.transport.shards.store import TensorStore
from areal_sc.weights.published import ShardReference
from areal_sc.workers.calls import (
    SHARED,
    FinishedEpisode,
    GroupAttempt,
    HeldShard,
    KeptEpisode,
    RunGroup,
)
from areal_sc.workers.finished_episodes import EndedEpisode, FinishedEpisodes
from areal_sc.workers.group_rows import problem_of_shared, rows_of, values_of
from areal_sc.workflows.base import Trajectory

DECLARED = {
    "value": TensorMetadata(),
    "choices": TensorMetadata(shape=(2, 3), dtype="int32"),
    "style": TensorMetadata(shape=(4,), per_row=True),
    "found": TensorMetadata(shape=(None, 2), dtype="int16", per_row=True, max_bytes=400),
    "picture": TensorMetadata(shape=(8, 3), dtype="uint8", per_group=True),
    "page": TensorMetadata(shape=(None,), dtype="uint8", per_group=True, max_bytes=200_000),
}
PICTURE, PAGE = np.arange(24, dtype=np.uint8).reshape(8, 3), np.full(100_000, 7, np.uint8)
REJECTED = Rejection(RejectionKind.reward_error, "it raised", prompt_index=3)


def group(attempt: int = 0, kept: tuple[KeptEpisode, ...] = ()) -> RunGroup:
    return RunGroup(7, attempt, 2, PromptReference(0, 3, 1), 0, 4, kept)


def row(seed: int, num_tokens: int) -> Trajectory:
    rng = np.random.default_rng(seed)
    mask = np.arange(num_tokens) >= 2
    return Trajectory(
        input_ids=rng.integers(0, 99, num_tokens, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=rng.normal(size=num_tokens).astype(np.float32) * mask,
        versions=np.where(mask, rng.integers(2, 5, num_tokens), -1).astype(np.int32),
        temperatures=np.where(mask, 0.7, 1.0).astype(np.float32),
        reward=float(rng.normal()),
        metrics={"accuracy": 1.0, "turns": 2.0},
        fields={
            "value": rng.normal(size=num_tokens).astype(np.float32),
            "choices": rng.integers(0, 9, (num_tokens, 2, 3), dtype=np.int32),
            "style": rng.normal(size=4).astype(np.float32),
            "found": rng.integers(-9, 9, (seed * 3, 2), dtype=np.int16),
            "picture": PICTURE,
            "page": PAGE,
        },
        returns=((0.25, num_tokens - 3), (0.5, 1)),
        shaping=-0.125,
    )


class Life:
    """One life of a worker, as far as its store goes."""

    def __init__(self, folder: ArenaFolder, name: str, incarnation: str) -> None:
        self.backend = ArenaBackend(folder, name, incarnation)
        self.store = TensorStore(name, incarnation, max_bytes=0, backend=self.backend)
        self.num_adopted = self.store.adopt()
        bulk: Any = SimpleNamespace(seconds=Counter())  # nothing here is on another machine
        puller = Puller(bulk, local_store=self.store, arenas=ArenaMap(folder))
        plane: Any = SimpleNamespace(store=self.store, puller=puller)
        self.name = name
        self.episodes = FinishedEpisodes(name, lambda: f"tcp://{name}", plane)

    def die(self) -> None:
        """The kernel drops its locks."""
        self.backend._arena.close()

    def kept(self) -> tuple[KeptEpisode, ...]:
        """All that it holds."""
        return tuple(
            KeptEpisode(
                ShardReference(self.name, f"tcp://{self.name}", shard_id),
                msgpack.decode(note, type=FinishedEpisode),
            )
            for shard_id, note in self.store.notes.items()
        )

    def read(self, batch: BatchMetadata) -> list[dict[str, bytes]]:
        """The bytes of each shard that a batch names."""
        tensors = [self.store.tensors(shard.shard_id) for shard in batch.shards]
        return [{name: it.numpy().tobytes() for name, it in of.items()} for of in tensors]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[ArenaFolder]:
    folder = ArenaFolder(tmp_path, "run")
    yield folder
    folder.remove()


PLAYED = {0: [row(0, 9)], 1: REJECTED, 3: [row(1, 5), row(2, 64)]}


def seal_all(life: Life) -> dict[int, EndedEpisode]:
    ended: dict[int, EndedEpisode] = {}
    for number, outcome in PLAYED.items():
        ended[number] = life.episodes.seal(
            group(),
            number,
            outcome,
            DECLARED,
            shared_id=next((it.shared_id for it in ended.values()), ""),
        )
    return ended


def assert_same_rows(found: Any, expected: list[Trajectory]) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        for name in TRAJECTORY_FIELDS:
            value = getattr(mine, name)
            assert value.dtype == getattr(theirs, name).dtype
            assert value.tobytes() == getattr(theirs, name).tobytes(), name
        for name in DECLARED:
            assert mine.fields[name].tobytes() == theirs.fields[name].tobytes(), name
            assert mine.fields[name].shape == theirs.fields[name].shape
        for name in ("reward", "metrics", "returns", "shaping"):
            assert getattr(mine, name) == getattr(theirs, name), name


async def test_the_next_life_takes_over_what_has_ended_bit_for_bit(folder: ArenaFolder) -> None:
    first = Life(folder, "rollout/0", "life1")
    ended = seal_all(first)
    expected = first.episodes.batch_of(group(), dict(ended), DECLARED)
    assert expected is not None
    expected_bytes = first.read(expected)
    first = Life(folder, "rollout/0", "life2")  # of which nobody has heard
    seal_all(first)
    first.die()
    second = Life(folder, "rollout/0", "life3")
    assert second.num_adopted == 4, "three episodes, and what they share"
    again = group(1, second.kept())
    found: dict[int, EndedEpisode] = {}
    await second.episodes.take_over(again, DECLARED, found)
    assert {number: it.is_taken_over for number, it in found.items()} == dict.fromkeys(PLAYED, True)
    assert found[1].outcome == REJECTED
    assert_same_rows(found[0].outcome, PLAYED[0])
    assert_same_rows(found[3].outcome, PLAYED[3])
    batch = second.episodes.batch_of(again, found, DECLARED)
    assert batch is not None
    assert batch.rows == tuple(replace(row, attempt=1) for row in expected.rows)
    assert batch.dtypes == expected.dtypes
    assert second.read(batch) == expected_bytes
    assert second.store.last_sequence == 0, "nothing was copied"


async def test_another_worker_seals_a_copy_and_plays_what_is_gone(folder: ArenaFolder) -> None:
    first = Life(folder, "rollout/0", "life1")
    ended = seal_all(first)
    kept = first.kept()
    other = Life(folder, "rollout/1", "life2")
    first.store.remove(ended[0].shard_id)
    again = group(1, kept)
    found: dict[int, EndedEpisode] = {}
    await other.episodes.take_over(again, DECLARED, found)
    assert sorted(found) == [1, 3]
    batch = other.episodes.batch_of(again, found, DECLARED)
    assert batch is not None
    assert {shard.node_id for shard in batch.shards} == {"rollout/1"}
    values = values_of(PLAYED[3], DECLARED)  # type: ignore[arg-type]
    shared = {"picture": PICTURE.tobytes(), "page": PAGE.tobytes()}
    own = {name: np.concatenate(it).tobytes() for name, it in values.items()}
    assert other.read(batch) == [own, shared]
    (copy,) = (it.episode for it in other.kept() if it.episode.number == 3)
    assert copy.run == GroupAttempt(7, 1)


def test_what_is_given_up_or_rejected_leaves_nothing(folder: ArenaFolder) -> None:
    life = Life(folder, "rollout/0", "life1")
    ended = seal_all(life)
    life.episodes.drop(ended.values())
    assert (life.store.num_shards, life.store.num_bytes) == (0, 0)
    rejected = {0: life.episodes.seal(group(), 0, REJECTED, DECLARED)}
    assert life.episodes.batch_of(group(), rejected, DECLARED) is None
    assert life.store.num_shards == 0


async def test_what_was_not_sealed_alone_is_one_shard(folder: ArenaFolder) -> None:
    life = Life(folder, "rollout/0", "life1")
    outcomes = {0: [row(0, 9)], 1: [row(1, 5), row(2, 64)], 2: [row(3, 7)], 3: [row(4, 3)]}
    ended = {number: EndedEpisode(rows) for number, rows in outcomes.items()}
    ended[2] = life.episodes.seal(group(), 2, outcomes[2], DECLARED)
    batch = life.episodes.batch_of(group(), ended, DECLARED)
    assert batch is not None
    assert life.store.num_shards == 3
    rest, alone, _ = batch.shards
    assert [tuple(run) for run in rest.runs] == [(0, 0, 3), (4, 3, 1)]
    assert [tuple(run) for run in alone.runs] == [(3, 0, 1)]
    packed = await life.episodes._plane.puller.pull(batch)
    found = rows_of(packed, [it.metrics for rows in outcomes.values() for it in rows], DECLARED)
    assert_same_rows(found, [it for rows in outcomes.values() for it in rows])
    life.die()
    held = KeptEpisodes()
    held.is_open = lambda group_id: True
    second = Life(folder, "rollout/0", "life2")
    shards = tuple(HeldShard(it.shard.shard_id, it.episode) for it in second.kept())
    held.note_held("rollout/0", "tcp://rollout/0", shards)
    numbers = [it.episode.number for it in held.of_group(7)]
    assert numbers == [SHARED, 2], "the others are in no note"


async def test_episodes_of_another_task_play_again(folder: ArenaFolder) -> None:
    life = Life(folder, "rollout/0", "life1")
    seal_all(life)
    found: dict[int, EndedEpisode] = {}
    other = replace(group(1, life.kept()), workflow=5)
    await life.episodes.take_over(other, DECLARED, found)
    assert found == {}
    await life.episodes.take_over(group(1, life.kept()), DECLARED, found)
    assert found.keys() == PLAYED.keys()


async def test_what_a_group_shares_is_stored_once_and_outlives_its_first_episode(
    folder: ArenaFolder,
) -> None:
    """The episode that it was sealed with is rejected by the group's reward."""
    life = Life(folder, "rollout/0", "life1")
    outcomes = {number: [row(number, 9)] for number in range(8)}
    ended: dict[int, EndedEpisode] = {}
    for number, rows in outcomes.items():
        shared_id = next((it.shared_id for it in ended.values()), "")
        ended[number] = life.episodes.seal(group(), number, rows, DECLARED, shared_id=shared_id)
    ended[0] = dataclasses.replace(ended[0], outcome=REJECTED)
    batch = life.episodes.batch_of(group(), ended, DECLARED)
    assert batch is not None
    life.die()
    second = Life(folder, "rollout/0", "life2")
    assert len(PAGE) < second.store.num_bytes < 1.2 * len(PAGE)
    taken = concat([batch.take([3, 0]), batch.take([6])], batch_id="b", global_step=1)
    packed = await second.episodes._plane.puller.pull(taken)
    assert packed.row_fields["page"].values.nbytes <= 2 * len(PAGE), "once of each group"
    again = rows_of(packed, [{"accuracy": 1.0, "turns": 2.0}] * 3, DECLARED)
    assert_same_rows(again, [outcomes[number][0] for number in (4, 1, 7)])
    found: dict[int, EndedEpisode] = {}
    (shared,) = (it for it in second.kept() if it.episode.number == SHARED)
    second.store.remove(shared.shard.shard_id)
    await second.episodes.take_over(group(1, second.kept()), DECLARED, found)
    assert found == {}, "without what they share they play again"


@pytest.mark.parametrize("is_within_episode", [False, True])
def test_a_value_that_a_group_does_not_share_is_refused_by_name(is_within_episode: bool) -> None:
    first, other = row(1, 9), row(2, 9)
    assert problem_of_shared([first], [other], DECLARED) == ""
    other.fields["page"] = PAGE[1:]
    rows = ([first, other], []) if is_within_episode else ([first], [other])
    assert "field 'page' is one that all rows of a group share" in problem_of_shared(
        *rows, DECLARED
    )


async def test_a_shared_value_of_which_no_row_is_left_is_not_used(folder: ArenaFolder) -> None:
    """Those that play again may give another one."""
    life = Life(folder, "rollout/0", "life1")
    life.episodes.seal(group(), 1, REJECTED, DECLARED)
    ended = life.episodes.seal(group(), 0, [row(0, 9)], DECLARED)
    life.store.remove(ended.shard_id)
    found: dict[int, EndedEpisode] = {}
    await life.episodes.take_over(group(1, life.kept()), DECLARED, found)
    assert found.keys() == {1}
    assert found[1].shared_id == ""
