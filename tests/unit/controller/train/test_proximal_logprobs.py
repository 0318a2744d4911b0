"""When the ranks are asked for proximal log-probabilities, in virtual time."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from simulation.settings import Settings
from simulation.training_run import TrainingRun
from simulation.virtual_loop import in_virtual_time

from areal_sc.algorithms.named_loss import NamedLoss, loss_of
from areal_sc.config.ppo_settings import ClipCenter, PPOConfig
from areal_sc.controller.train.train_step import TrainStep
from areal_sc.errors import ConfigError, MetadataError
from areal_sc.workers.rank_methods import COMPUTE


@in_virtual_time
@pytest.mark.parametrize("num_minibatches", [1, 2])
async def test_only_minibatches_after_the_first_need_a_recompute(num_minibatches: int) -> None:
    settings = Settings(num_minibatches=num_minibatches, num_ranks=2)
    async with TrainingRun(settings).started() as run:
        asked: list[tuple[str, int, int]] = []
        for name in ("train/0", "train/1"):
            worker: Any = run.cluster.workers[name]
            compute = worker.compute_field

            async def noted(args: Any, name: str = name, compute: Any = compute) -> Any:
                asked.append((name, args.num_left_out, len(args.batch.rows)))
                return await compute(args)

            worker.served["compute"] = COMPUTE.served_by(noted)
        batch = await run.rollout.prepare_batch_async(run.prompts, run.workflow)
        batch = run.actor.compute_advantages(batch)
        batch = await run.actor.compute_proximal_logprobs_async(batch)
        stats, asked = await run.actor.ppo_update_async(batch), asked
    assert stats == {"loss": 0.0}
    if num_minibatches == 1:
        assert asked == []
    else:
        assert sorted(name for name, *_ in asked) == ["train/0", "train/1"]
        assert all(0 < left_out == num_rows / 2 for _, left_out, num_rows in asked)


@in_virtual_time
async def test_a_second_update_of_a_version_needs_a_recompute() -> None:
    """Its own forward is not that of the proximal policy any more."""
    async with TrainingRun(Settings(num_minibatches=1, num_ranks=2)).started() as run:
        batch = await run.rollout.prepare_batch_async(run.prompts, run.workflow)
        batch = await run.actor.compute_proximal_logprobs_async(run.actor.compute_advantages(batch))
        await run.actor.ppo_update_async(batch)
        with pytest.raises(ValueError, match="proximal_logprobs"):
            await run.actor.ppo_update_async(batch)
        batch = await run.actor.compute_proximal_logprobs_async(batch)
        assert "proximal_logprobs" in batch.fields


@in_virtual_time
async def test_a_batch_that_several_updates_train_on_needs_them_whole() -> None:
    async with TrainingRun(Settings(num_minibatches=2, num_ranks=2)).started() as run:
        rows = await run.rollout.prepare_batch_async(run.prompts, run.workflow)
        rows = run.actor.compute_advantages(rows)
        batch = await run.actor.compute_proximal_logprobs_async(rows)
        with pytest.raises(MetadataError, match=r"compute_proximal_logprobs\(.*whole=True\)"):
            await run.actor.update_async(batch, "cross_entropy", num_minibatches=4)
        first, second = batch.split(2, "episodes")  # by hand
        with pytest.raises(MetadataError, match="for one ppo_update"):
            await run.actor.ppo_update_async(first)
        run.actor._step.check_first(second, 2)
        await run.actor.ppo_update_async(batch)
        with pytest.raises(MetadataError, match="for one ppo_update"):
            await run.actor.ppo_update_async(batch)
        whole = await run.actor.compute_proximal_logprobs_async(rows, whole=True)
        await run.actor.ppo_update_async(whole)
        await run.actor.ppo_update_async(whole)


@pytest.mark.parametrize(
    ("changes", "is_needed"),
    [
        ({}, True),
        ({"loss": "my_losses:mine"}, True),  # nobody knows what it reads
        ({"loss": "my_losses:mine", "clip_center": ClipCenter.behavior}, False),
        ({"clip_center": ClipCenter.interpolated}, False),
        ({"loss": "dpo"}, False),
    ],
)
def test_a_loss_that_does_not_read_them_needs_none(
    changes: dict[str, Any], is_needed: bool
) -> None:
    ppo = PPOConfig(**changes)
    ranks: Any = SimpleNamespace(step=SimpleNamespace(num_updates=0))
    step = TrainStep(ranks, ppo, loss_of(ppo), ranks, ranks)
    assert step.needs_proximal_logprobs is is_needed


@in_virtual_time
async def test_what_a_loss_cannot_have_is_told_before_a_rank_has_begun_an_update() -> None:
    plain, kl = {"clip_center": "behavior"}, {"clip_center": "behavior", "kl_coefficient": 0.1}
    async with TrainingRun(Settings(num_minibatches=2, num_ranks=2)).started() as run:
        batch = await run.rollout.prepare_batch_async(run.prompts, run.workflow)
        known = run.actor.compute_advantages(batch)
        for rows, name, settings, missing in (
            (batch, "policy_gradient", plain, "not ['advantages']"),
            (known, "policy_gradient", kl, "not ['reference_logprobs']"),
            (known, "value", {}, "not ['returns', 'values']"),
            (known, "dpo", {}, "loss dpo: expected pairs of a data set"),
        ):
            with pytest.raises((MetadataError, ConfigError), match=re.escape(missing)):
                await run.actor.update_async(rows, NamedLoss(name, settings), advances=False)
        with pytest.raises(MetadataError, match="proximal_logprobs"):
            await run.actor.update_async(
                known, NamedLoss("policy_gradient"), num_minibatches=2, advances=False
            )
        await run.actor.update_async(known, NamedLoss("policy_gradient"), advances=False)
