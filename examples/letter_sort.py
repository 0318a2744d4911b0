"""Teaches a small language model to sort letters, by asynchronous reinforcement learning.

    python examples/letter_sort.py --config configs/letter_sort.yaml

The warm start imitates mostly wrong demonstrations and ends near an accuracy of 0.2; it is made
when it is not there yet. Reinforcement learning does the rest.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from letter_sort_task import (
    LetterSortDemonstrations,
    LetterSortPrompts,
    letter_sort_reward,
    shuffled_reward,
    write_untrained_folder,
)

from areal_sc import (
    FSDPSFTActor,
    GRPOConfig,
    PPOTrainer,
    SingleTurnWorkflow,
    TrainController,
    load_config,
    run_script,
    start,
)
from areal_sc.config.schema import LrSchedule, OptimizerConfig

HELD_OUT_SEED = 1_000_003
"""Added to the run's seed: evaluation prompts are others than those trained on."""


def warm_start(config: GRPOConfig, trainer: PPOTrainer) -> None:
    """Imitates the demonstrations, through the same controller that reinforcement learning uses."""
    folder, task = Path(config.actor.path), config.task["warm_start"]
    if (folder / "config.json").is_file() and not task["rebuild"]:
        return
    untrained = trainer.folder.path / "untrained"
    write_untrained_folder(
        untrained,
        hidden_size=task["hidden_size"],
        num_layers=task["num_layers"],
        ffn_size=task["ffn_size"],
    )
    optimizer = OptimizerConfig(
        lr=task["lr"],
        beta2=0.98,
        schedule=LrSchedule.cosine,
        warmup_steps=task["steps"] // 20,
        total_steps=task["steps"],
    )
    actor_config = replace(config.actor, path=str(untrained), random_init=True, optimizer=optimizer)
    actor = TrainController(FSDPSFTActor(actor_config), trainer.scheduler)
    demonstrations = LetterSortDemonstrations(config.seed)
    batch_size, num_steps = task["batch_size"], task["steps"]
    with start(actor), trainer.display.phase("warm start", num_steps, "steps") as phase:
        for step in range(num_steps):
            rows = range(step * batch_size, (step + 1) * batch_size)
            stats = actor.sft_update(demonstrations, rows)
            phase.advance()
            if (step + 1) % 100 == 0:
                phase.update(f"loss {stats['loss']:.3f}")
        actor.save_hf(folder)
    shutil.rmtree(untrained)


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    shape = {name: config.task[name] for name in ("max_letters", "median_letters", "sigma_letters")}
    reward = shuffled_reward if config.task["shuffle_rewards"] else letter_sort_reward
    with PPOTrainer(config) as trainer:
        warm_start(config, trainer)
        trainer.fit(
            SingleTurnWorkflow(reward),
            LetterSortPrompts(config.seed, **shape),
            evaluation_prompts=LetterSortPrompts(config.seed + HELD_OUT_SEED, **shape),
            evaluation_workflow=SingleTurnWorkflow(letter_sort_reward),
        )


if __name__ == "__main__":
    sys.exit(run_script(main))
