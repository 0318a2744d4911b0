"""A loop of one's own whose number of rollout workers, and of steps, another process decides.

The file `task.orders` says both, as `<workers> <steps>`: it goes no further than so many steps.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tiny_run import letter_prompts, partial

from areal_sc import (
    Checkpoints,
    FSDPPPOActor,
    GRPOConfig,
    RolloutController,
    Run,
    SingleTurnWorkflow,
    TrainController,
    load_config,
    make_generator,
    run_script,
)


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    orders = Path(config.task["orders"])
    prompts, workflow = letter_prompts(64, seed=0), SingleTurnWorkflow(partial)
    with Run(config) as run:
        actor = TrainController(FSDPPPOActor(config.actor), run.scheduler)
        rollout = RolloutController(make_generator(config.rollout), run.scheduler)
        checkpoints = Checkpoints(run, actor, rollout)
        with run.training(actor, rollout) as steps:
            for step in steps:
                while True:
                    num_workers, num_steps = map(int, orders.read_text().split())
                    rollout.scale(num_workers)
                    if step.number <= num_steps:
                        break
                    time.sleep(0.02)
                batch = rollout.prepare_batch(prompts, workflow)
                batch = actor.compute_proximal_logprobs(actor.compute_advantages(batch))
                stats = actor.ppo_update(batch)
                actor.publish_weights(rollout)
                step.record(batch, stats)
                checkpoints.after_step()
            run.finish(actor, rollout)


if __name__ == "__main__":
    sys.exit(run_script(main))
