"""Letter sorting in which one thing goes wrong, so that the page can be tried on what it leaves.

    python tests/integration/scripts/wrong_run.py reward_bug runs/a --warm-start runs/warm_start

reward_bug    the reward pays whatever letters stand in the right answer in this order: also none
collapse      the learning rate is a hundred times too high
slow_reward   the reward takes a quarter of a second of an answer with more than two letters
dying_worker  prompts that begin with q kill the worker that plays them

The first run makes the warm start, the same for all.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(REPOSITORY / "examples"))

from letter_sort import HELD_OUT_SEED, Config, warm_start  # noqa: E402
from letter_sort_task import LetterSortPrompts, letter_sort_reward  # noqa: E402

from areal_sc import (  # noqa: E402
    PPOTrainer,
    SingleTurnWorkflow,
    Trajectory,
    load_config,
    run_script,
)
from areal_sc.workflows.base import EpisodeEngine  # noqa: E402

SETTINGS = (
    *("total_steps=30", "actor.device=cpu", "rollout.device=cpu", "actor.optimizer.lr=1e-3"),
    *("rollout.train_batch_groups=16", "task.max_letters=4", "task.median_letters=3"),
    "task.warm_start={steps: 150, batch_size: 128, lr: 8e-3, hidden_size: 48, ffn_size: 96, "
    "num_layers: 2}",
    *("evaluation.num_prompts=64", "evaluation.every_steps=10"),
)
OF_FAULT = {
    "reward_bug": (),
    "collapse": ("actor.optimizer.lr=1e-1", "actor.optimizer.max_grad_norm=0"),
    "slow_reward": ("total_steps=10",),
    "dying_worker": ("total_steps=15",),
}


def lenient_reward(prompt: Mapping[str, Any], completion: str) -> float:
    return float(completion in prompt["answer"])


def slow_reward(prompt: Mapping[str, Any], completion: str) -> float:
    if len(completion) > 2:
        time.sleep(0.25)
    return letter_sort_reward(prompt, completion)


class PoisonedWorkflow(SingleTurnWorkflow):
    async def run_episode(self, prompt: Any, engine: EpisodeEngine) -> Trajectory | None:
        if prompt["prompt"].startswith("q"):
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().run_episode(prompt, engine)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("fault", choices=OF_FAULT)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--warm-start", type=Path, required=True)
    asked = parser.parse_args(argv)
    given = ["--config", str(REPOSITORY / "configs" / "letter_sort.yaml"), *SETTINGS]
    given += [*OF_FAULT[asked.fault], f"run_dir={asked.run_dir}", f"actor.path={asked.warm_start}"]
    config = load_config(given, Config, makes_model=True)
    shape = {"max_letters": config.task.max_letters, "median_letters": 3}
    rewards = {"reward_bug": lenient_reward, "slow_reward": slow_reward}
    workflow = PoisonedWorkflow if asked.fault == "dying_worker" else SingleTurnWorkflow
    with PPOTrainer(config) as trainer:
        warm_start(config, trainer)
        trainer.fit(
            workflow(rewards.get(asked.fault, letter_sort_reward)),
            LetterSortPrompts(config.seed, **shape),
            evaluation_prompts=LetterSortPrompts(config.seed + HELD_OUT_SEED, **shape),
            evaluation_workflow=SingleTurnWorkflow(letter_sort_reward),
        )


if __name__ == "__main__":
    sys.exit(run_script(main))
