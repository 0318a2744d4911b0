"""GRPO on a generated task of reasoning-gym, whose own verifier is the reward.

    python examples/recipes/reasoning_gym_task.py --config configs/reasoning_gym_task.yaml

Needs `pip install areal-sc[reasoning-gym]`. docs/recipes.md says what to expect.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from areal_sc import (
    GRPOConfig,
    PPOTrainer,
    SingleTurnWorkflow,
    load_config,
    load_prompts,
    run_script,
)
from areal_sc.config.fields import setting
from areal_sc.errors import ConfigError
from areal_sc.rewards.reasoning_gym import reasoning_gym_reward


@dataclass
class Task:
    """The script's own settings."""

    name: str = setting("chain_sum", "a task of reasoning-gym")
    settings: dict[str, Any] = setting(dict, "fields of its configuration")
    size: int = setting(2000, "rows that train", ge=1)
    num_held_out: int = setting(128, "rows of another seed, for evaluation", ge=1)
    use_chat_template: bool = setting(False, "puts questions into the model's chat format")


@dataclass
class Config(GRPOConfig):
    task: Task = setting(Task)  # type: ignore[assignment]  # in place of a dict


def load_task(task: Task, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows that train, and others of another seed, whose questions none of those asks."""
    path = f"reasoning_gym:{task.name}"
    others = load_prompts(path, size=task.num_held_out, seed=seed + 1, settings=task.settings)
    held_out = list({row["prompt"]: row for row in others}.values())
    asked = {row["prompt"] for row in held_out}
    rows = load_prompts(path, size=task.size, seed=seed, settings=task.settings)
    train = [row for row in rows if row["prompt"] not in asked]
    if not train:
        raise ConfigError(
            f"task.num_held_out={task.num_held_out}: these are all questions that {task.name} asks "
            "with such settings, and none is left to train on: hold out fewer, or give it wider "
            "settings"
        )
    return train, held_out


def main(argv: list[str]) -> None:
    config = load_config(argv, Config)
    train, held_out = load_task(config.task, config.seed)
    workflow = SingleTurnWorkflow(
        reasoning_gym_reward, use_chat_template=config.task.use_chat_template
    )
    PPOTrainer(config).fit(workflow, train, evaluation_prompts=held_out)


if __name__ == "__main__":
    sys.exit(run_script(main))
