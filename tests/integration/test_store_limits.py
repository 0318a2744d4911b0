"""Whole runs whose stores have less room than generation could fill."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from integration.run_process import LIMIT_S, RunProcess, tiny_run
from integration.scripts import episodes
from integration.scripts.tiny_run import letter_prompts
from safetensors.torch import load_file
from waiting import wait_until

from areal_sc import GRPOConfig, LocalGenerator, RolloutController, SingleTurnWorkflow
from areal_sc.errors import ConfigError
from areal_sc.schedulers.base import Scheduler
from areal_sc.sizing.store_room import trajectory_bytes

BATCH_GROUPS = 4
GROUP_BYTES = trajectory_bytes(2 * 64)
"""Of the longest rows in `tiny_run.yaml`: a group has two, of at most 64 tokens."""

NUM_STEPS = 6


def test_a_limit_of_one_batch_slows_admission_and_fails_nothing(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    """Beside a run without the limit, which generates all rows at once, so far may it run ahead."""
    settings = (
        *(f"total_steps={NUM_STEPS}", f"rollout.max_staleness={NUM_STEPS - 1}"),
        *("rollout.num_workers=2", "generation.max_new_tokens=54", "rollout.admission=eager"),
    )
    limit_bytes = BATCH_GROUPS * GROUP_BYTES
    limit = f"rollout.store_bytes={limit_bytes // 2}"  # of each of the two workers
    with (
        tiny_run(tmp_path / "free", tiny_model_folder, *settings) as free,
        tiny_run(tmp_path / "limited", tiny_model_folder, *settings, limit) as limited,
    ):
        for run in (free, limited):
            run.finish()
            assert run.steps() == list(range(1, NUM_STEPS + 1))
            summary = run.summary()
            assert summary["num_rows_trained"] == NUM_STEPS * BATCH_GROUPS * 2
            assert summary["num_rows_trained_twice"] == 0
            assert summary["num_episodes_rejected"] == 0
        # without the limit all groups are admitted under version 0; with it, none ahead of its step
        assert group_staleness(free) == list(range(NUM_STEPS))
        assert group_staleness(limited) == [0] * NUM_STEPS
        weights = load_file(tiny_model_folder / "model.safetensors").values()
        weights_bytes = sum(values.nbytes for values in weights)
        # a step's counters are those of its end, when the rows of its batch begin to be swept
        free_groups, free_bytes = most_held(free, weights_bytes)
        assert free_groups > BATCH_GROUPS
        assert free_bytes > limit_bytes
        groups, num_bytes = most_held(limited, weights_bytes)
        assert groups <= BATCH_GROUPS
        assert num_bytes <= limit_bytes


FULL_ROWS = (
    *("rollout.group_size=1", "rollout.max_context_tokens=57"),  # no field fills its cache lines
    *("actor.ppo.advantage=batch", "actor.ppo.advantage_std=batch"),
)


@pytest.mark.parametrize(
    ("every_longer", "num_rows"),
    [(0, 1), (3, 1), (3, 2)],
    ids=["all fit", "some are too long", "episodes of two rows"],
)
def test_the_least_store_that_is_accepted_holds_a_batch_of_full_rows(
    tiny_config: Callable[..., GRPOConfig],
    start_rollout: Callable[..., Any],
    every_longer: int,
    num_rows: int,
) -> None:
    settings = (*FULL_ROWS, f"rollout.max_episode_tokens={57 * num_rows}")
    with pytest.raises(ConfigError) as refusal:
        tiny_config(*settings, "rollout.store_bytes=1")
    (least,) = map(
        int, re.findall(r"rollout\.store_bytes: expected 0, or at least (\d+)", str(refusal.value))
    )
    workflow = episodes.Tokens(57, every_longer, num_rows)
    prompts = letter_prompts(16, seed=9)
    num_kept = [3, 3, 2] if every_longer else [BATCH_GROUPS] * 3  # the others are rejected
    with start_rollout(*settings, f"rollout.store_bytes={least}") as rollout:
        for expected in num_kept:
            batch = rollout.rollout_batch(prompts, workflow, BATCH_GROUPS)
            assert [row.sequence_length for row in batch.rows] == [57] * expected * num_rows
            (stats,) = rollout.worker_stats()
            assert stats["store_bytes"] == expected * least // BATCH_GROUPS
        rejected = set(rollout.rejections.episodes)
        assert rejected == ({"too_long"} if every_longer else set())


async def test_the_room_of_groups_that_are_given_up_comes_back_when_they_have_ended(
    tiny_config: Callable[..., GRPOConfig], scheduler: Scheduler, tmp_path: Path
) -> None:
    """Groups that never end by themselves fill the store; the next ones get their room."""
    config = tiny_config(f"rollout.store_bytes={BATCH_GROUPS * GROUP_BYTES}").rollout
    prompts = [{"prompt": f"{letter}=", "answer": letter} for letter in "abcd"]
    rollout = RolloutController(LocalGenerator(config), scheduler)
    try:
        async with asyncio.timeout(LIMIT_S):
            await rollout.start_async()
            waiting = asyncio.create_task(
                rollout.rollout_batch_async(prompts, episodes.Waits(str(tmp_path)))
            )
            await asyncio.to_thread(wait_for_files, tmp_path, "*.begun", len(prompts))
            waiting.cancel()
            workflow = SingleTurnWorkflow(episodes.right)
            batch = await rollout.rollout_batch_async(prompts, workflow)
            assert len(batch.group_ids) == len(prompts)
            await asyncio.to_thread(wait_for_files, tmp_path, "*.ended", len(prompts))
    finally:
        await rollout.close_async()


def wait_for_files(folder: Path, pattern: str, number: int) -> None:
    wait_until(lambda: len(list(folder.glob(pattern))) >= number)


def group_staleness(run: RunProcess) -> list[int]:
    """Of each step the oldest group's, in policy versions."""
    return [record["group_staleness_max"] for record in run.records("step")]


def most_held(run: RunProcess, weights_bytes: int) -> tuple[int, int]:
    """(groups, bytes) in all rollout stores at the end of any step.

    Each of a group's two episodes is a shard. The trainer's store holds one more then, the newest
    weights.
    """
    counters = [record["counters"] for record in run.records("step")]
    return (
        (max(int(values["store_shards"]) for values in counters) - 1) // 2,
        max(int(values["store_bytes"]) for values in counters) - weights_bytes,
    )
