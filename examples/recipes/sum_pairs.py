"""A model learns from pairs of answers how to answer sums, before rewards teach it to be right.

    make real-model    # writes the model to .venv-models/SmolLM2-135M-Instruct
    python examples/recipes/sum_pairs.py --config configs/sum_pairs.yaml
    python examples/sums.py --config configs/sums.yaml run_dir=runs/sums_after_pairs \\
        actor.path=runs/sum_pairs/model

The first command is DPO: of two answers to a sum, the right number alone is preferred to another
number, or to a sentence. The second one is reinforcement learning that begins with its model. The
pairs are of numbers from 50 on, and the sums of the second command are of smaller ones.
"""

from __future__ import annotations

import random
import sys
from typing import Any

from areal_sc import DPOTrainer, load_config, run_script

NUMBERS = range(50, 100)
NUM_PAIRS = 1024
NUM_HELD_OUT = 64
BATCH_SIZE = 32  # pairs a step


def pairs() -> list[dict[str, Any]]:
    """No sum is asked twice; every other answer that is rejected is a sentence, always the same."""
    draw = random.Random(0)
    asked = [(a, b, sign) for a in NUMBERS for b in NUMBERS for sign in "+-"]
    return [
        pair(a, b, sign, draw, in_words=number % 2 == 0)
        for number, (a, b, sign) in enumerate(draw.sample(asked, NUM_PAIRS))
    ]


def pair(a: int, b: int, sign: str, draw: random.Random, *, in_words: bool) -> dict[str, Any]:
    """An answer that is the number alone, and one in words or of another number."""
    value = a + b if sign == "+" else a - b
    wrong = value + draw.choice([-10, -2, -1, 1, 2, 10])
    return {
        "prompt": f"What is {a} {sign} {b}? Reply with the number only.",
        "chosen": str(value),
        "rejected": f"The answer is {value}." if in_words else str(wrong),
    }


def main(argv: list[str]) -> None:
    config = load_config(argv, generates=False)
    rows = pairs()
    DPOTrainer(config).fit(rows[NUM_HELD_OUT:], held_out=rows[:NUM_HELD_OUT], batch_size=BATCH_SIZE)


if __name__ == "__main__":
    sys.exit(run_script(main))
