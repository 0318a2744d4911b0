"""Which finished episodes are there for a group that runs again."""

from __future__ import annotations

import asyncio

from unit.weights.test_rolling_updates import make_workers

from areal_sc.controller.ledger.group import Group
from areal_sc.controller.rollout.kept_episodes import KEPT, NOBODYS, KeptEpisodes
from areal_sc.controller.worker_store import WorkerStore
from areal_sc.metadata import PromptReference
from areal_sc.workers.calls import FinishedEpisode, GroupAttempt, HeldShard


def held(shard_id: str, group_id: int, number: int, attempt: int = 0) -> HeldShard:
    return HeldShard(shard_id, FinishedEpisode(GroupAttempt(group_id, attempt), number))


def kept_of(*open_groups: int) -> tuple[KeptEpisodes, set[int]]:
    kept, are_open = KeptEpisodes(), set(open_groups)
    kept.is_open = are_open.__contains__
    return kept, are_open


def numbers(kept: KeptEpisodes, group_id: int) -> list[tuple[int, str]]:
    return [(it.episode.number, it.shard.shard_id) for it in kept.of_group(group_id)]


def test_each_number_of_an_open_group_is_kept_once_and_all_else_is_nobodys() -> None:
    kept, _ = kept_of(0)
    shards = [held("a.1", 0, 0), held("a.2", 0, 0, attempt=1), held("a.3", 5, 0), HeldShard("a.4")]
    runs = kept.note_held("rollout/0", "tcp://0", shards)
    assert runs == {
        "a.1": GroupAttempt(0, KEPT),
        "a.2": GroupAttempt(0, NOBODYS),
        "a.3": GroupAttempt(5, NOBODYS),
        "a.4": None,
    }
    runs = kept.note_held("rollout/1", "tcp://1", [held("b.1", 0, 0), held("b.2", 0, 1)])
    assert runs == {"b.1": GroupAttempt(0, NOBODYS), "b.2": GroupAttempt(0, KEPT)}
    assert numbers(kept, 0) == [(0, "a.1"), (1, "b.2")]
    assert kept.homes(0) == {"rollout/0": 1, "rollout/1": 1}


def test_an_attempt_takes_what_lies_where_it_runs_and_the_rest_outlives_it() -> None:
    kept, _ = kept_of(0)
    kept.note_held("rollout/0", "tcp://0", [held("a.1", 0, 0), held("a.2", 0, 2)])
    kept.note_held("rollout/1", "tcp://1", [held("b.1", 0, 1)])
    kept.note_lost(0, "rollout/0", "rollout/1")
    assert kept.is_awaited("rollout/1")
    assert kept.hand_over(0, "rollout/0") == ["a.1", "a.2"]
    assert numbers(kept, 0) == [(1, "b.1")]
    assert not kept.lost_with(0)
    assert not kept.is_awaited("rollout/1")
    # that attempt is lost, too: the next life of its worker tells of all of it
    kept.note_held("rollout/0", "tcp://0", [held("a.1", 0, 0), held("c.1", 0, 3, attempt=1)])
    assert sorted(numbers(kept, 0)) == [(0, "a.1"), (1, "b.1"), (3, "c.1")]


def test_what_a_full_store_gives_up_is_nobodys_though_more_of_the_group_lies_elsewhere() -> None:
    kept, are_open = kept_of(0, 1)
    stores = {f"rollout/{number}": WorkerStore(kept.needs) for number in range(2)}
    shards = {
        "rollout/0": [held("a.1", 0, 0), held("a.2", 1, 0), held("a.3", 1, 1)],
        "rollout/1": [held("b.1", 1, 2)],
    }
    for name, store in stores.items():
        store.note_adopted(kept.note_held(name, "tcp://0", shards[name]))
    first, second = stores.values()
    assert (first.num_needed, second.num_needed) == (2, 1)
    first.hold_for(kept.give_up("rollout/0", 1))
    assert (first.num_needed, second.num_needed) == (1, 1)
    assert first.plan_sweep("c")[1] == ["a.2", "a.3"]
    assert not second.has_dead
    assert numbers(kept, 1) == [(2, "b.1")]  # the others count as played again, once
    first.hold_for(kept.give_up("rollout/0", 1))
    assert (first.num_needed, numbers(kept, 0)) == (0, [])
    are_open.clear()
    assert second.plan_sweep("c")[1] == ["b.1"]


def test_what_a_worker_tells_replaces_what_it_had_told() -> None:
    kept, _ = kept_of(0)
    kept.note_held("rollout/0", "tcp://0", [held("a.1", 0, 0)])
    kept.note_held("rollout/0", "tcp://0", [])  # its memory is gone
    assert kept.of_group(0) == ()
    assert not kept.needs(GroupAttempt(0, KEPT))


def test_nobody_needs_the_episodes_of_a_group_that_has_ended() -> None:
    kept, are_open = kept_of(0, 1)
    kept.note_held("rollout/0", "tcp://0", [held("a.1", 0, 0), held("a.2", 1, 0)])
    assert kept.needs(GroupAttempt(0, KEPT))
    assert not kept.needs(GroupAttempt(0, 0))
    are_open.remove(0)
    assert not kept.needs(GroupAttempt(0, KEPT))
    assert kept.group_ids == [1]
    kept.forget(1)
    assert kept.group_ids == []


def test_a_session_goes_on_where_it_lies_unless_its_episode_has_ended() -> None:
    kept, _ = kept_of(0)
    going = FinishedEpisode(GroupAttempt(0, 0), 0, session="rollout.0.a.1")
    runs = kept.note_held("rollout/0", "tcp://0", [HeldShard("a.1", going), held("a.2", 0, 1)])
    assert runs == dict.fromkeys(("a.1", "a.2"), GroupAttempt(0, KEPT))
    assert kept.homes(0, of_sessions=True) == {"rollout/0": 1}
    assert kept.homes(0) == {"rollout/0": 2}
    # it was sealed, and its worker died before it could forget the session
    for shards in ([HeldShard("a.1", going), held("a.3", 0, 0)], [held("a.3", 0, 0)]):
        kept.note_held("rollout/0", "tcp://0", shards)
        assert numbers(kept, 0) == [(0, "a.3")]
        assert not kept.homes(0, of_sessions=True)
    shards = [held("a.3", 0, 0), HeldShard("a.1", going)]
    assert kept.note_held("rollout/0", "tcp://0", shards)["a.1"] == GroupAttempt(0, NOBODYS)
    assert numbers(kept, 0) == [(0, "a.3")]


async def test_a_group_goes_to_its_sessions_though_more_of_its_episodes_lie_elsewhere() -> None:
    workers, _ = make_workers()
    workers.kept.is_open = lambda _: True
    going = FinishedEpisode(GroupAttempt(0, 0), 2, session="rollout.1.b.1")
    workers.kept.note_held("rollout/0", "tcp://0", [held("a.1", 0, 0), held("a.2", 0, 1)])
    workers.kept.note_held("rollout/1", "tcp://1", [HeldShard("b.1", going)])
    async with asyncio.timeout(5):  # it would be offered rollout/0 again and again
        worker = await workers.take_worker(Group(0, PromptReference(0, 0, 0), 0))
    assert worker.name == "rollout/1"
