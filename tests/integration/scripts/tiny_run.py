"""A whole run with PPOTrainer that a test can hold at a known place: see `tiny_run.yaml`."""

from __future__ import annotations

import asyncio
import random
import string
import sys
from pathlib import Path
from typing import Any

from areal_sc import GRPOConfig, PPOTrainer, SingleTurnWorkflow, Trajectory, load_config, run_script
from areal_sc.rewards.base import RewardFunction
from areal_sc.trainer import run
from areal_sc.workflows.base import EpisodeEngine


def partial(prompt: dict[str, Any], completion: str) -> float:
    """Never 0, so that a 0 in the metrics would be no answer's reward."""
    # as a reward does that asks a judge: its process has no loop of the worker
    asyncio.get_event_loop().run_until_complete(asyncio.sleep(0))
    return 1.0 if completion[:1] in prompt["answer"] else 0.5


def by_letters(prompt: dict[str, Any], completion: str) -> float:
    """Different for nearly any two answers."""
    return sum(map(ord, completion)) / 1000


def unknown_answer(prompt: dict[str, Any], completion: str) -> float:
    """The key is not there: every row is rejected."""
    return float(prompt["solution"] == completion)


REWARDS: dict[str, RewardFunction] = {
    "partial": partial,
    "by_letters": by_letters,
    "unknown_answer": unknown_answer,
}


class GatedWorkflow(SingleTurnWorkflow):
    """Holds a worker's episodes after each `num_free` of them until the file `gate` grows."""

    def __init__(
        self,
        reward: RewardFunction,
        num_free: int,
        gate: Path,
        use_chat_template: bool = False,
    ) -> None:
        super().__init__(reward, use_chat_template=use_chat_template)
        self.num_free = num_free
        self.gate = gate
        self._num_begun = 0

    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> Trajectory | None:
        number = self._num_begun
        self._num_begun += 1
        # the file is of another process: there is no event to wait for
        while number // self.num_free > self._size_of_gate():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return await super().run_episode(prompt, engine)

    def _size_of_gate(self) -> int:
        return self.gate.stat().st_size if self.gate.exists() else 0


def letter_prompts(num_prompts: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    answers = [rng.sample(string.ascii_lowercase, rng.randint(2, 8)) for _ in range(num_prompts)]
    return [{"prompt": "".join(a) + "=", "answer": "".join(sorted(a))} for a in answers]


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    task = config.task
    reward, is_chat = REWARDS[task["reward"]], task["use_chat_template"]
    if not task["draws"]:
        run.plot_learning_curve = lambda *_: None
    PPOTrainer(config).fit(
        GatedWorkflow(reward, task["num_free_episodes"], Path(task["gate"]), is_chat),
        letter_prompts(64, seed=0),
        evaluation_prompts=letter_prompts(16, seed=1),
        evaluation_workflow=SingleTurnWorkflow(reward, use_chat_template=is_chat),
    )


if __name__ == "__main__":
    sys.exit(run_script(main))
