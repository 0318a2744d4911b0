"""Reinforcement learning on your own questions: a JSONL file of {"prompt": ..., "answer": ...}.

    python examples/jsonl_math.py --config configs/jsonl_math.yaml actor.path=<model folder>

`task.reward` is `numeric` (the completion's final answer has the same value; docs/rewards.md) or
`exact` (it is the same text). The last `task.num_held_out` rows of the file are kept for
evaluation.
"""

from __future__ import annotations

import sys

from areal_sc import (
    GRPOConfig,
    JsonlPrompts,
    PPOTrainer,
    SingleTurnWorkflow,
    load_config,
    run_script,
)
from areal_sc.errors import ConfigError
from areal_sc.workflows.math_reward import check_answers, exact_match, numeric_match

REWARDS = {"exact": exact_match, "numeric": numeric_match}


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    task = config.task
    if task["reward"] not in REWARDS:
        raise ConfigError(f"task.reward: expected one of {list(REWARDS)}, got {task['reward']!r}")
    rows = JsonlPrompts(task["dataset"])
    if task["reward"] == "numeric":
        check_answers(rows[index] for index in range(len(rows)))
    num_train = len(rows) - task["num_held_out"]
    if num_train < 1:
        raise ConfigError(
            f"task.num_held_out: expected less than the {len(rows)} rows of {task['dataset']}, "
            f"got {task['num_held_out']}"
        )
    workflow = SingleTurnWorkflow(
        REWARDS[task["reward"]], use_chat_template=task["use_chat_template"]
    )
    PPOTrainer(config).fit(
        workflow,
        [rows[index] for index in range(num_train)],
        evaluation_prompts=[rows[index] for index in range(num_train, len(rows))] or None,
    )


if __name__ == "__main__":
    sys.exit(run_script(main))
