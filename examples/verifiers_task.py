"""Trains a task of `verifiers`, unchanged, which lives in an interpreter of its own.

    python -m venv envs/verifiers
    envs/verifiers/bin/pip install verifiers uv <the task's package>
    python examples/verifiers_task.py --config configs/one_gpu.yaml actor.path=<model> \
        agents.python=envs/verifiers/bin/python 'task={taskset: <its id>, num_tasks: 1000}'
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from areal_sc import AgentWorkflow, GRPOConfig, PPOTrainer, load_config, run_script
from areal_sc.errors import ConfigError

AGENT = f"{Path(__file__).with_name('verifiers_agent.py')}:play"


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    if not config.agents.python and find_spec("verifiers") is None:
        raise ConfigError("agents.python: expected an interpreter in which verifiers is installed")
    if missing := [f"task.{it}" for it in ("taskset", "num_tasks") if it not in config.task]:
        raise ConfigError(
            f"{', '.join(missing)}: not set; the command at the top of examples/verifiers_task.py "
            "names both"
        )
    taskset, num_tasks = config.task["taskset"], config.task["num_tasks"]
    rows = [{"taskset": taskset, "number": number} for number in range(num_tasks)]
    PPOTrainer(config).fit(AgentWorkflow(AGENT), rows)


if __name__ == "__main__":
    sys.exit(run_script(main))
