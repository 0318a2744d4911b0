"""A loop of one's own with three models: trained on answers, frozen, trained on demonstrations.

The environment's `DIE_AT` names a place where the script ends as by `kill -9`: see `killed_run`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from killed_run import die_at
from tiny_run import GatedWorkflow, letter_prompts, partial

from areal_sc import (
    GRPOConfig,
    RolloutController,
    TrainController,
    load_config,
    make_actor,
    make_generator,
    make_scheduler,
    run_script,
    start,
)

DEMONSTRATIONS = [{"input_ids": [1, 2, 3 + row, 4], "loss_mask": [0, 1, 1, 1]} for row in range(8)]


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    if place := os.environ.get("DIE_AT"):
        die_at(place)
    scheduler = make_scheduler(config.scheduler)
    rollout = RolloutController(make_generator(config.rollout), scheduler)
    reference, imitator, actor = (
        TrainController(make_actor(config.actor, is_frozen=role == "ref"), scheduler, role=role)
        for role in ("ref", "imitator", "train")
    )
    prompts, task = letter_prompts(64, seed=0), config.task
    workflow = GatedWorkflow(partial, task["num_free_episodes"], Path(task["gate"]))
    with start(reference, imitator, actor, rollout) as taken:
        print(f"taken={taken is not None} version={actor.version} imitator={imitator.version}")
        while (step := actor.version) < config.total_steps:
            if imitator.version == step:
                imitator.sft_update(DEMONSTRATIONS, [step % 8, (step + 1) % 8])
            batch = rollout.prepare_batch(prompts, workflow)
            batch = reference.compute_logprobs(batch, field="reference_logprobs")
            batch = actor.compute_advantages(batch)
            batch = actor.compute_proximal_logprobs(batch)
            stats = actor.ppo_update(batch)
            sizes = [stats["store_bytes"] for stats in reference.worker_stats()]
            print(f"step={step + 1} gap={stats['gap']:.7f} reference_bytes={sizes[0]}", flush=True)
            actor.publish_weights(rollout)
        assert imitator.version == config.total_steps


if __name__ == "__main__":
    sys.exit(run_script(main))
