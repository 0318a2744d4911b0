"""A text environment in the manner of Gymnasium: `reset` gives a text, each `step` another one.

    python examples/text_environment.py --config configs/one_gpu.yaml actor.path=<model>

The model guesses a number, and is told whether it is larger or smaller. Any class with `reset` and
`step` of text takes the place of `GuessNumber`.
"""

from __future__ import annotations

import re
import sys
from random import Random
from typing import Any

from areal_sc import (
    Conversation,
    GRPOConfig,
    PPOTrainer,
    Trajectory,
    Workflow,
    load_config,
    run_script,
)
from areal_sc.workflows.base import EpisodeEngine


class GuessNumber:
    """A number from 1 to 32; the fewer guesses, the larger the reward."""

    max_steps = 6

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        self.number, self.num_steps = Random(seed).randint(1, 32), 0
        return "I think of a number from 1 to 32. Answer with your guess alone.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.num_steps += 1
        is_over = self.num_steps == self.max_steps
        guess = re.search(r"\d+", action)
        if guess is None:
            return "That is no number.", 0.0, False, is_over, {}
        if int(guess[0]) == self.number:
            return "Right.", 1.0 - 0.1 * (self.num_steps - 1), True, False, {}
        side = "larger" if self.number > int(guess[0]) else "smaller"
        return f"My number is {side}.", 0.0, False, is_over, {}


class Play(Workflow):
    """One episode of the environment; its reward is the sum over the steps."""

    async def run_episode(
        self, prompt: dict[str, Any], engine: EpisodeEngine
    ) -> list[Trajectory] | None:
        environment = GuessNumber()
        seen, _ = environment.reset(seed=prompt["seed"])
        conversation, total, is_over = Conversation(seen), 0.0, False
        while not is_over:
            turn = await engine.chat(conversation)
            if turn.finish_reason == "context":  # no room for another turn
                break
            seen, reward, terminated, truncated, _ = environment.step(turn.content)
            total, is_over = total + reward, terminated or truncated
            if not is_over:
                conversation.add({"role": "user", "content": seen})
        metrics = {"accuracy": float(total > 0), "steps": environment.num_steps}
        return conversation.trajectories(total, metrics)


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    rows = [{"seed": seed} for seed in range(4096)]
    PPOTrainer(config).fit(Play(), rows[:-64], evaluation_prompts=rows[-64:])


if __name__ == "__main__":
    sys.exit(run_script(main))
