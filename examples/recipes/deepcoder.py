"""DeepCoder: programs for problems of contests, judged by their tests, as in the AReaL paper
(arXiv:2505.24298).

    python examples/recipes/deepcoder.py --config configs/deepcoder.yaml

Problems whose tests cannot be read are left out, and counted. docs/recipes.md says what to expect.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Any

from areal_sc import GRPOConfig, PPOTrainer, Prompts, SingleTurnWorkflow, load_config, run_script
from areal_sc.config.fields import setting
from areal_sc.errors import WorkflowError
from areal_sc.rewards.code.cases import function_of, read_cases
from areal_sc.rewards.code.reward import CodeReward

READS = (
    "Write a Python program that reads from standard input and writes the answer to standard "
    "output. Put it into one block that begins with ```python."
)
CALLED = (
    "Complete this code, and put all of it into one block that begins with ```python:\n"
    "```python\n{starter_code}\n```"
)
NAMED = "Write the Python function `{function}`. Put it into one block that begins with ```python."

logger = logging.getLogger(__name__)


@dataclass
class Task:
    """The script's own settings."""

    dataset: str = setting(
        "agentica-org/DeepCoder-Preview-Dataset", "name of the hub, or a folder of its files"
    )
    subsets: list[str] = setting(lambda: ["taco", "primeintellect", "lcbv5"], "to train on")
    test_subset: str = setting("lcbv5", "whose test split is the evaluation")
    max_tests: int = setting(15, "tests an answer, those with the longest inputs; 0: all", ge=0)


@dataclass
class Config(GRPOConfig):
    task: Task = setting(Task)  # type: ignore[assignment]  # in place of a dict


class Problems(Prompts):
    """Problems where `datasets` keeps them, some gigabytes: no process holds them in memory.

    Args:
        left_out: indices of problems that are not used.
    """

    def __init__(
        self, dataset: str, subsets: list[str], split: str, left_out: list[int] | None = None
    ) -> None:
        from datasets import load_dataset

        self._parts = [load_dataset(dataset, name, split=split) for name in subsets]
        places = [(part, n) for part in self._parts for n in range(len(part))]
        unused = set(left_out or [])
        self._places = [place for index, place in enumerate(places) if index not in unused]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        part, number = self._places[index]
        return problem(part[number])


def problem(row: dict[str, Any]) -> dict[str, Any]:
    """A row with `prompt`, and what the reward reads: `tests`, and `metadata` of LiveCodeBench.

    Raises: ValueError: its tests cannot be read.
    """
    function = read_cases(row["tests"], function_of(row.get("metadata")))[0].function
    starter_code = (row.get("starter_code") or "").strip()
    if starter_code:
        task = CALLED.format(starter_code=starter_code)
    else:
        task = NAMED.format(function=function) if function else READS
    return {
        "prompt": f"{row['problem']}\n\n{task}",
        "tests": row["tests"],
        "metadata": row.get("metadata"),
    }


def load_problems(dataset: str, subsets: list[str], split: str, reward: CodeReward) -> Problems:
    """The problems of these subsets whose tests can be read: all tests are, which takes minutes."""
    problems = Problems(dataset, subsets, split)
    left_out = []
    for index in range(len(problems)):
        try:
            reward.check_row(problems[index])
        except (ValueError, WorkflowError) as error:
            logger.info("problem %d is left out: %s", index, error)
            left_out.append(index)
    logger.info("problems=%d left_out=%d, whose tests cannot be read", len(problems), len(left_out))
    return Problems(dataset, subsets, split, left_out)


def main(argv: list[str]) -> None:
    config = load_config(argv, Config)
    task = config.task
    reward = CodeReward(max_tests=task.max_tests)
    train = load_problems(task.dataset, list(task.subsets), "train", reward)
    test = load_problems(task.dataset, [task.test_subset], "test", reward)
    workflow = SingleTurnWorkflow(reward, use_chat_template=True)
    PPOTrainer(config).fit(workflow, train, evaluation_prompts=test)


if __name__ == "__main__":
    sys.exit(run_script(main))
