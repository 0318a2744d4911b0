"""A first run with a pretrained model: SmolLM2-135M-Instruct learns sums, on two CPU cores.

    make real-model    # writes the model to .venv-models/SmolLM2-135M-Instruct
    python examples/sums.py --config configs/sums.yaml

The model is asked "What is 27 + 14? Reply with the number only." An answer is right where the
number is its one final answer (docs/rewards.md) and it ends by itself: one that
`generation.max_new_tokens` cuts is wrong, so the model learns to add and to stop. Evaluations ask
for sums that are never trained. `actor.path=<model>` takes another chat model, of a folder or the
hub.
"""

from __future__ import annotations

import random
import sys
from operator import add, sub
from typing import Any

from areal_sc import PPOTrainer, SingleTurnWorkflow, load_config, run_script
from areal_sc.workflows.math_reward import numeric_match

NUMBERS = range(2, 50)
OPERATORS = {"+": add, "-": sub}
NUM_HELD_OUT = 256


def sums() -> list[dict[str, Any]]:
    """All sums and differences of two numbers as rows, in an order that is always the same."""
    rows = [
        {
            "prompt": f"What is {a} {sign} {b}? Reply with the number only.",
            "answer": str(operator(a, b)),
        }
        for sign, operator in OPERATORS.items()
        for a in NUMBERS
        for b in NUMBERS
    ]
    return random.Random(0).sample(rows, len(rows))


def is_right(prompt: dict[str, Any], completion: str) -> float:
    """1 for the number itself: the sum in other words, as `27 + 14`, has its value, too."""
    return numeric_match(prompt, completion) if prompt["answer"] in completion else 0.0


def main(argv: list[str]) -> None:
    config = load_config(argv)  # --config x.yaml key=value ...
    rows = sums()
    PPOTrainer(config).fit(
        SingleTurnWorkflow(is_right, use_chat_template=True),
        rows[NUM_HELD_OUT:],
        evaluation_prompts=rows[:NUM_HELD_OUT],
    )


if __name__ == "__main__":
    sys.exit(run_script(main))
