"""Ranks that hold a model together get the same rows, and one of them replies."""

from __future__ import annotations

import math
from typing import Any

import pytest
from simulation.settings import Settings
from simulation.training_run import TrainingRun, play
from simulation.virtual_loop import in_virtual_time

from areal_sc import FSDPPPOActor, TrainController
from areal_sc.config.schema import ActorConfig
from areal_sc.controller.train.rank_layout import RankLayout
from areal_sc.engines.base import RankPosition
from areal_sc.errors import ConfigError
from areal_sc.metadata import BatchMetadata, RowMetadata
from areal_sc.transport.rpc.method import Served
from areal_sc.workers.rank_methods import COMPUTE, UPDATE

RANKS = [f"train/{rank}" for rank in range(4)]


@in_virtual_time
async def test_a_model_group_gets_one_share_and_its_head_replies() -> None:
    settings = Settings(num_minibatches=2, num_ranks=4, model_size=2)
    async with TrainingRun(settings).started() as run:
        asked: dict[str, dict[str, Any]] = {name: {} for name in RANKS}
        for name in RANKS:
            worker: Any = run.cluster.workers[name]
            for method in (COMPUTE, UPDATE):
                served = worker.served[method.name]

                async def noted(args: Any, name: str = name, served: Served = served) -> Any:
                    asked[name][served.method.name] = args
                    return await served.handler(args)

                worker.served[method.name] = method.served_by(noted)
        batch = await run.rollout.prepare_batch_async(run.prompts, run.workflow)
        batch = run.actor.compute_advantages(batch)
        batch = await run.actor.compute_proximal_logprobs_async(batch)
        await run.actor.ppo_update_async(batch)
        await run.actor.publish_weights_async(run.rollout)
    assert asked["train/0"] == asked["train/1"]
    assert asked["train/2"] == asked["train/3"]
    minibatches = zip(
        *(asked[name]["update"].batches for name in ("train/0", "train/2")), strict=True
    )
    trained = []
    for shares in minibatches:
        parts = [share.rows for share in shares]
        assert all(parts), "each model group has rows of each minibatch"
        trained += [row for part in parts for row in part]
    assert len(trained) == len(batch.rows)
    assert set(trained) == set(batch.rows)
    (sealed,) = (c.shards for c in batch.columns if "proximal_logprobs" in c.dtypes)
    assert {shard.node_id for shard in sealed} == {"train/0", "train/2"}


def test_a_whole_run_with_model_groups_trains_each_row_once() -> None:
    run = play(Settings(num_steps=4, num_minibatches=2, num_ranks=4, model_size=2))
    trained = sorted(row.group_id for step in run.cluster.trained for row in step.rows)
    assert trained == sorted(row.group_id for batch in run.batches for row in batch.rows)
    assert len(trained) >= 4


@pytest.mark.parametrize(
    "places",
    [
        [(0, True), (0, True)],
        [(0, True), (1, False)],
        [(1, True)],
        [(0, True), (2, True)],
        [(0, True), (1, True), (2, False)],
    ],
)
def test_places_that_do_not_go_together(places: list[tuple[int, bool]]) -> None:
    with pytest.raises(AssertionError, match="model groups of data ranks 0, 1"):
        RankLayout.of([RankPosition(*place) for place in places])


def test_shares_and_replies_by_rank() -> None:
    places = [
        RankPosition(1, False),
        RankPosition(0, True),
        RankPosition(1, True),
        RankPosition(0, False),
    ]
    layout = RankLayout.of(places)
    assert layout.num_shares == 2
    assert layout.spread(["first", "second"]) == ["second", "first", "second", "first"]
    assert layout.of_heads(["a", "b", "c", "d"]) == ["b", "c"]


def test_a_group_stays_on_one_rank_where_that_saves_more_than_it_costs() -> None:
    """By what the ranks tell of their model; prompts of 20 tokens, answers of 2."""
    rows = tuple(
        RowMetadata(row // 3, 0, 22, 0.0, 0, (), row, prompt_length=20) for row in range(9)
    )
    batch = BatchMetadata("b", 0, (), rows)

    def groups_of_shares(min_saved_tokens: float) -> list[list[int]]:
        places = [RankPosition(rank, True, min_saved_tokens) for rank in range(3)]
        shares = RankLayout.of(places).split(batch, 1)
        return [sorted({rows[row].group_id for row in share[0]}) for share in shares]

    assert groups_of_shares(40) == [[0], [1], [2]]
    assert RankLayout.of([RankPosition(0, True)]).min_saved_tokens == math.inf
    assert sorted(map(len, groups_of_shares(41))) == [1, 1, 1]
    # a longer row by itself: two groups are as much
    rows = (*rows, RowMetadata(3, 0, 60, 0.0, 0, (), 0, prompt_length=20))
    batch = BatchMetadata("b", 0, (), rows)
    assert sorted(map(len, groups_of_shares(40))) == [1, 1, 2]
    assert [3] in groups_of_shares(40)


@pytest.mark.parametrize("role", ["rollout", "", "Ref", "a/b", "../x", "ref-1"])
def test_what_a_controller_cannot_be_called(role: str) -> None:
    config = ActorConfig(path="/no/model")
    with pytest.raises(ConfigError, match="role: expected a lower-case word other than rollout"):
        TrainController(FSDPPPOActor(config), None, role=role)  # type: ignore[arg-type]
