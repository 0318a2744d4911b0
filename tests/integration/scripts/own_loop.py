"""The training loop in the user's own script, as the README shows it; says each step.

It raises after step `task.raise_after`, if that is set. A test can hold it: see `tiny_run.yaml`.
"""

from __future__ import annotations

import sys
from pathlib import Path

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


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    scheduler = make_scheduler(config.scheduler)
    actor = TrainController(make_actor(config.actor), scheduler)
    rollout = RolloutController(make_generator(config.rollout), scheduler)
    prompts, task = letter_prompts(64, seed=0), config.task
    workflow = GatedWorkflow(partial, task["num_free_episodes"], Path(task["gate"]))
    with start(actor, rollout):
        for step in range(actor.version, config.total_steps):
            batch = rollout.prepare_batch(prompts, workflow)
            batch = actor.compute_advantages(batch)
            batch = actor.compute_proximal_logprobs(batch)
            actor.ppo_update(batch)
            actor.publish_weights(rollout)
            print(f"step={step + 1}", flush=True)
            if actor.version == task.get("raise_after"):
                raise LookupError(f"nothing is known about version {actor.version}")


if __name__ == "__main__":
    sys.exit(run_script(main))
