"""Teaches a small language model to sort letters, by asynchronous reinforcement learning.

    python examples/letter_sort.py --config configs/letter_sort.yaml

The warm start imitates mostly wrong demonstrations and ends near an accuracy of 0.2; it is made
when it is not there yet. Reinforcement learning does the rest.
"""

from __future__ import annotations

import sys
from pathlib import Path

from letter_sort_task import (
    LetterSortDemonstrations,
    LetterSortPrompts,
    letter_sort_reward,
    shuffled_reward,
)
from letter_sort_warm_start import WarmStart

from areal_sc import (
    GRPOConfig,
    PPOTrainer,
    SingleTurnWorkflow,
    load_config,
    run_script,
)

HELD_OUT_SEED = 1_000_003
"""Added to the run's seed: evaluation prompts are others than those trained on."""


def warm_start(config: GRPOConfig, trainer: PPOTrainer) -> None:
    """Imitates the demonstrations, unless that model is there already."""
    task = config.task["warm_start"]
    if (Path(config.actor.path) / "config.json").is_file() and not task["rebuild"]:
        return
    sizes = {name: task[name] for name in ("hidden_size", "num_layers", "ffn_size")}
    recipe = WarmStart(task["steps"], task["batch_size"], task["lr"], sizes)
    with trainer.display.phase("warm start", recipe.num_steps, "steps") as phase:

        def show(step: int, loss: float) -> None:
            phase.advance()
            if (step + 1) % 100 == 0:
                phase.update(f"loss {loss:.3f}")

        demonstrations = LetterSortDemonstrations(config.seed)
        recipe.train(config.actor, demonstrations, trainer.scheduler, show)


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
