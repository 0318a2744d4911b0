"""GRPO on GSM8K: school mathematics, for a model of half a billion parameters on one GPU.

    python examples/recipes/gsm8k.py --config configs/gsm8k.yaml

docs/recipes.md says what to expect.
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
from areal_sc.workflows.math_reward import check_answers, numeric_match

TEMPLATE = "{question}\nThink step by step, and put the final number in \\boxed{{}}."


@dataclass
class Task:
    """The script's own settings."""

    dataset: str = setting("openai/gsm8k", "name of the hub, or a folder of its files")


@dataclass
class Config(GRPOConfig):
    task: Task = setting(Task)  # type: ignore[assignment]  # in place of a dict


def load_gsm8k(dataset: str, split: str) -> list[dict[str, Any]]:
    """Rows of GSM8K: `prompt`, and `answer`, a solution with the number behind `####`.

    Args:
        split: `train` (7,473 rows) or `test` (1,319).
    """
    name = "main" if dataset == "openai/gsm8k" else None
    rows = list(load_prompts(dataset, name=name, split=split, template=TEMPLATE))
    check_answers(rows)
    return rows


def main(argv: list[str]) -> None:
    config = load_config(argv, Config)
    train, test = (load_gsm8k(config.task.dataset, split) for split in ("train", "test"))
    workflow = SingleTurnWorkflow(numeric_match, use_chat_template=True)
    PPOTrainer(config).fit(workflow, train, evaluation_prompts=test)


if __name__ == "__main__":
    sys.exit(run_script(main))
