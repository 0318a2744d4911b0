"""Updates by any loss, of a model of any role, in virtual time; and models that only compute."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from simulation.settings import Settings, configs
from simulation.training_run import TrainingRun
from simulation.virtual_loop import in_virtual_time, run_virtual
from waiting import until

from areal_sc.algorithms.named_loss import NamedLoss
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.engines.handles import FSDPPPOActor, make_actor
from areal_sc.errors import ConfigError, StaleCall, StepsLost
from areal_sc.workers.operations import Kind
from areal_sc.workers.rank_methods import TRY_LOSS, UPDATE

SETTINGS = Settings(num_steps=4, num_ranks=2, has_reference=True, is_reference_frozen=False)


@in_virtual_time
async def test_a_second_model_is_trained_by_any_loss_and_comes_back_after_a_death() -> None:
    async with TrainingRun(SETTINGS).started() as run:
        (critic,) = run.others
        assert isinstance(critic, TrainController)
        tried, asked = list[Any](), list[Any]()
        worker = run.cluster.workers["ref/0"]
        for method, seen in ((TRY_LOSS, tried), (UPDATE, asked)):
            served = worker.served[method.name]

            async def noted(args: object, served=served, seen=seen) -> object:
                seen.append(args)
                return await served.handler(args)

            worker.served[method.name] = method.served_by(noted)
        for number in range(SETTINGS.num_steps):
            batch = await run.rollout.prepare_batch_async(run.prompts, run.workflow)
            metrics = await critic.update_async(batch, "cross_entropy", num_minibatches=2)
            assert (metrics["loss"], critic.version) == (0.0, number + 1)
            same = NamedLoss("cross_entropy", {})
            await critic.update_async(batch, same, advances=False)
            assert critic.version == number + 1
            if number == 1:
                run.cluster.workers["ref/1"].end("killed")
            await run.step(checks_business=False)
        assert len(tried) == 1, "each loss is tried once"
        assert {(len(args.rows), args.advances) for args in asked} == {(2, True), (1, False)}
        assert len({args.loss for args in asked}) == 1, "equal losses have one number"


@in_virtual_time
async def test_a_loss_whose_metrics_depend_on_the_rank_is_refused_before_it_trains() -> None:
    async with TrainingRun(SETTINGS).started() as run:
        (critic,) = run.others
        worker = run.cluster.workers["ref/1"]

        async def others(_: object) -> tuple[str, ...]:
            return ("of_rank_1",)

        worker.served[TRY_LOSS.name] = TRY_LOSS.served_by(others)
        batch = await run.rollout.prepare_batch_async(run.prompts, run.workflow)
        with pytest.raises(ConfigError, match="of_rank_1 on rank 1"):
            await critic.update_async(batch, "cross_entropy")
        assert critic.version == 0


@in_virtual_time
async def test_an_update_that_was_given_up_is_joined_by_the_same_one_alone() -> None:
    async with TrainingRun(SETTINGS).started() as run:
        (critic,) = run.others
        batch = await run.rollout.prepare_batch_async(run.prompts, run.workflow)
        batch = run.actor.compute_advantages(batch)
        call = critic.update_async(batch, "cross_entropy", advances=False)
        given_up = asyncio.create_task(call)
        await until(lambda: run.cluster.workers["ref/0"].operations.noted)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        with pytest.raises(StaleCall, match="asked for before, with something else"):
            await critic.update_async(batch, "policy_gradient", advances=False)
        await critic.update_async(batch, "cross_entropy", advances=False)
        assert critic.version == 0
        (noted,) = run.cluster.workers["ref/0"].operations.noted
        assert noted.kind is Kind.update, "it was made once"


@in_virtual_time
async def test_a_frozen_model_is_refused_what_would_change_it() -> None:
    actor_config, _ = configs(SETTINGS)
    handle = make_actor(actor_config, is_frozen=True)
    assert handle.config == replace(actor_config, is_frozen=True)
    assert isinstance(handle, FSDPPPOActor)
    run = TrainingRun(replace(SETTINGS, has_reference=False))
    reference = TrainController(handle, run.cluster, role="judge", runtime=run.runtime)
    run.others.append(reference)
    async with run.started():
        batch = await run.step(checks_business=False)
        refused = "the model of role 'judge' is frozen"
        with pytest.raises(ConfigError, match=refused):
            await reference.update_async(batch, "cross_entropy")
        with pytest.raises(ConfigError, match=refused):
            await reference.ppo_update_async(batch)
        with pytest.raises(ConfigError, match=refused):
            await reference.sft_update_async([{"input_ids": [1], "loss_mask": [1]}], [0])
        with pytest.raises(ConfigError, match=refused):
            await reference.publish_weights_async(run.rollout)


@in_virtual_time
async def test_demonstrations_move_the_version_of_a_policy_by_no_step() -> None:
    async with TrainingRun(SETTINGS).started() as run:
        (imitator,) = run.others
        rows = run.prompts
        with pytest.raises(ConfigError, match="expected advances=False with the policy"):
            await run.actor.sft_update_async(rows, [0])
        seen = list[Any]()
        served = run.cluster.workers["train/0"].served[UPDATE.name]

        async def noted(args: Any) -> object:
            seen.append(args)
            return await served.handler(args)

        run.cluster.workers["train/0"].served[UPDATE.name] = UPDATE.served_by(noted)
        for _ in range(3):
            await run.actor.sft_update_async(rows, [0], advances=False)
        await imitator.sft_update_async(rows, [0])
        assert (run.actor.version, imitator.version) == (0, 1)
        await run.step(checks_business=False)
        assert run.actor.version == 1
        steps = [args.operation.version for args in seen]
        assert len(steps) > 3
        assert set(steps) == {0}, "the rate is that of the first step"


@pytest.mark.parametrize("has_snapshots", [True, False])
def test_a_critic_that_dies_after_its_update_needs_a_snapshot_of_its_version(
    has_snapshots: bool,
) -> None:
    async def scenario() -> None:
        settings = replace(SETTINGS, memory_snapshots=has_snapshots)
        async with TrainingRun(settings).started() as run:
            (critic,) = run.others
            for number in range(settings.num_steps):
                batch = await run.rollout.prepare_batch_async(run.prompts, run.workflow)
                if number == 2 and not has_snapshots:
                    with pytest.raises(StepsLost, match="of which there is no snapshot"):
                        await critic.update_async(batch, "cross_entropy")
                    return
                await critic.update_async(batch, "cross_entropy")
                assert critic.version == number + 1
                await run.step(checks_business=False)
                if number == 1:
                    run.cluster.workers["ref/1"].end("killed")
                if number == 2:
                    made = run.cluster.workers["ref/0"].operations.noted
                    steps = {it.version for it in made if it.kind is Kind.update}
                    assert steps == {2}, "the new life makes no step again"

    run_virtual(scenario())
