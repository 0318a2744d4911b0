"""A run that goes back in place: the same controllers and workers, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest
from simulation.behavior import Behavior
from simulation.settings import Settings
from simulation.training_run import TrainingRun
from simulation.virtual_loop import in_virtual_time

from areal_sc.config.schema import OverBound, WeightUpdateMethod
from areal_sc.controller.ledger.ledger_records import WENT_BACK
from areal_sc.controller.rollout.evaluation import EvaluationOutcome
from areal_sc.controller.rollout.rejections import INITIAL_STATE, RolloutState
from areal_sc.errors import StepsLost

BEHAVIOR = Behavior(
    generation_s=lambda rng: rng.lognormvariate(0.0, 1.0), publication_s=3.0, group_rejection=0.1
)
"""Updates take long: some are on their way when the run goes back."""


async def go_back(run: TrainingRun, step: int, state: RolloutState) -> None:
    await run.actor.load_snapshot_async(step)
    await run.rollout.go_back_async(state)
    assert run.rollout.version == run.actor.version == step
    await run.actor.share_weights_async(run.rollout)


async def steps_up_to(run: TrainingRun, step: int) -> None:
    while run.actor.version < step:
        await run.step(checks_business=False)


@in_virtual_time
@pytest.mark.parametrize("method", WeightUpdateMethod)
@pytest.mark.parametrize("mode", OverBound)
async def test_what_is_left_trains_each_row_once(
    mode: OverBound, method: WeightUpdateMethod
) -> None:
    """`TrainingRun` compares each batch, and the account, with its own books."""
    settings = Settings(num_steps=7, over_bound=mode, weight_update=method, behavior=BEHAVIOR)
    run = TrainingRun(settings)
    async with run.started():
        await steps_up_to(run, 2)
        state = await run.rollout.state_async()
        await (await run.actor.ranks.begin_snapshot())()
        await steps_up_to(run, 4)
        await go_back(run, 2, state)
        await steps_up_to(run, 5)
        await go_back(run, 2, state)
        await steps_up_to(run, settings.num_steps)
        await run.check_end()
    lineages = {policy[0] for w in run.cluster.rollout_workers for policy in w.policies}
    assert len(lineages) == 3
    assert all(w.policies == sorted(w.policies) for w in run.cluster.rollout_workers)
    num_undone = sum(reason == WENT_BACK for reason in run.rejected.values())
    assert num_undone >= 5 * settings.batch_groups, "those that five undone steps had trained"


@in_virtual_time
async def test_who_waits_while_steps_are_lost_is_told_until_the_run_goes_back() -> None:
    """New rollout workers have to wait for weights that nobody can make."""
    settings = Settings(
        num_steps=4, memory_snapshots=False, behavior=replace(BEHAVIOR, evaluation_s=50.0)
    )
    run = TrainingRun(settings)
    async with run.started():

        def evaluate() -> Coroutine[Any, Any, EvaluationOutcome]:
            return run.rollout.evaluate_async(run.prompts, run.workflow, num_prompts=3)

        await steps_up_to(run, 2)
        evaluation = asyncio.create_task(evaluate())
        await asyncio.sleep(1.0)
        for worker in (*run.cluster.train_workers, *run.cluster.rollout_workers):
            worker.end("signal 9 (SIGKILL)", keeps_memory=False)
        for waiting in (lambda: evaluation, evaluate, run.step):
            async with asyncio.timeout(30.0):
                with pytest.raises(StepsLost, match="a snapshot has to be loaded"):
                    await waiting()
        await go_back(run, 0, INITIAL_STATE)
        assert (await evaluate()).num_prompts == 3
        await steps_up_to(run, settings.num_steps)
        await run.check_end()


@in_virtual_time
async def test_without_a_snapshot_the_ranks_begin_with_their_first_model() -> None:
    settings = Settings(num_steps=4, num_ranks=2, behavior=BEHAVIOR)
    run = TrainingRun(settings)
    async with run.started():
        await steps_up_to(run, 2)
        await go_back(run, 0, INITIAL_STATE)
        await steps_up_to(run, settings.num_steps)
        await run.check_end()
    assert run.actor.num_restarts == 0  # of a controller that is closed
    for rank in run.cluster.train_workers:
        assert sorted({version for version, _ in rank.past}) == list(range(settings.num_steps))


@in_virtual_time
async def test_a_snapshot_may_be_long_on_its_way_to_nodes_that_share_no_folder() -> None:
    """Ranks that wait for it do not hang."""
    settings = Settings(num_steps=3, num_ranks=2, behavior=BEHAVIOR)
    run = TrainingRun(settings)
    async with run.started():
        await steps_up_to(run, 2)
        state = await run.rollout.state_async()
        await (await run.actor.ranks.begin_snapshot())()
        for workers in run.actor.fleet.nodes:
            workers.node.facts = replace(workers.node.facts, shares_folder=False)
        transport, behavior = run.cluster.config.transport, run.cluster.behavior
        run.cluster.behavior = replace(behavior, sealing_s=2 * transport.call_timeout_s)
        await run.actor.load_snapshot_async(2)
        run.cluster.behavior = behavior
        assert run.actor.num_restarts == 0
        await run.rollout.go_back_async(state)
        await run.actor.share_weights_async(run.rollout)
        await steps_up_to(run, settings.num_steps)
        await run.check_end()
