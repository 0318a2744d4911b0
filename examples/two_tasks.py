"""Two tasks in one run, each with its reward, its share of the rows and its curve.

    python examples/two_tasks.py --config configs/two_tasks.yaml

The small model of examples/first_project.py learns to name the larger of two digits (`3,8>` -> `8`)
and to answer whether they are equal (`3,8,` -> `0`, `3,3,` -> `1`).
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from first_project import DIGITS, NUM_HELD_OUT, PROMPTS, make_model, reward

from areal_sc import PPOTrainer, SingleTurnWorkflow, load_config, run_script
from areal_sc.rewards.answers import ExactMatch
from areal_sc.workflows.task_mix import Task, TaskMix

MODEL = "runs/first_project_model"
EQUAL = [{"prompt": f"{a},{b},", "answer": str(int(a == b))} for a in DIGITS for b in DIGITS]


def main(argv: list[str]) -> None:
    if not Path(MODEL).exists():
        make_model(MODEL)
    config = load_config(argv)
    larger = random.Random(0).sample(PROMPTS, len(PROMPTS))
    equal = random.Random(0).sample(EQUAL, len(EQUAL))
    mix = TaskMix(
        {
            "larger": Task(larger[NUM_HELD_OUT:], SingleTurnWorkflow(reward), weight=3),
            "equal": Task(equal[NUM_HELD_OUT:], SingleTurnWorkflow(ExactMatch()), weight=1),
        },
        seed=config.seed,
    )
    held_out = mix.rows({"larger": larger[:NUM_HELD_OUT], "equal": equal[:NUM_HELD_OUT]})
    PPOTrainer(config).fit(mix.workflow, mix, evaluation_prompts=held_out)


if __name__ == "__main__":
    sys.exit(run_script(main))
