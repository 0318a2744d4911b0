"""Teaches a small language model to sort letters, by asynchronous reinforcement learning.

    python examples/letter_sort.py --config configs/letter_sort.yaml

The warm start imitates mostly wrong demonstrations and ends near an accuracy of 0.2; it is made
when it is not there yet. Reinforcement learning does the rest.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from letter_sort_task import (
    LETTERS,
    LetterSortDemonstrations,
    LetterSortPrompts,
    letter_sort_reward,
    shuffled_reward,
)
from letter_sort_warm_start import WarmStart

from areal_sc import GRPOConfig, PPOTrainer, SingleTurnWorkflow, load_config, run_script
from areal_sc.config.fields import setting

HELD_OUT_SEED = 1_000_003
"""Added to the run's seed: evaluation prompts are others than those trained on."""


@dataclass
class WarmStartTask:
    """How the model is made that reinforcement learning starts from."""

    rebuild: bool = setting(False, "make it anew even if it is there")
    steps: int = setting(600, "training steps of imitation", gt=0)
    batch_size: int = setting(32, "demonstrations a step", gt=0)
    lr: float = setting(4e-3, "highest learning rate", gt=0)
    hidden_size: int = setting(96, "width of the model", gt=0)
    num_layers: int = setting(3, "transformer layers", gt=0)
    ffn_size: int = setting(256, "width of a layer's feed-forward part", gt=0)


@dataclass
class Task:
    """The script's own settings."""

    max_letters: int = setting(26, "most letters of a prompt", ge=2, le=len(LETTERS))
    median_letters: float = setting(7, "median of the prompts' lengths", gt=0)
    sigma_letters: float = setting(0.6, "spread of the lengths' logarithm", ge=0)
    shuffle_rewards: bool = setting(False, "rewards without meaning: nothing can be learned")
    warm_start: WarmStartTask = setting(WarmStartTask)


@dataclass
class Config(GRPOConfig):
    task: Task = setting(Task)  # type: ignore[assignment]  # in place of a dict


def warm_start(config: Config, trainer: PPOTrainer) -> None:
    """Imitates the demonstrations, unless that model is there already."""
    task = config.task.warm_start
    if (Path(config.actor.path) / "config.json").is_file() and not task.rebuild:
        return
    sizes = {
        "hidden_size": task.hidden_size,
        "num_layers": task.num_layers,
        "ffn_size": task.ffn_size,
    }
    recipe = WarmStart(task.steps, task.batch_size, task.lr, sizes)
    with trainer.display.phase("warm start", recipe.num_steps, "steps") as phase:

        def show(step: int, loss: float) -> None:
            phase.advance()

        demonstrations = LetterSortDemonstrations(config.seed)
        recipe.train(config.actor, demonstrations, trainer.scheduler, show)


def main(argv: list[str]) -> None:
    config = load_config(argv, Config, makes_model=True)
    task = config.task
    shape = {
        "max_letters": task.max_letters,
        "median_letters": task.median_letters,
        "sigma_letters": task.sigma_letters,
    }
    reward = shuffled_reward if task.shuffle_rewards else letter_sort_reward
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
