"""A run of a group is played once, and its reply is there until its rows are not."""

from __future__ import annotations

import asyncio

import pytest

from areal_sc.errors import EngineFailed
from areal_sc.metadata import BatchMetadata, Columns, RowMetadata, RowRun, ShardMetadata
from areal_sc.workers import group_runs
from areal_sc.workers.calls import GroupAttempt, GroupReply
from areal_sc.workers.group_runs import GroupRuns

RUN = GroupAttempt(7, 1)


def reply_with_rows(run: GroupAttempt, shard_id: str) -> GroupReply:
    shard = ShardMetadata("rollout/0", "tcp://a:1", shard_id, (RowRun(0, 0, 1),))
    row = RowMetadata(run.group_id, run.attempt, 3, 1.0, 0, ((0, 2),), episode=0)
    columns = (Columns({"input_ids": "int32"}, (shard,)),)
    return GroupReply(run, BatchMetadata("g", 0, columns, (row,)))


class Played:
    """A run that ends when it is told to; counts how often it was played."""

    def __init__(self, run: GroupAttempt, shard_id: str = "life.1") -> None:
        self.num = 0
        self.end = asyncio.Event()
        self._reply = reply_with_rows(run, shard_id)

    async def play(self) -> GroupReply:
        self.num += 1
        await self.end.wait()
        return self._reply


async def test_a_repeat_joins_the_run_or_gets_its_reply_again() -> None:
    runs, played = GroupRuns(), Played(RUN)
    first = asyncio.create_task(runs.join(RUN, played.play))
    await asyncio.sleep(0)
    first.cancel()  # its controller died
    second = asyncio.create_task(runs.join(RUN, played.play))
    await asyncio.sleep(0)
    assert runs.going == (RUN,)
    played.end.set()
    reply = await second
    assert reply.batch is not None
    assert await runs.join(RUN, played.play) == reply
    assert (played.num, runs.going, runs.ended[0].shards) == (1, (), ("life.1",))


async def test_a_run_that_waits_longer_is_said_to_go_on_and_is_joined_again() -> None:
    runs, played = GroupRuns(limit_s=0.01), Played(RUN)
    assert await runs.join(RUN, played.play) == GroupReply(RUN, goes_on=True)
    played.end.set()
    assert (await runs.join(RUN, played.play)).batch is not None
    assert played.num == 1


async def test_a_description_tells_of_a_reply_as_soon_as_its_rows_are_sealed() -> None:
    """Else a controller that takes over would take them for nobody's, and have them swept."""
    runs, told = GroupRuns(), list[bool]()

    async def play() -> GroupReply:
        asyncio.get_running_loop().call_soon(look)
        return reply_with_rows(RUN, "life.1")

    def look() -> None:
        told.append(bool(runs.ended) and not runs.going)

    asked = asyncio.create_task(runs.join(RUN, play))
    await asyncio.wait([asked])
    assert told == [True]


async def test_nothing_is_kept_of_a_run_that_is_given_up_as_it_ends() -> None:
    runs, played = GroupRuns(), Played(RUN)
    asked = asyncio.create_task(runs.join(RUN, played.play))
    await asyncio.sleep(0)
    played.end.set()
    await asyncio.sleep(0)
    assert runs.ended
    await runs.give_up(RUN)
    assert (await asked).batch is not None, "whoever has asked knows what to sweep"
    assert (runs.going, runs.ended) == ((), ())


async def test_a_reply_goes_with_the_shard_of_its_rows() -> None:
    runs, played = GroupRuns(), Played(RUN)
    played.end.set()
    await runs.join(RUN, played.play)
    runs.forget(lambda shard_id: True)
    assert runs.ended
    runs.forget(lambda shard_id: False)
    assert not runs.ended


async def test_nothing_comes_of_a_run_that_is_given_up() -> None:
    runs, played = GroupRuns(), Played(RUN)
    asked = asyncio.create_task(runs.join(RUN, played.play))
    await asyncio.sleep(0)
    await runs.give_up(RUN)
    assert await asked == GroupReply(RUN)
    assert (runs.going, runs.ended) == ((), ())
    await runs.give_up(RUN)  # which does not go on any more


async def test_a_run_that_fails_is_not_kept() -> None:
    async def fail() -> GroupReply:
        raise EngineFailed("no engine")

    runs, played = GroupRuns(), Played(RUN)
    with pytest.raises(EngineFailed):
        await runs.join(RUN, fail)
    played.end.set()
    await runs.join(RUN, played.play)
    assert played.num == 1


async def test_replies_without_rows_are_bounded_and_others_than_of_training_are_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_runs, "MAX_REPLIES_WITHOUT_ROWS", 2)
    runs = GroupRuns()
    for group_id in (-1, 0, 1, 2):
        run = GroupAttempt(group_id, 0)

        async def reject(run: GroupAttempt = run) -> GroupReply:
            return GroupReply(run)

        await runs.join(run, reject)
    assert [ended.run.group_id for ended in runs.ended] == [1, 2]
