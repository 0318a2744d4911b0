"""Reinforcement learning on your own questions: a file of {"prompt": ..., "answer": ...}, or a data
set of the Hugging Face hub.

    python examples/jsonl_math.py --config configs/jsonl_math.yaml actor.path=<model>
    python examples/jsonl_math.py --config configs/jsonl_math.yaml actor.path=<model> \\
        task.dataset=openai/gsm8k task.subset=main task.prompt_key=question

`task.reward` is `numeric` (the completion's final answer has the same value; docs/rewards.md) or
`exact` (it is the same text). `task.reading` is how `numeric` reads answers. The last
`task.num_held_out` rows are kept for evaluation.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum

from omegaconf import MISSING

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
from areal_sc.workflows.math_reward import NumericMatch, Reading, check_answers, exact_match


class Reward(StrEnum):
    exact = "exact"
    numeric = "numeric"


@dataclass
class Task:
    """The script's own settings."""

    dataset: str = setting(MISSING, "JSONL, JSON, CSV or Parquet file, or a name of the hub")
    subset: str = setting("", "which part, where a data set of the hub has several")
    split: str = setting("train", "of the data set")
    prompt_key: str = setting("prompt", "column with the question")
    answer_key: str = setting("answer", "column with the right answer")
    template: str = setting("", "the prompt, with columns in braces: 'Q: {question} A:'")
    reward: Reward = setting(MISSING, "how an answer is compared with the right one")
    reading: Reading = setting(
        Reading.strict, "how `numeric` reads answers: strict, or math_verify, as published results"
    )
    num_held_out: int = setting(16, "last rows, for evaluation")
    use_chat_template: bool = setting(True, "prompts are chat messages")


@dataclass
class Config(GRPOConfig):
    task: Task = setting(Task)  # type: ignore[assignment]  # in place of a dict


def main(argv: list[str]) -> None:
    config = load_config(argv, Config)
    task = config.task
    rows = list(
        load_prompts(
            task.dataset,
            name=task.subset or None,
            split=task.split,
            prompt_key=task.prompt_key,
            answer_key=task.answer_key,
            template=task.template or None,
        )
    )
    if task.reward is Reward.numeric and task.reading is Reading.strict:
        check_answers(rows)
    num_train = len(rows) - task.num_held_out
    if not 0 < num_train <= len(rows):
        raise ConfigError(
            f"task.num_held_out: expected 0 to {len(rows) - 1} with the {len(rows)} rows of "
            f"{task.dataset}, got {task.num_held_out}"
        )
    reward = exact_match if task.reward is Reward.exact else NumericMatch(task.reading)
    PPOTrainer(config).fit(
        SingleTurnWorkflow(reward, use_chat_template=task.use_chat_template),
        rows[:num_train],
        evaluation_prompts=rows[num_train:] or None,
    )


if __name__ == "__main__":
    sys.exit(run_script(main))
