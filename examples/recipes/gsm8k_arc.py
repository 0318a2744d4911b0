"""Two tasks in one run: mathematics of GSM8K and multiple choice of ARC, three rows to one.

    python examples/recipes/gsm8k_arc.py --config configs/gsm8k_arc.yaml

Each task has its reward, its system prompt and its curve. docs/recipes.md says what to expect.
"""

from __future__ import annotations

import string
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gsm8k import load_gsm8k

from areal_sc import GRPOConfig, PPOTrainer, SingleTurnWorkflow, load_config, load_rows, run_script
from areal_sc.config.fields import setting
from areal_sc.rewards.answers import MultipleChoice
from areal_sc.workflows.math_reward import numeric_match
from areal_sc.workflows.task_mix import Task, TaskMix

MATHS = "You solve problems of school mathematics."
CHOICE = "You answer questions of science. End with: The answer is (letter)."


@dataclass
class Sources:
    """The script's own settings."""

    dataset: str = setting("openai/gsm8k", "mathematics: name of the hub, or a folder of its files")
    choice_dataset: str = setting("allenai/ai2_arc", "choice: name of the hub, or a folder")
    maths_weight: float = setting(3.0, "share of the rows, by the sum of both weights", gt=0)
    choice_weight: float = setting(1.0, "share of the rows, by the sum of both weights", gt=0)
    num_evaluated: int = setting(250, "rows of each test split", ge=1)


@dataclass
class Config(GRPOConfig):
    task: Sources = setting(Sources)  # type: ignore[assignment]  # in place of a dict


def chat(system: str, question: str) -> list[dict[str, str]]:
    """A prompt of a system's and a user's message."""
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def choice_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of ARC, whose choices some questions number and others letter, with letters alone."""
    labels, texts = row["choices"]["label"], row["choices"]["text"]
    letters = string.ascii_uppercase[: len(labels)]
    lines = [f"({letter}) {text}" for letter, text in zip(letters, texts, strict=True)]
    answer = letters[labels.index(row["answerKey"])]
    return {"prompt": chat(CHOICE, "\n".join([row["question"], *lines])), "answer": answer}


def load_arc(dataset: str, split: str) -> list[dict[str, Any]]:
    """Rows of ARC's harder part. Args: split: `train` (1,119 rows) or `test` (1,172)."""
    name = "ARC-Challenge" if dataset == "allenai/ai2_arc" else None
    rows, _ = load_rows(dataset, name=name, split=split)
    return [choice_row(row) for row in rows]


def load_maths(dataset: str, split: str) -> list[dict[str, Any]]:
    """Rows of GSM8K with this task's system prompt."""
    rows = load_gsm8k(dataset, split)
    return [{"prompt": chat(MATHS, row["prompt"]), "answer": row["answer"]} for row in rows]


def main(argv: list[str]) -> None:
    config = load_config(argv, Config)
    task = config.task
    maths = SingleTurnWorkflow(numeric_match, use_chat_template=True)
    choice = SingleTurnWorkflow(MultipleChoice(choices=5), use_chat_template=True)
    mix = TaskMix(
        {
            "maths": Task(load_maths(task.dataset, "train"), maths, task.maths_weight),
            "choice": Task(load_arc(task.choice_dataset, "train"), choice, task.choice_weight),
        },
        seed=config.seed,
    )
    tests = {
        "maths": load_maths(task.dataset, "test"),
        "choice": load_arc(task.choice_dataset, "test"),
    }
    held_out = mix.rows({name: rows[: task.num_evaluated] for name, rows in tests.items()})
    PPOTrainer(config).fit(mix.workflow, mix, evaluation_prompts=held_out)


if __name__ == "__main__":
    sys.exit(run_script(main))
