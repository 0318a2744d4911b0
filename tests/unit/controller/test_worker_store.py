"""The book of one worker's store, one event at a time."""

from __future__ import annotations

from areal_sc.controller.worker_store import WorkerStore
from areal_sc.workers.calls import GroupAttempt, Sweep


class Owner:
    """Needs the groups that it is told to."""

    def __init__(self) -> None:
        self.needed: set[int] = set()

    def needs(self, run: GroupAttempt) -> bool:
        return run.group_id in self.needed

    def run(self, group_id: int) -> GroupAttempt:
        self.needed.add(group_id)
        return GroupAttempt(group_id, 0)


def owner_and_store() -> tuple[Owner, WorkerStore]:
    owner = Owner()
    return owner, WorkerStore(owner.needs)


def test_a_group_takes_room_until_a_sweep_is_confirmed() -> None:
    owner, store = owner_and_store()
    run = owner.run(0)
    store.begin(run)
    assert (store.num_running, store.num_held) == (1, 0)
    owner.needed.clear()
    assert not store.has_dead, "nothing is sealed yet"
    store.end(run, ["a.1"])
    assert (store.num_running, store.num_held, store.has_dead) == (0, 1, True)
    sweep, dead_ids = store.plan_sweep("a")
    assert sweep == Sweep(0, dead=(1,), adopted_live=())
    assert store.num_held == 1, "the worker may not have got it"
    store.confirm_sweep("a", dead_ids, 1)
    assert (store.num_held, store.has_dead) == (0, False)


def test_what_becomes_dead_after_the_plan_waits_for_the_next_one() -> None:
    owner, store = owner_and_store()
    for group_id in range(2):
        run = owner.run(group_id)
        store.begin(run)
        store.end(run, [f"a.{group_id + 1}"])
    owner.needed.discard(0)
    _, dead_ids = store.plan_sweep("a")
    owner.needed.discard(1)
    store.confirm_sweep("a", dead_ids, 2)
    assert (store.num_held, store.has_dead) == (1, True)
    assert store.plan_sweep("a")[0].dead == (2,)


def test_numbers_are_acknowledged_when_the_runs_of_their_time_have_ended() -> None:
    owner, store = owner_and_store()
    slow, later = owner.run(0), owner.run(1)
    store.begin(slow)
    store.confirm_sweep("a", store.plan_sweep("a")[1], 5)  # one of the five may be the slow run's
    store.begin(later)
    sweep, dead_ids = store.plan_sweep("a")
    assert sweep.acknowledged == 0
    store.confirm_sweep("a", dead_ids, 7)
    store.end(slow, ["a.3"])
    assert store.plan_sweep("a")[0] == Sweep(5, live=(3,), adopted_live=())


def test_what_a_restarted_worker_holds_is_what_takes_room() -> None:
    owner, store = owner_and_store()
    kept, lost, running = owner.run(1), owner.run(2), owner.run(3)
    for run in (kept, lost, running):
        store.begin(run)
    store.end(kept, ["life1.1"])
    store.end(lost, ["life1.2"])
    store.end(running, [])  # its call failed, but it has sealed a shard
    unknown = GroupAttempt(9, -2)
    held = {"life1.1": None, "life1.3": unknown, "life1.4": None}  # the last one is of weights
    assert store.note_adopted(held) == [lost]
    assert (store.num_running, store.num_held) == (0, 2)
    assert store.has_dead
    sweep, dead_ids = store.plan_sweep("life2")
    assert sweep.adopted_live == ("life1.1",)
    assert dead_ids == ["life1.3", "life1.4"]
    store.confirm_sweep("life2", dead_ids, 0)
    assert store.num_held == 1


def test_shards_that_are_held_for_a_run_take_its_room_and_are_its_own_when_it_begins() -> None:
    owner, store = owner_and_store()
    kept, of_none = GroupAttempt(1, -1), GroupAttempt(2, -2)
    owner.needed.add(1)
    held = {"a.1": kept, "a.2": kept, "a.3": of_none, "a.4": of_none, "a.5": None}
    assert store.note_adopted(held) == []
    assert (store.num_running, store.num_held) == (0, 2), "however many shards they have"
    assert store.plan_sweep("b")[0].adopted_live == ("a.1", "a.2")
    store.confirm_sweep("b", ["a.3", "a.4", "a.5"], 0)
    run = GroupAttempt(1, 1)
    store.begin(run, ["a.1", "a.2"])
    assert (store.num_running, store.num_held) == (1, 0)
    owner.needed.clear()
    assert store.plan_sweep("b")[0].adopted_live == ("a.1", "a.2"), "its reply may name them"
    store.end(run, ["a.1", "b.1"])
    assert (store.num_running, store.num_held, store.has_dead) == (0, 1, True)


def test_a_restarted_worker_is_told_no_numbers_of_its_earlier_life() -> None:
    owner, store = owner_and_store()
    for group_id in range(3):
        run = owner.run(group_id)
        store.begin(run)
        store.end(run, [f"a.{group_id + 1}"])
    store.confirm_sweep("a", store.plan_sweep("a")[1], 3)
    assert store.plan_sweep("a")[0].acknowledged == 3
    run = owner.run(3)
    store.begin(run)
    store.end(run, ["b.1"])
    owner.needed.discard(0)  # a.1, which is not b.1
    sweep, dead_ids = store.plan_sweep("b")
    assert sweep == Sweep(0, live=(1,), adopted_live=("a.2", "a.3"))
    store.confirm_sweep("b", dead_ids, 1)
    assert store.num_held == 3, "an adopted shard goes when it is not among the live ones"
