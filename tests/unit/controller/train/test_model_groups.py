"""Ranks that hold a model together get the same rows, and one of them replies."""

from __future__ import annotations

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


@pytest.mark.parametrize("role", ["rollout", "", "Ref", "a/b", "../x", "ref-1"])
def test_what_a_controller_cannot_be_called(role: str) -> None:
    config = ActorConfig(path="/no/model")
    with pytest.raises(ConfigError, match="role: expected a lower-case word other than rollout"):
        TrainController(FSDPPPOActor(config), None, role=role)  # type: ignore[arg-type]
