"""Reinforcement learning on your own questions: a JSONL file of {"prompt": ..., "answer": ...}.

    python examples/jsonl_math.py --config configs/jsonl_math.yaml actor.path=<model>

`task.reward` is `numeric` (the completion's final answer has the same value; docs/rewards.md) or
`exact` (it is the same text). The last `task.num_held_out` rows of the file are kept for
evaluation.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum

from omegaconf import MISSING

from areal_sc import (
    GRPOConfig,
    JsonlPrompts,
    PPOTrainer,
    SingleTurnWorkflow,
    load_config,
    run_script,
)
from areal_sc.config.fields import setting
from areal_sc.errors import ConfigError
from areal_sc.workflows.math_reward import check_answers, exact_match, numeric_match


class Reward(StrEnum):
    exact = "exact"
    numeric = "numeric"


REWARDS = {Reward.exact: exact_match, Reward.numeric: numeric_match}


@dataclass
class Task:
    """The script's own settings."""

    dataset: str = setting(MISSING, "JSONL file of prompts and answers")
    reward: Reward = setting(MISSING, "how an answer is compared with the right one")
    num_held_out: int = setting(16, "last rows of the file, for evaluation")
    use_chat_template: bool = setting(True, "prompts are chat messages")


@dataclass
class Config(GRPOConfig):
    task: Task = setting(Task)  # type: ignore[assignment]  # in place of a dict


def main(argv: list[str]) -> None:
    config = load_config(argv, Config)
    task = config.task
    rows = JsonlPrompts(task.dataset)
    if task.reward is Reward.numeric:
        check_answers(rows[index] for index in range(len(rows)))
    num_train = len(rows) - task.num_held_out
    if not 0 < num_train <= len(rows):
        raise ConfigError(
            f"task.num_held_out: expected 0 to {len(rows) - 1} with the {len(rows)} rows of "
            f"{task.dataset}, got {task.num_held_out}"
        )
    PPOTrainer(config).fit(
        SingleTurnWorkflow(REWARDS[task.reward], use_chat_template=task.use_chat_template),
        [rows[index] for index in range(num_train)],
        evaluation_prompts=[rows[index] for index in range(num_train, len(rows))] or None,
    )


if __name__ == "__main__":
    sys.exit(run_script(main))
