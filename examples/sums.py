"""A first run with a pretrained model: SmolLM2-135M-Instruct learns sums, on two CPU cores.

    make real-model    # writes the model to .venv-models/SmolLM2-135M-Instruct
    python examples/sums.py --config configs/sums.yaml

The model is asked "What is 27 + 14?", and its answer is begun: "27 + 14 =". What it adds is right
where it is the number and nothing else. An answer that `generation.max_new_tokens` cuts is wrong,
in training and in evaluations, so the model learns to add and to stop. At first few answers are
right, so an answer that is just a number gets a part of the reward. Evaluations ask for sums that
are never trained. `actor.path=<model>` takes another chat model, of a folder or the hub.
"""

from __future__ import annotations

import random
import re
import sys
from operator import add, sub
from typing import Any

from areal_sc import PPOTrainer, SingleTurnWorkflow, load_config, run_script

NUMBERS = range(2, 50)
OPERATORS = {"+": add, "-": sub}
NUM_HELD_OUT = 256


def sums() -> list[dict[str, Any]]:
    """All sums and differences of two numbers as rows, in an order that is always the same."""
    rows = [
        {
            "prompt": [
                {"role": "system", "content": "Reply with the number only."},
                {"role": "user", "content": f"What is {a} {sign} {b}?"},
                {"role": "assistant", "content": f"{a} {sign} {b} ="},  # so the answer begins
            ],
            "answer": str(operator(a, b)),
        }
        for sign, operator in OPERATORS.items()
        for a in NUMBERS
        for b in NUMBERS
    ]
    return random.Random(0).sample(rows, len(rows))


def right(prompt: dict[str, Any], completion: str) -> float:
    """1 where the whole answer is the number."""
    return float(completion.strip() == prompt["answer"])


def number(prompt: dict[str, Any], completion: str) -> float:
    """1 where the whole answer is a number."""
    return float(re.fullmatch(r"\s*-?\d+\s*", completion) is not None)


def main(argv: list[str]) -> None:
    config = load_config(argv)  # --config x.yaml key=value ...
    rows = sums()
    PPOTrainer(config).fit(
        SingleTurnWorkflow({"right": right, "number": (number, 0.2)}, use_chat_template=True),
        rows[NUM_HELD_OUT:],
        evaluation_prompts=rows[:NUM_HELD_OUT],
    )


if __name__ == "__main__":
    sys.exit(run_script(main))
