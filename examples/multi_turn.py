"""A multi-turn episode and the training loop, both written in the user's own script.

    python examples/multi_turn.py --config configs/letter_sort.yaml run_dir=runs/multi_turn

The model sorts letters; where it errs, it is shown `=` again and has another try. The reward is
that of the last try, a little less for each further one. Needs the warm-start model, which
`examples/letter_sort.py` makes.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from letter_sort_task import LetterSortPrompts, letter_sort_reward

from areal_sc import (
    GRPOConfig,
    RolloutController,
    TrainController,
    Trajectory,
    Workflow,
    load_config,
    make_actor,
    make_generator,
    make_scheduler,
    run_script,
    start,
)
from areal_sc.rewards.base import RewardFunction
from areal_sc.workflows.base import EpisodeEngine
from areal_sc.workflows.text import decode_completion, encode_text
from areal_sc.workflows.transcript import Transcript

logger = logging.getLogger("multi_turn")


class RetryWorkflow(Workflow):
    """Up to `max_turns` answers; the feedback between them is read, but not trained on.

    Args:
        reward: 1 for a right answer, else 0.
        feedback: what the model is told after a wrong answer.
        discount: factor of the reward for each further turn.
    """

    def __init__(
        self,
        reward: RewardFunction,
        max_turns: int = 2,
        feedback: str = "=",
        discount: float = 0.9,
    ) -> None:
        self.reward = reward
        self.max_turns = max_turns
        self.feedback = feedback
        self.discount = discount

    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> Trajectory | None:
        transcript = Transcript()
        transcript.add_context(encode_text(engine.tokenizer, prompt["prompt"]))
        feedback_ids = encode_text(engine.tokenizer, self.feedback, begins=False)
        num_turns, score = 0, 0.0
        while num_turns < self.max_turns and score < 1.0:
            if num_turns > 0:
                if len(transcript.input_ids) + len(feedback_ids) >= engine.max_context_tokens:
                    break  # no room for another answer
                transcript.add_context(feedback_ids)
            completion = await engine.generate(transcript.input_ids)
            transcript.add_completion(completion)
            answer = decode_completion(engine.tokenizer, completion)
            score = await engine.score(self.reward, prompt, answer)
            num_turns += 1
        reward = score * self.discount ** (num_turns - 1)
        return transcript.trajectory(reward, {"accuracy": score, "turns": float(num_turns)})


def main(argv: list[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = load_config(argv, GRPOConfig)
    scheduler = make_scheduler(config.scheduler)
    actor = TrainController(engine=make_actor(config.actor), scheduler=scheduler)
    rollout = RolloutController(engine=make_generator(config.rollout), scheduler=scheduler)
    prompts = LetterSortPrompts(config.seed)
    workflow = RetryWorkflow(letter_sort_reward)
    with start(actor, rollout):
        for _ in range(actor.version, config.total_steps):
            batch = rollout.prepare_batch(prompts, workflow=workflow)
            batch = actor.compute_advantages(batch)
            batch = actor.compute_proximal_logprobs(batch)
            stats = actor.ppo_update(batch)
            actor.publish_weights(rollout)  # version += 1; generation goes on
            metrics = rollout.batch_metrics
            logger.info(
                "step=%d accuracy=%.3f turns=%.2f loss=%.4f",
                *(actor.version, metrics["accuracy"], metrics["turns"], stats["loss"]),
            )
        actor.save_hf(f"{config.run_dir}/model")


if __name__ == "__main__":
    sys.exit(run_script(main))
