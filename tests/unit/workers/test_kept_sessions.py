"""Sessions of a worker's earlier lives: which are there, for whom, and when they go."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import msgpack, structs

from areal_sc.agents.journal import Claimed
from areal_sc.metadata import PromptReference
from areal_sc.transport.shards.store import TensorStore
from areal_sc.weights.published import ShardReference
from areal_sc.workers.calls import (
    REST,
    FinishedEpisode,
    GroupAttempt,
    HeldShard,
    KeptEpisode,
    RunGroup,
)
from areal_sc.workers.kept_sessions import KeptSessions

PROMPT = PromptReference(0, 5, 0)
SESSION = "rollout.0.a1.1"


def group(attempt: int = 0, *kept: KeptEpisode) -> RunGroup:
    return RunGroup(3, attempt, 0, PROMPT, workflow=2, group_size=2, kept=kept)


def claimed(folder: Path, store: TensorStore) -> tuple[KeptSessions, HeldShard]:
    """A life of a worker with one claimed episode, number 1, and what its next life tells of it."""
    sessions = KeptSessions(folder, store)
    sessions.begin("g", group())
    journal = sessions.journal("g", 1)
    journal.begin(SESSION)
    journal.add(Claimed("k"))
    ((shard_id, note),) = store.notes.items()
    return sessions, HeldShard(shard_id, msgpack.decode(note, type=FinishedEpisode))


def test_the_next_attempt_has_the_session_that_was_left(tmp_path: Path) -> None:
    store = TensorStore("rollout/0", "a1", max_bytes=1 << 20)
    _, held = claimed(tmp_path / "sessions", store)
    assert held.episode == FinishedEpisode(
        GroupAttempt(3, 0), 1, workflow=2, prompt=PROMPT, session=SESSION
    )
    after = KeptSessions(tmp_path / "sessions", store)
    assert after.checked(held) == held
    assert after.is_kept(SESSION)
    kept = KeptEpisode(ShardReference("rollout/0", "tcp://0", held.shard_id), held.episode)
    elsewhere = KeptEpisode(ShardReference("rollout/1", "tcp://1", "b1.9"), held.episode)
    after.begin("other", group(1, elsewhere))
    assert after.journal("other", 1).path is None
    after.begin("again", group(1, kept))
    assert after.journal("again", 0).path is None
    assert after.journal("again", 1).read() == [Claimed("k")]
    after.end("again", 1, is_kept=True)  # this life ends, too
    assert after.is_kept(SESSION)
    after.begin("again", group(2, kept))
    after.end("again", 1)
    assert not after.is_kept(SESSION)
    assert after.checked(held) == HeldShard(
        held.shard_id, FinishedEpisode(GroupAttempt(3, 0), REST)
    )


def test_a_session_goes_with_its_shard(tmp_path: Path) -> None:
    store = TensorStore("rollout/0", "a1", max_bytes=1 << 20)
    _, held = claimed(tmp_path / "sessions", store)
    after = KeptSessions(tmp_path / "sessions", store)
    after.checked(held)
    after.forget()
    assert after.is_kept(SESSION)
    store.remove(held.shard_id)
    after.forget()
    assert not list((tmp_path / "sessions").iterdir())


def test_a_session_of_another_workflow_is_given_up(tmp_path: Path) -> None:
    store = TensorStore("rollout/0", "a1", max_bytes=1 << 20)
    _, held = claimed(tmp_path / "sessions", store)
    assert held.episode is not None
    after = KeptSessions(tmp_path / "sessions", store)
    kept = KeptEpisode(ShardReference("rollout/0", "tcp://0", held.shard_id), held.episode)
    after.begin("again", structs.replace(group(1, kept), workflow=3))
    assert after.journal("again", 1).path is None
    assert not after.is_kept(SESSION)  # so that its client is told


def test_claims_that_were_void_leave_nothing_behind_a_sweep(tmp_path: Path) -> None:
    store = TensorStore("rollout/0", "a1", max_bytes=1 << 20)
    sessions, _ = claimed(tmp_path / "sessions", store)
    journal = sessions.journal("g", 1)
    journal.end()
    journal.begin("rollout.0.a1.2")
    assert store.num_shards == 2
    sessions.forget()
    assert store.num_shards == 1
    assert sessions.is_kept("rollout.0.a1.2")


def test_without_room_a_session_goes_on_and_does_not_outlive_the_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    sessions = KeptSessions(tmp_path / "file", TensorStore("rollout/0", "a1", max_bytes=1))
    sessions.begin("g", group())
    sessions.journal("g", 0).begin(SESSION)
    assert sessions.journal("g", 0).path is None
    assert "will not outlive its worker" in caplog.text
