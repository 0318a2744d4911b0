"""The training loop in the user's own script, which raises in the middle of it."""

from __future__ import annotations

import sys

from tiny_run import letter_prompts, partial

from areal_sc import (
    FSDPPPOActor,
    GRPOConfig,
    LocalGenerator,
    RolloutController,
    SingleTurnWorkflow,
    TrainController,
    load_config,
    make_scheduler,
    run_script,
    start,
)


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    scheduler = make_scheduler(config.scheduler)
    actor = TrainController(FSDPPPOActor(config.actor), scheduler)
    rollout = RolloutController(LocalGenerator(config.rollout), scheduler)
    prompts, workflow = letter_prompts(64, seed=0), SingleTurnWorkflow(partial)
    with start(actor, rollout):
        batch = rollout.prepare_batch(prompts, workflow)
        batch = actor.compute_proximal_logprobs(actor.compute_advantages(batch))
        actor.ppo_update(batch)
        actor.publish_weights(rollout)
        raise LookupError(f"nothing is known about version {actor.version}")


if __name__ == "__main__":
    sys.exit(run_script(main))
