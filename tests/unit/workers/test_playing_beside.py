"""While finished episodes are pulled from another machine, the missing ones are played."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import until

from areal_sc.errors import StoreFull
from areal_sc.metadata import PromptReference
from areal_sc.rejection import Rejection, RejectionKind
from areal_sc.transport.shards.memory_folder import OFF
from areal_sc.weights.published import ShardReference
from areal_sc.workers.calls import (
    SHARED,
    FinishedEpisode,
    GroupAttempt,
    GroupReply,
    KeptEpisode,
    RunGroup,
)
from areal_sc.workers.finished_episodes import EndedEpisode
from areal_sc.workers.rollout_worker import RolloutWorker

RUN = GroupAttempt(7, 1)
KEPT = tuple(
    KeptEpisode(ShardReference("rollout/0", "tcp://a", f"{number}"), FinishedEpisode(RUN, number))
    for number in (SHARED, 1, 2)
)
PULLED = EndedEpisode(Rejection(RejectionKind.rejected, "it was pulled"), "own copy")


class Pulls:
    """Of the kept episodes the first can be had, once they may be pulled.

    Attributes:
        failure: that ends the pulls.
        dropped: what a run without a reply has forgotten.
    """

    def __init__(self, failure: Exception | None = None) -> None:
        self.may_end = asyncio.Event()
        self.failure = failure
        self.sealed: list[int] = []
        self.dropped: list[EndedEpisode] = []

    async def take_over(self, _: RunGroup, __: Any, ended: dict[int, EndedEpisode]) -> None:
        await self.may_end.wait()
        ended[1] = PULLED
        if self.failure:
            raise self.failure

    def seal(self, _: RunGroup, number: int, outcome: Any, *__: Any, **___: Any) -> EndedEpisode:
        self.sealed.append(number)
        return EndedEpisode(outcome, f"shard {number}")

    def drop(self, ended: Any) -> None:
        self.dropped += ended


class Plays(RolloutWorker):
    """Plays episodes of which nothing is asked.

    Attributes:
        played: their numbers, as they end.
        replied: the numbers of each group's reply, with what came of them.
    """

    def __init__(self, pulls: Pulls) -> None:
        nothing: Any = SimpleNamespace(
            fields={}, pictures_of_rows=False, waits_outside=False, scores_groups=False
        )
        fakes: dict[str, Any] = {
            "recorder": SimpleNamespace(is_on=False),
            "files": SimpleNamespace(bring_source=lambda _: asyncio.sleep(0)),
            "sources": SimpleNamespace(workflow=lambda _: nothing),
            "transport_config": SimpleNamespace(shared_memory=OFF),
            "_sessions": SimpleNamespace(end=lambda *_, **__: None),
            "_own_fields": {},
            "_finished": pulls,
            "_num_quick_groups": 0,
            "_group_counters": defaultdict[str, float](float),
            "played": [],
            "replied": [],
        }
        vars(self).update(fakes)

    async def _episodes(self, *_: Any, note_end: Any = None) -> Any:
        numbers: Sequence[int] = _[3]
        self.played += numbers
        outcome = Rejection(RejectionKind.rejected, "it was played")
        await asyncio.gather(*(note_end(number, outcome, 5, 1.0) for number in numbers))
        return {"prompt": "a"}, [outcome] * len(numbers)

    async def _judge_group(self, *told: Any, **_: Any) -> Any:
        return told[3]

    def _close_group(self, *told: Any) -> GroupReply:
        _, _, row, ended, _ = told
        assert row == {"prompt": "a"}
        self.replied += [(number, it.outcome.message) for number, it in sorted(ended.items())]
        return GroupReply(RUN)


def playing(worker: Plays) -> asyncio.Task[GroupReply]:
    group = RunGroup(RUN.group_id, RUN.attempt, 0, PromptReference(0, 3, 1), 0, 4, KEPT)
    return asyncio.create_task(worker._play_group(RUN, group))


async def test_missing_episodes_are_played_while_the_others_are_pulled() -> None:
    pulls = Pulls()
    worker = Plays(pulls)
    group = playing(worker)
    await until(lambda: worker.played)
    assert worker.played == [0, 3]
    assert not group.done()
    assert pulls.sealed == []  # what the group shares comes first
    pulls.may_end.set()
    await group
    assert worker.played == [0, 3, 2]  # of which nothing could be had
    assert worker.replied == [
        *((0, "it was played"), (1, "it was pulled")),
        *((2, "it was played"), (3, "it was played")),
    ]
    assert pulls.sealed == [0, 3]  # the last one is sealed with its group
    assert worker._group_counters == {
        **{"episodes_played": 3, "episode_tokens": 15, "episode_s": 3.0},
        "episodes_taken_over": 1,
    }


async def test_pulls_without_room_end_what_is_played_beside_them() -> None:
    pulls = Pulls(StoreFull("no room"))
    group = playing(Plays(pulls))
    pulls.may_end.set()
    with pytest.raises(StoreFull):
        await group
    assert pulls.dropped == [PULLED]
