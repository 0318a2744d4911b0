"""Who is next among models that wish for turns, and how a model ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from areal_sc.config.optimizer_settings import OptimizerConfig
from areal_sc.serving.hosts import Host, SaveWanted, ScoreWanted, StepWanted
from areal_sc.serving.journal import ServeJournal, Source
from areal_sc.serving.rank_turns import RankTurns
from areal_sc.serving.trained_model import InOrder, TrainedModel
from areal_sc.serving.wire import RequestRefused

LIMIT_S = 60.0


class Ranks(Host):
    """A host that computes nothing.

    Attributes:
        num_scores: turns of scores until now.
        num_changes: of places.
        may_go_on: while it is not set, scores wait for it.
    """

    num_places = 2
    publishes = False

    def __init__(self) -> None:
        self.num_scores = 0
        self.num_changes = 0
        self.is_scoring = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    @property
    def version(self) -> int:
        return 0

    def enter(self, place: int, source: Source) -> None:
        self.num_changes += 1

    def score(self, rows: Mapping[int, Sequence[int]]) -> dict[int, list[Any]]:
        self.num_scores += 1
        self.is_scoring.set()
        assert self.may_go_on.wait(LIMIT_S)
        return {place: list(its) for place, its in rows.items()}

    def step(self, steps: Mapping[int, StepWanted]) -> dict[int, dict[str, float]]:
        return {place: {} for place in steps}

    def save(self, place: int, model: TrainedModel, wanted: SaveWanted) -> None:
        self.num_changes += 1


Play = Callable[[RankTurns, Ranks], Awaitable[None]]


def played(folder: Path, models: Sequence[TrainedModel], play: Play) -> None:
    by_id = {model.model_id: model for model in models}

    async def run() -> None:
        ranks = Ranks()
        turns = RankTurns(ranks, ServeJournal(folder / "journal"), [], by_id)
        running = asyncio.create_task(turns.run())
        await asyncio.wait_for(play(turns, ranks), LIMIT_S)
        assert not running.done()
        running.cancel()

    asyncio.run(run())


def models_of(tenant: str, count: int) -> list[TrainedModel]:
    return [TrainedModel(f"{tenant}:train:{it}", tenant, Source()) for it in range(count)]


async def score(turns: RankTurns, model: TrainedModel, times: int) -> None:
    for number in range(times):
        assert await turns.ask(model, number, ScoreWanted([number])) == [number]


def test_more_models_than_places_all_have_their_turns(tmp_path: Path) -> None:
    models = models_of("alice", 12)

    async def play(turns: RankTurns, ranks: Ranks) -> None:
        await asyncio.gather(*(score(turns, model, 5) for model in models))
        assert ranks.num_scores <= 12 * 5
        assert ranks.num_changes <= 12 * 5  # never one that has had no turn yet

    played(tmp_path, models, play)


def test_many_models_of_one_tenant_do_not_take_the_place_of_another(tmp_path: Path) -> None:
    (own,), models = models_of("bob", 1), models_of("alice", 12)

    async def play(turns: RankTurns, ranks: Ranks) -> None:
        others = asyncio.gather(*(score(turns, model, 40) for model in models))
        waits = []
        for number in range(20):
            before = ranks.num_scores
            await turns.ask(own, 2 * number, ScoreWanted([0]))
            waits.append(ranks.num_scores - before)
            await turns.ask(own, 2 * number + 1, StepWanted([0], OptimizerConfig()))
        assert max(waits[1:]) <= 2  # the turn that went on, and its own
        await others

    played(tmp_path, [own, *models], play)


def test_a_model_ends_behind_the_turn_that_it_is_in(tmp_path: Path) -> None:
    ended, other = models_of("alice", 2)

    async def play(turns: RankTurns, ranks: Ranks) -> None:
        ranks.may_go_on.clear()
        under_way = asyncio.create_task(score(turns, ended, 1))
        await asyncio.to_thread(ranks.is_scoring.wait, LIMIT_S)
        waiting = asyncio.create_task(turns.ask(ended, 1, ScoreWanted([1])))
        ending = asyncio.create_task(turns.forget(ended))
        await asyncio.sleep(0)
        assert not ending.done()
        ranks.may_go_on.set()
        await under_way
        await ending
        with pytest.raises(RequestRefused, match="the model is no more"):
            await waiting
        await score(turns, other, 1)

    played(tmp_path, [ended, other], play)


def test_requests_have_their_turns_in_the_order_of_their_numbers() -> None:
    order, begun = InOrder(first=1), list[int]()

    async def take(number: int) -> None:
        async with order.turn(number):
            begun.append(number)
            await asyncio.sleep(0)

    async def play() -> None:
        order.expect(4000)
        with pytest.raises(RequestRefused, match="expected about 4001, got 1000000"):
            order.expect(1_000_000)
        await asyncio.gather(*(take(number) for number in (3, 1, 4, 2)))
        with pytest.raises(RequestRefused, match="expected 5 or above, got -1"):
            await take(-1)

    asyncio.run(asyncio.wait_for(play(), LIMIT_S))
    assert begun == [1, 2, 3, 4]
