"""This project's side of `against_trl.py`: one run on the prompts of a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from trl_tasks import REWARDS

from areal_sc import GRPOConfig, PPOTrainer, SingleTurnWorkflow, load_config, run_script


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    task = config.task
    rows = [json.loads(line) for line in Path(task["rows"]).read_text().splitlines()]
    workflow = SingleTurnWorkflow(
        REWARDS[task["reward"]], use_chat_template=task["use_chat_template"]
    )
    PPOTrainer(config).fit(workflow, rows)


if __name__ == "__main__":
    sys.exit(run_script(main))
