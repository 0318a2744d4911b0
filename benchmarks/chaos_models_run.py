"""A script with three models, one of them frozen and one trained on demonstrations: see
`chaos_models.py`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Final

from chaos_run import BOOKS, ROOT

sys.path[:0] = [str(ROOT / "examples"), str(Path(__file__).parent)]

from minimal import PROMPTS, reward  # noqa: E402  # an example

from areal_sc import (  # noqa: E402
    Checkpoints,
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
from areal_sc.errors import StepLost  # noqa: E402

STORES: Final = "stores.jsonl"
"""A line a step: bytes in each worker's store, by role."""

DEMONSTRATIONS: Final = [
    {"input_ids": [1 + row, 11, 2 + row, 12, 3 + row, 0], "loss_mask": [0, 0, 0, 0, 1, 1]}
    for row in range(7)
]


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    book = Path(os.environ[BOOKS]) / STORES
    with Run(config) as run:
        actor = TrainController(make_actor(config.actor), run.scheduler)
        reference = TrainController(
            make_actor(config.actor, is_frozen=True), run.scheduler, role="ref"
        )
        imitator = TrainController(make_actor(config.actor), run.scheduler, role="sft")
        rollout = RolloutController(make_generator(config.rollout), run.scheduler)
        controllers = actor, rollout, reference, imitator
        checkpoints = Checkpoints(run, *controllers)
        workflow = SingleTurnWorkflow(reward)
        with run.training(*controllers) as steps:
            for step in steps:
                try:
                    if imitator.version == actor.version:
                        row = imitator.version % len(DEMONSTRATIONS)
                        imitator.sft_update(DEMONSTRATIONS, [row])
                    with step.timed("wait"):
                        batch = rollout.prepare_batch(PROMPTS, workflow)
                    with step.timed("train"):
                        batch = reference.compute_logprobs(batch, field="reference_logprobs")
                        batch = actor.compute_advantages(batch)
                        batch = actor.compute_proximal_logprobs(batch)
                        stats = actor.ppo_update(batch)
                    with step.timed("sync"):
                        actor.publish_weights(rollout)
                except StepLost as error:
                    step.lose(error)
                    continue
                step.record(batch, stats)
                checkpoints.after_step()
                held = {
                    it.role: max(int(one.get("store_bytes", 0)) for one in it.worker_stats())
                    for it in controllers
                }
                with book.open("a") as file:
                    line = {"time": time.time(), "version": actor.version, "bytes": held}
                    file.write(json.dumps(line) + "\n")
            run.finish(actor, rollout)


if __name__ == "__main__":
    sys.exit(run_script(main))
