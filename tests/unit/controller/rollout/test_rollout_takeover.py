"""What becomes of groups whose workers an earlier start has left."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from simulation.behavior import Behavior
from simulation.fault_run import MAX_TURNS, FaultRun
from simulation.faults import Fault, FaultKind
from simulation.lives import serving_life
from simulation.network import Stage
from simulation.scenario import Scenario
from simulation.settings import Settings
from simulation.training_run import TrainingRun
from simulation.virtual_loop import in_virtual_time, run_virtual

from areal_sc.controller.ledger.group import GroupState
from areal_sc.controller.ledger.ledger import Ledger
from areal_sc.controller.rollout.kept_episodes import KEPT, NOBODYS, KeptEpisodes
from areal_sc.controller.rollout.rollout_takeover import FoundRuns, find_runs
from areal_sc.controller.rollout.worker_set import NO_VERSION, RolloutWorkerState
from areal_sc.controller.worker_store import WorkerStore
from areal_sc.fleet.worker_life import Life, LifeState
from areal_sc.metadata import (
    BatchMetadata,
    Columns,
    PromptReference,
    RowMetadata,
    RowRun,
    ShardMetadata,
)
from areal_sc.run.run_owner import RunTerm
from areal_sc.workers.calls import (
    ADOPTED_SHARDS,
    DESCRIBE_ROLLOUT,
    GIVE_UP_GROUP,
    EndedRun,
    FinishedEpisode,
    GroupAttempt,
    HeldShard,
    RolloutDescription,
)

LINEAGE = 3


@dataclass(eq=False)
class FakeMember:
    name: str
    is_adopted: bool = True
    life: Life = field(default_factory=serving_life)
    worker: Any = field(default_factory=lambda: SimpleNamespace(address="tcp://a:1"))


@dataclass
class FakeFleet:
    """Workers that hold what they are said to hold.

    Attributes:
        dying: dies once it has said so.
    """

    says: dict[FakeMember, RolloutDescription]
    dying: RolloutWorkerState | None = None
    given_up: list[GroupAttempt] = field(default_factory=list)

    async def call_living(
        self, method: Any, args: Any, members: list[FakeMember]
    ) -> dict[FakeMember, Any]:
        if method is GIVE_UP_GROUP:
            self.given_up.append(args)
        if method is ADOPTED_SHARDS:
            if self.dying is not None:
                self.dying.life.state = LifeState.lost
            return dict.fromkeys(members, (HeldShard("b.1"),))
        said = method is DESCRIBE_ROLLOUT
        return {member: self.says[member] if said else None for member in members}


def rows_of(group_id: int, worker: str, shard_id: str, address: str = "tcp://a:1") -> BatchMetadata:
    shard = ShardMetadata(worker, address, shard_id, (RowRun(0, 0, 1),))
    row = RowMetadata(group_id, 0, 3, 1.0, 0, ((0, 2),), episode=0)
    return BatchMetadata(f"g{group_id}", 0, (Columns({"input_ids": "int32"}, (shard,)),), (row,))


def found_in(
    ledger: Ledger, says: dict[str, RolloutDescription | None], *, is_dying: bool = False
) -> tuple[FoundRuns, list[RolloutWorkerState], FakeFleet]:
    """Args: says: by worker; None: it was started now. is_dying: the first one."""
    members = {FakeMember(name, said is not None): said for name, said in says.items()}
    spoken = {member: said for member, said in members.items() if said is not None}
    fleet = FakeFleet(spoken)
    states: list[RolloutWorkerState] = []
    for number, member in enumerate(members):
        store = WorkerStore(lambda run: ledger.needs_rows(run.group_id, run.attempt))
        states.append(RolloutWorkerState(member, number, store))  # type: ignore[arg-type]
    fleet.dying = states[0] if is_dying else None
    kept = KeptEpisodes()
    kept.is_open = lambda group_id: ledger.get(group_id) is not None
    found = run_virtual(find_runs(states, fleet, ledger, kept))  # type: ignore[arg-type]
    return found, states, fleet


def ledger_of(num_groups: int) -> Ledger:
    ledger = Ledger()
    ledger.go_back(LINEAGE, Ledger().snapshot())
    for index in range(num_groups):
        ledger.admit(PromptReference(0, index, 7), 0)
    return ledger


def held(shard_id: str, run: GroupAttempt, number: int = 0) -> HeldShard:
    return HeldShard(shard_id, FinishedEpisode(run, number))


def run_of(group_id: int, attempt: int = 0) -> GroupAttempt:
    return GroupAttempt(group_id, attempt)


def test_runs_go_on_where_they_are_and_what_nobody_has_runs_again() -> None:
    ledger = ledger_of(5)
    for group_id in (0, 1, 2):
        ledger.start(group_id, "rollout/0")
    going, replied = run_of(0), EndedRun(run_of(1), ("a.1",))
    unknown = run_of(3)  # its start was not on the disk yet
    stray = run_of(9)
    description = RolloutDescription(
        (LINEAGE, 0),
        (going, unknown, stray, run_of(-1)),
        (replied,),
        (held("a.1", replied.run), held("a.2", stray)),
    )
    found, (state,), fleet = found_in(ledger, {"rollout/0": description})
    assert set(fleet.given_up) == {stray, run_of(-1)}
    assert set(found.owners) == {going, replied.run, unknown}
    # the shard of the reply takes its room when the reply is told; the other one is nobody's
    assert (state.store.num_running, state.store.num_held, state.store.has_dead) == (3, 1, True)
    joined = found.reconcile(ledger)
    assert [group.group_id for group, _ in joined] == [0, 1, 3]
    assert {group.state for group, _ in joined} == {GroupState.running}
    again = [group for group in ledger.unconsumed() if group.state is GroupState.queued]
    assert [(group.group_id, group.attempt) for group in again] == [(2, 1), (4, 0)]
    assert found.num_again == 1, "the last one was never begun"


def test_rows_that_are_there_stay_and_others_are_told() -> None:
    ledger = ledger_of(5)
    places = [
        ("rollout/0", "a.1"),
        ("rollout/0", "a.2"),
        ("rollout/1", "c.1"),
        ("rollout/1", "b.1"),
    ]
    for group_id, (worker, shard_id) in enumerate(places):
        ledger.start(group_id, worker)
        ledger.finish(group_id, 0, rows_of(group_id, worker, shard_id))
    ledger.start(4, "rollout/1")
    ledger.finish(4, 0, rows_of(4, "rollout/1", "b.1", "tcp://a:2"))  # where nobody listens now
    description = RolloutDescription((LINEAGE, 0), (), (), (held("a.1", run_of(0)),))
    says = {"rollout/0": description, "rollout/1": None}
    found, (first, second), _ = found_in(ledger, says)
    assert set(found.lost) == {run_of(1), run_of(2), run_of(4)}
    assert (first.store.num_held, first.store.has_dead, second.store.num_held) == (1, False, 1)


def test_episodes_of_a_run_that_goes_on_are_its_own_and_others_are_kept_for_their_group() -> None:
    ledger = ledger_of(3)
    for group_id in (0, 1):
        ledger.start(group_id, "rollout/0")
    ledger.requeue(1, "its worker was lost")  # and its next attempt was not asked for yet
    description = RolloutDescription(
        (LINEAGE, 0),
        (run_of(0),),
        (),
        (
            *(held("a.1", run_of(0)), held("a.2", run_of(0), number=1)),
            *(held("a.3", run_of(1)), held("a.4", run_of(1)), held("a.5", run_of(1), number=1)),
            held("a.6", run_of(9)),
        ),
    )
    _, (state,), _ = found_in(ledger, {"rollout/0": description})
    runs = {i: run.attempt for i, run in state.store._shards.items() if run is not None}
    assert runs == {"a.1": 0, "a.2": 0, "a.3": KEPT, "a.4": NOBODYS, "a.5": KEPT, "a.6": NOBODYS}
    assert state.store.num_running == 1


def test_weights_count_in_their_lineage_alone() -> None:
    ledger = ledger_of(0)
    ledger.publish(2)
    policies = [(LINEAGE, 2), (LINEAGE, 1), (LINEAGE - 1, 2), None]
    says = {
        f"rollout/{index}": RolloutDescription(policy, (), (), ())
        for index, policy in enumerate(policies)
    }
    _, states, _ = found_in(ledger, {**says, "rollout/4": None})
    assert [state.version for state in states] == [2, 1, NO_VERSION, NO_VERSION, NO_VERSION]
    _, states, _ = found_in(ledger_of(0), {"rollout/0": says["rollout/3"], "rollout/1": None})
    assert [state.version for state in states] == [0, 0], "what an engine is built with"


def test_what_a_worker_has_said_before_it_died_says_nothing_of_its_next_life() -> None:
    ledger = ledger_of(1)
    ledger.start(0, "rollout/0")
    description = RolloutDescription((LINEAGE, 0), (run_of(0),), (), ())
    found, (state,), _ = found_in(ledger, {"rollout/0": description}, is_dying=True)
    assert (found.owners, state.store.num_running) == ({}, 0)
    assert found.reconcile(ledger) == []
    assert [(group.group_id, group.attempt) for group in ledger.unconsumed()] == [(0, 1)]


@in_virtual_time
async def test_a_start_that_is_superseded_gives_up_no_run() -> None:
    """Workers may not have heard of the later one yet, and it joins what they run."""
    calls: list[str] = []
    run = TrainingRun(Settings(behavior=Behavior(generation_s=1000.0)))
    term = run.cluster.terms[None] = RunTerm.begin(run.cluster.run_dir)
    run.cluster.network.on_message = lambda stage, method, peer: calls.append(method)
    async with run.started():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10.0):
                await run.step()
        RunTerm.begin(term.run_dir)
    assert "run_group" in calls
    assert not {"give_up_group", "shutdown"} & set(calls)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("stage", [Stage.sent, Stage.handled])
def test_what_had_ended_on_a_worker_that_dies_as_it_is_taken_over_is_not_played_again(
    stage: Stage,
) -> None:
    settings = Settings(
        num_steps=4,
        batch_groups=4,
        group_size=4,
        num_rollout_workers=2,
        max_deaths=1000,
        behavior=Behavior(generation_s=lambda rng: rng.choice((1.0, 2.0, 4.0, 20.0))),
    )
    scenario = Scenario(
        settings=settings,
        faults=[
            Fault(FaultKind.kill_controllers, 0, 6.0),
            Fault(FaultKind.kill_rollout, 0, None, stage, "describe_rollout", 1),
        ],
        duplication=0.0,
        jitter_s=0.0,
        snapshot_every=0,
        segment_bytes=4 << 20,
        restart_s=1.0,
    )
    run = FaultRun(scenario)
    run_virtual(run.play(), max_virtual_s=3000.0, max_turns=MAX_TURNS)
    assert run.ends == {"killed": 1}
    assert run.faults.struck["kill rollout worker", "taking over"] == 1
    assert run.cluster.num_taken_over
    assert not run.cluster.played_again
