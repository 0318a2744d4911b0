"""Teaches a small language model to sort letters, by asynchronous reinforcement learning.

    python examples/letter_sort.py --config configs/letter_sort.yaml

The warm start imitates mostly wrong demonstrations and ends near an accuracy of 0.2; it is made
when it is not there yet. Reinforcement learning does the rest.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from letter_sort_task import (
    LETTERS,
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
from areal_sc.errors import ConfigError

HELD_OUT_SEED = 1_000_003
"""Added to the run's seed: evaluation prompts are others than those trained on."""


@dataclass
class WarmStartTask:
    """How the model is made that reinforcement learning starts from."""

    rebuild: bool = False
    steps: int = 600
    batch_size: int = 32
    lr: float = 4e-3
    hidden_size: int = 96
    num_layers: int = 3
    ffn_size: int = 256


@dataclass
class Task:
    """The script's own settings: the `task` section of the YAML."""

    max_letters: int = 26
    median_letters: float = 7
    sigma_letters: float = 0.6
    shuffle_rewards: bool = False
    warm_start: WarmStartTask = field(default_factory=WarmStartTask)


@dataclass
class Config(GRPOConfig):
    task: Task = field(default_factory=Task)  # type: ignore[assignment]  # in place of a dict


def check_task(task: Task) -> None:
    """Raises: ConfigError: a number that cannot be; before anything is started or deleted."""
    if not 2 <= task.max_letters <= len(LETTERS):
        raise ConfigError(f"task.max_letters: expected 2 to {len(LETTERS)}, got {task.max_letters}")
    if not task.sigma_letters >= 0:
        raise ConfigError(f"task.sigma_letters: expected at least 0, got {task.sigma_letters}")
    sizes = {f"warm_start.{name}": size for name, size in vars(task.warm_start).items()}
    del sizes["warm_start.rebuild"]
    for name, number in {"median_letters": task.median_letters, **sizes}.items():
        if not number > 0:
            raise ConfigError(f"task.{name}: expected a number above 0, got {number}")


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
            if (step + 1) % 100 == 0:
                phase.update(f"loss {loss:.3f}")

        demonstrations = LetterSortDemonstrations(config.seed)
        recipe.train(config.actor, demonstrations, trainer.scheduler, show)


def main(argv: list[str]) -> None:
    config = load_config(argv, Config, makes_model=True)
    task = config.task
    check_task(task)
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
