"""What room groups take in stores, and how long: slow messages, groups that are given up."""

from __future__ import annotations

import asyncio
import random

import pytest
from simulation.behavior import Behavior, Number
from simulation.settings import Settings
from simulation.training_run import TrainingRun, play
from simulation.virtual_loop import in_virtual_time

from areal_sc.config.schema import OverBound, WeightUpdateMethod
from areal_sc.controller.rollout.rollout_controller import RolloutController
from areal_sc.errors import ConfigError

FULL_ROWS = 60
"""Tokens of a completion that fills the context of `Settings`."""


def lognormal(mean: float, sigma: float) -> Number:
    return lambda rng: mean * rng.lognormvariate(0.0, sigma)


def up_to(limit: float) -> Number:
    return lambda rng: limit * rng.random()


def slow_messages(seed: int) -> Settings:
    """Sweeps take as long as steps, and so do the replies of groups that have sealed."""
    return Settings(
        num_steps=10,
        num_rollout_workers=3,
        seed=seed,
        behavior=Behavior(
            generation_s=lognormal(1.0, 1.0), reply_delay_s=up_to(20.0), sweep_delay_s=up_to(5.0)
        ),
    )


@pytest.mark.parametrize("seed", range(12))
def test_no_sweep_takes_what_somebody_needs(seed: int) -> None:
    """`TrainingRun` checks each shard that goes, and that none stays at the end."""
    play(slow_messages(seed))


def least_room(seed: int) -> Settings:
    """Stores that hold one batch of full rows, slow groups that are given up, and slow messages."""
    rng = random.Random(seed)
    num_workers, batch_groups = rng.randint(1, 3), rng.randint(1, 6)
    return Settings(
        num_steps=10,
        over_bound=OverBound.regenerate,
        max_staleness=rng.randint(0, 2),
        batch_groups=batch_groups,
        num_rollout_workers=num_workers,
        store_groups=-(-batch_groups // num_workers),
        seed=seed,
        behavior=Behavior(
            generation_s=lognormal(rng.choice([1.0, 4.0]), 1.5),
            completion_tokens=FULL_ROWS,
            training_s=up_to(2.0),
            latency_s=rng.choice([0.001, 0.1, 0.2]),
            reply_delay_s=up_to(rng.choice([0.0, 2.0])),
            sweep_delay_s=up_to(rng.choice([0.0, 2.0])),
            give_up_s=up_to(rng.choice([0.0, 3.0])),
            group_rejection=rng.choice([0.0, 0.2]),
        ),
    )


@pytest.mark.parametrize("seed", range(30))
def test_a_group_that_is_given_up_keeps_its_room_until_it_has_ended(seed: int) -> None:
    """Simulated workers refuse a group that may not fit; a run that waits for ever fails."""
    play(least_room(seed))


@pytest.mark.parametrize("method", [WeightUpdateMethod.pull, WeightUpdateMethod.disk])
def test_ranks_hold_nothing_but_what_is_published(method: WeightUpdateMethod) -> None:
    """`TrainingRun` counts their shards after each step."""
    play(Settings(num_steps=3, num_ranks=2, weight_update=method))


@in_virtual_time
async def test_batches_that_are_asked_for_and_cancelled_cost_no_room() -> None:
    """Each while stores are swept; in the end nothing would be admitted any more."""
    settings = Settings(
        num_steps=8,
        max_staleness=0,
        store_groups=2,
        behavior=Behavior(sweep_delay_s=5.0, generation_s=20.0),
    )
    async with TrainingRun(settings).started() as run:
        for _ in range(settings.num_steps):
            await run.step()
            asking = asyncio.create_task(run.rollout.prepare_batch_async(run.prompts, run.workflow))
            await asyncio.sleep(1.0)
            asking.cancel()
        await run.check_end()


@in_virtual_time
async def test_the_batch_of_a_version_is_the_same_until_the_next_is_published() -> None:
    settings = Settings(num_steps=6, max_staleness=1, store_groups=2, num_rollout_workers=2)
    async with TrainingRun(settings).started() as run:
        for _ in range(settings.num_steps):
            first, again = await asyncio.gather(
                *(run.rollout.prepare_batch_async(run.prompts, run.workflow) for _ in range(2))
            )
            await asyncio.sleep(100.0)  # generation goes on as far as it may
            await run.step()  # which reads all rows
            assert run.batches[-1] is again is first
        await run.check_end()


@in_virtual_time
async def test_a_shard_whose_reply_is_lost_is_forgotten_with_others() -> None:
    """Nobody knows its name. Its worker, which gave no reply, is started again, and adopts it."""
    behavior = Behavior(reply_delay_s=1e6)
    settings = Settings(num_steps=6, group_timeout_s=100.0, behavior=behavior)
    async with TrainingRun(settings).started() as run:
        call = run.rollout.rollout_batch_async(run.prompts, run.workflow, 4)
        waiting = asyncio.create_task(call)
        await asyncio.sleep(150.0)
        assert all(worker.store.group_of for worker in run.cluster.rollout_workers)
        behavior.reply_delay_s = 0.0
        batch = await waiting
        assert {row.attempt for row in batch.rows} == {1}
        for _ in range(settings.num_steps):
            await run.step()
        await run.check_end()


@in_virtual_time
async def test_a_cancelled_rollout_batch_leaves_nothing() -> None:
    """Whether its groups wait, run, or have sealed; its room is there for the next one."""
    behavior = Behavior(generation_s=lognormal(4.0, 1.0), give_up_s=up_to(3.0))
    settings = Settings(store_groups=2, behavior=behavior)
    async with TrainingRun(settings).started() as run:
        for delay_s in (0.0005, 0.002, 1.0, 4.0, 10.0):
            batch = run.rollout.rollout_batch_async(run.prompts, run.workflow, 20)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await batch
        await run.rollout.rollout_batch_async(run.prompts, run.workflow, 4)
        await run.step()
        await asyncio.sleep(100.0)
        groups = [set(worker.store.group_of.values()) for worker in run.cluster.rollout_workers]
        assert all(group_id >= 0 for held in groups for group_id in held)


@in_virtual_time
async def test_the_last_step_of_the_settings_is_the_last_of_a_loop_of_ones_own() -> None:
    """Nothing is admitted beyond it, and a batch beyond it is refused at once."""
    run = TrainingRun(Settings(max_staleness=2))
    run.rollout.config.total_steps = 3
    rollout = RolloutController(run.rollout.engine, run.cluster, runtime=run.runtime)
    run.rollout, actor = rollout, run.actor
    run.cluster.on_forgotten = lambda shard_id, group_id: None  # the run's book is not kept
    async with run.started():
        for _ in range(3):
            batch = await rollout.prepare_batch_async(run.prompts, run.workflow)
            batch = actor.compute_advantages(batch)
            batch = await actor.compute_proximal_logprobs_async(batch)
            await actor.ppo_update_async(batch)
            await actor.publish_weights_async(rollout)
        assert rollout.groups.ledger.account()["admitted"] == 3 * run.settings.batch_groups
        with pytest.raises(ConfigError, match=r"policy version 3: total_steps is 3"):
            await rollout.prepare_batch_async(run.prompts, run.workflow)
