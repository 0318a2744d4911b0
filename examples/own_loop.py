"""A training loop of one's own, with all that `PPOTrainer` has around it.

    python examples/own_loop.py --config configs/letter_sort.yaml run_dir=runs/own_loop

It shows progress, measures each step, evaluates, takes snapshots and, after a crash or Ctrl-C, goes
on from the newest one by the same command. Needs the warm-start model, which
`examples/letter_sort.py` makes.
"""

from __future__ import annotations

import sys

from letter_sort_task import LetterSortPrompts, letter_sort_reward

from areal_sc import (
    Checkpoints,
    Evaluations,
    GRPOConfig,
    RolloutController,
    Run,
    SingleTurnWorkflow,
    TrainController,
    load_config,
    make_actor,
    make_generator,
    run_script,
)
from areal_sc.errors import StepLost


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    prompts, held_out = LetterSortPrompts(config.seed), LetterSortPrompts(config.seed + 1_000_003)
    workflow = SingleTurnWorkflow(letter_sort_reward)
    with Run(config) as run:  # the run folder, with metrics.jsonl; the display; the scheduler
        actor = TrainController(make_actor(config.actor), run.scheduler)
        rollout = RolloutController(make_generator(config.rollout), run.scheduler)
        evaluations = Evaluations(run, rollout, held_out, workflow)
        checkpoints = Checkpoints(run, actor, rollout)
        with run.training(actor, rollout) as steps:  # workers, and the newest snapshot if any
            if actor.version == 0:
                evaluations.begin("before")
            for step in steps:
                try:
                    with step.timed("wait"):
                        batch = rollout.prepare_batch(prompts, workflow)
                    with step.timed("train"):
                        batch = actor.compute_advantages(batch)
                        batch = actor.compute_proximal_logprobs(batch)
                        stats = actor.ppo_update(batch)
                    with step.timed("sync"):
                        actor.publish_weights(rollout)  # version += 1; generation goes on
                except StepLost as error:  # a node went with rows that the step needs
                    step.lose(error)
                    continue
                step.record(batch, stats)
                checkpoints.after_step()
                evaluations.after_step()
            evaluations.finish()
            run.finish(actor, rollout)  # model/, learning_curve.png, summary.json


if __name__ == "__main__":
    sys.exit(run_script(main))
