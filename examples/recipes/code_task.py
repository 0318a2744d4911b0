"""A model learns to write one line of Python, which the sandbox tests, on two CPU cores.

    make real-model    # writes the model to .venv-models/SmolLM2-135M-Instruct
    python examples/recipes/code_task.py --config configs/code_task.yaml

The model reads what a function of a list should return, and completes the function's one line. An
answer is right where the function passes all its tests in the sandbox. Functions and tests are
drawn by this script, and the functions of the evaluation are never trained.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

from areal_sc import GRPOConfig, PPOTrainer, SingleTurnWorkflow, load_config, run_script
from areal_sc.rewards.base import RunCode, Score
from areal_sc.rewards.code.reward import CodeReward
from areal_sc.system.sandbox.program import Limits

CHOSEN: dict[str, Callable[[list[int], int], list[int]]] = {
    "the items": lambda items, n: items,
    "the first {n} items": lambda items, n: items[:n],
    "the last {n} items": lambda items, n: items[-n:],
    "the items larger than {n}": lambda items, n: [item for item in items if item > n],
    "the items smaller than {n}": lambda items, n: [item for item in items if item < n],
    "the even items": lambda items, n: [item for item in items if item % 2 == 0],
    "the odd items": lambda items, n: [item for item in items if item % 2 == 1],
    "{n} times each item": lambda items, n: [n * item for item in items],
}
ASKED: dict[str, Callable[[list[int]], Any]] = {
    "The sum of {chosen}.": sum,
    "The number of {chosen}.": len,
    "The largest of {chosen}.": max,
    "The smallest of {chosen}.": min,
    "A list of {chosen}.": list,
    "A sorted list of {chosen}.": sorted,
}
NUMBERS = range(2, 7)
NUM_TESTS = 3
NUM_HELD_OUT = 64
STUB = '''\
def solve(items):
    """{asked}"""
    return'''
SHOWN = {
    "The sum of the first 8 items.": "sum(items[:8])",
    "A sorted list of the items larger than 9.": "sorted(item for item in items if item > 9)",
    "The largest of 8 times each item.": "max(8 * item for item in items)",
    "The number of odd items.": "len([item for item in items if item % 2 == 1])",
}
EXAMPLES = "".join(f"{STUB.format(asked=asked)} {line}\n\n" for asked, line in SHOWN.items())


def functions() -> list[dict[str, Any]]:
    """A row for each function, with its tests, in an order that is always the same."""
    draw = random.Random(0)
    rows = []
    for asked, value in ASKED.items():
        for chosen, choose in CHOSEN.items():
            for n in NUMBERS if "{n}" in chosen else NUMBERS[:1]:
                stub = STUB.format(asked=asked.format(chosen=chosen.format(n=n)))
                tests: dict[str, Any] = {"fn_name": "solve", "inputs": [], "outputs": []}
                while len(tests["inputs"]) < NUM_TESTS:
                    items = [draw.randint(0, 9) for _ in range(8)]
                    if kept := choose(items, n):
                        tests["inputs"].append([items])
                        tests["outputs"].append(value(kept))
                rows.append({"prompt": EXAMPLES + stub, "stub": stub, "tests": tests})
    return draw.sample(rows, len(rows))


run_tests = CodeReward(limits=Limits(time_s=4.0))


async def passes(prompt: Mapping[str, Any], completion: str, run_code: RunCode) -> Score:
    """1 where the whole function passes its tests; `passed` is the share of them."""
    return await run_tests(prompt, f"```python\n{prompt['stub']}{completion}\n```", run_code)


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    rows = functions()
    PPOTrainer(config).fit(
        SingleTurnWorkflow(passes), rows[NUM_HELD_OUT:], evaluation_prompts=rows[:NUM_HELD_OUT]
    )


if __name__ == "__main__":
    sys.exit(run_script(main))
