"""A run on the rows of the file `task.rows`, which a test can hold: see `tiny_run.yaml`."""

from __future__ import annotations

import sys
from pathlib import Path

from tiny_run import GatedWorkflow, by_letters

from areal_sc import GRPOConfig, PPOTrainer, load_config, load_rows, run_script


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    task = config.task
    gate, num_free = Path(task["gate"]), task["num_free_episodes"]
    rows, _ = load_rows(task["rows"])
    PPOTrainer(config).fit(GatedWorkflow(by_letters, num_free, gate, True), rows)


if __name__ == "__main__":
    sys.exit(run_script(main))
