"""When ranks that an earlier start has left can go on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace
from simulation.virtual_loop import run_virtual

from areal_sc.config.schema import SchedulerConfig
from areal_sc.controller.train.rank_layout import find_ranks, misfit
from areal_sc.engines.base import RankPosition
from areal_sc.workers.operations import Kind, Operation
from areal_sc.workers.rank_methods import RankDescription

UPDATE = Operation(2, 5, Kind.update, "0", "rows")
SEAL = Operation(2, 5, Kind.publish, "6")
RANK = RankDescription(2, 5, RankPosition(0, is_head=True), 2)
SEALED = replace(RANK, version=6, operations=(UPDATE, SEAL))


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ([RANK, RANK], ""),
        ([SEALED, replace(RANK, operations=(UPDATE,))], ""),  # one of them has sealed
        ([RANK, replace(RANK, world_size=0, position=None)], "rank 1 had not joined"),
        ([RANK, replace(RANK, broken="between two versions")], "between two versions"),
        ([RANK, replace(RANK, lineage=3)], "rank 1 is at lineage 3"),
        ([replace(RANK, version=7)] * 2, "version 7"),
        ([replace(RANK, version=4)] * 2, "version 4"),
        ([RANK], "rank 0 had not joined"),
        ([RANK, replace(RANK, operations=(UPDATE,))], "has reached some of them"),
        ([RANK, replace(RANK, num_computed=1)], "has reached some of them"),
    ],
)
def test_ranks_go_on_where_the_journal_ends(ranks: list[RankDescription], why: str) -> None:
    found = misfit(ranks, 2, 5)
    assert why in found if why else found == ""


@dataclass
class FakeMember:
    name: str
    is_adopted: bool = True


@dataclass
class FakeFleet:
    """Its ranks say one thing after the other; the last one stays."""

    says: list[list[RankDescription]]
    members: list[FakeMember] = field(
        default_factory=lambda: [FakeMember("train/0"), FakeMember("train/1")]
    )
    config: SchedulerConfig = field(default_factory=SchedulerConfig)

    async def call_all(self, method: Any, args: None) -> list[RankDescription]:
        return self.says.pop(0) if len(self.says) > 1 else self.says[0]


def test_log_probabilities_that_nobody_waits_for_end_first() -> None:
    busy = replace(RANK, num_computed=1, is_computing=True)
    idle = replace(busy, is_computing=False, in_memory=(4, 5))
    other = replace(idle, in_memory=(5,))
    fleet: Any = FakeFleet([[busy, busy], [idle, busy], [idle, other]])
    found = run_virtual(find_ranks(fleet, 2, 5))
    assert found is not None
    assert (found.has_begun_step, found.in_memory, len(found.positions)) == (False, [5], 2)
    hung: Any = FakeFleet([[busy, busy]])
    assert run_virtual(find_ranks(hung, 2, 5)) is None


def test_a_step_has_begun_when_it_is_trained_or_sealed() -> None:
    for ranks in ([SEALED] * 2, [replace(RANK, operations=(UPDATE,))] * 2):
        fleet: Any = FakeFleet([ranks])
        found = run_virtual(find_ranks(fleet, 2, 5))
        assert found is not None
        assert found.has_begun_step


def test_ranks_of_which_one_is_dead_begin_anew() -> None:
    members = [FakeMember("train/0"), FakeMember("train/1", is_adopted=False)]
    fleet: Any = FakeFleet([[RANK, RANK]], members)
    assert run_virtual(find_ranks(fleet, 2, 5)) is None
