"""DeepScaleR: competition mathematics with long reasoning, as in AReaL (arXiv:2505.24298).

    python examples/recipes/deepscaler.py --config configs/deepscaler.yaml

Rows whose reference answers cannot be read are left out, and counted. docs/recipes.md says what to
expect.
"""

from __future__ import annotations

import logging
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
from areal_sc.workflows.math_reward import check_answers, numeric_match

TEMPLATE = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{{}}."

logger = logging.getLogger(__name__)


@dataclass
class Task:
    """The script's own settings."""

    dataset: str = setting("agentica-org/DeepScaleR-Preview-Dataset", "name of the hub, or a file")
    num_held_out: int = setting(128, "last rows, for evaluation", ge=1)


@dataclass
class Config(GRPOConfig):
    task: Task = setting(Task)  # type: ignore[assignment]  # in place of a dict


def load_deepscaler(dataset: str) -> list[dict[str, Any]]:
    """Rows of DeepScaleR: `prompt`, and `answer`, in LaTeX. Those that can be read, of 40,315."""
    rows = list(load_prompts(dataset, template=TEMPLATE))
    kept = [row for row in rows if _can_be_read(row)]
    logger.info(
        "rows=%d left_out=%d, whose answers cannot be read", len(kept), len(rows) - len(kept)
    )
    return kept


def _can_be_read(row: dict[str, Any]) -> bool:
    try:
        check_answers([row])
    except ConfigError:
        return False
    return True


def main(argv: list[str]) -> None:
    config = load_config(argv, Config)
    rows = load_deepscaler(config.task.dataset)
    num_train = len(rows) - config.task.num_held_out
    if num_train < 1:
        raise ConfigError(
            f"task.num_held_out: expected less than the {len(rows)} rows of {config.task.dataset}, "
            f"got {config.task.num_held_out}"
        )
    workflow = SingleTurnWorkflow(numeric_match, use_chat_template=True)
    PPOTrainer(config).fit(workflow, rows[:num_train], evaluation_prompts=rows[num_train:])


if __name__ == "__main__":
    sys.exit(run_script(main))
