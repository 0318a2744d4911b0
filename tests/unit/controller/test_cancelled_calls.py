"""Every call of a script is cancelled now and then, at any of its awaits, and made again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest
from simulation.behavior import Behavior
from simulation.settings import Settings
from simulation.training_run import TrainingRun
from simulation.virtual_loop import in_virtual_time

from areal_sc.config.schema import OverBound, WeightUpdateMethod

T = TypeVar("T")


def any_settings(rng: random.Random) -> Settings:
    """Slow messages, groups that are given up, and often no more room than a batch takes."""

    def up_to(*limits: float) -> Callable[[random.Random], float]:
        limit = rng.choice(limits)
        return lambda its: limit * its.random()

    num_workers, batch_groups = rng.randint(1, 4), rng.randint(1, 5)
    return Settings(
        num_steps=6,
        over_bound=rng.choice(list(OverBound)),
        max_staleness=rng.randint(1, 3),
        batch_groups=batch_groups,
        num_rollout_workers=num_workers,
        num_ranks=rng.randint(1, 2),
        store_groups=-(-batch_groups // num_workers) + rng.choice([0, 0, 2, 50]),
        max_concurrent_groups=rng.choice([1, 3, 64]),
        weight_update=rng.choice([WeightUpdateMethod.pull, WeightUpdateMethod.disk]),
        behavior=Behavior(
            generation_s=up_to(2.0, 12.0),
            completion_tokens=60,
            training_s=up_to(0.1, 10.0),
            sealing_s=up_to(1.0),
            publication_s=up_to(0.1, 5.0),
            latency_s=rng.choice([0.001, 0.2]),
            reply_delay_s=up_to(0.0, 20.0),
            sweep_delay_s=up_to(0.0, 20.0),
            give_up_s=up_to(0.0, 10.0),
            group_rejection=rng.choice([0.0, 0.3]),
        ),
    )


async def until_done(
    rng: random.Random, call: Callable[[], Coroutine[Any, Any, T]], *, is_repeated: bool = True
) -> T | None:
    """What the call returns in the end; None if it was cancelled and is not to be repeated."""
    while True:
        limit_s = rng.choice([0.0, 0.01, 0.5, 3.0, 10.0]) * rng.random()
        try:
            async with asyncio.timeout(limit_s if rng.random() < 0.5 else None) as limit:
                return await call()
        except TimeoutError:
            if not limit.expired():
                raise
            if not is_repeated:
                return None


async def step(run: TrainingRun, rng: random.Random) -> None:
    rollout, actor = run.rollout, run.actor
    beside = [
        lambda: rollout.rollout_batch_async(run.prompts, run.workflow, 3),
        lambda: rollout.evaluate_async(run.prompts, run.workflow, num_prompts=3),
    ]
    asking = asyncio.create_task(until_done(rng, rng.choice(beside), is_repeated=False))
    await asyncio.sleep(5.0 * rng.random())
    asking.cancel()  # it may have taken all the room that there is
    batch = await until_done(rng, lambda: rollout.prepare_batch_async(run.prompts, run.workflow))
    assert batch is not None
    run.batches.append(batch)
    run.check_batch(batch)
    asked = actor.compute_advantages(batch)
    trained = await until_done(rng, lambda: actor.compute_proximal_logprobs_async(asked))
    assert trained is not None
    await until_done(rng, lambda: actor.ppo_update_async(trained))
    run.check_step_was_trained(trained)
    version = actor.version
    while actor.version == version:
        await until_done(rng, lambda: actor.publish_weights_async(rollout), is_repeated=False)


@in_virtual_time
@pytest.mark.parametrize("seed", range(12))
async def test_calls_that_are_cancelled_leave_nothing_behind(seed: int) -> None:
    """`TrainingRun` checks admissions, batches, sweeps; at the end the account and the stores."""
    rng = random.Random(seed)
    run = TrainingRun(any_settings(rng))
    async with run.started():
        for _ in range(run.settings.num_steps):
            await step(run, rng)
        run.rollout._outside.forget()
        await asyncio.sleep(100.0)
        await run.check_end()
