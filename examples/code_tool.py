"""A model runs Python before it answers: a tool on the worker's sandbox, in a conversation.

    python examples/code_tool.py --config configs/jsonl_math.yaml actor.path=<model>

The model's chat template has to know tools. The rows are {"prompt": ..., "answer": ...} of
`task.dataset`, the last `task.num_held_out` of them for evaluation.
"""

from __future__ import annotations

import sys
from typing import Any

from areal_sc import (
    Conversation,
    GRPOConfig,
    PPOTrainer,
    Trajectory,
    Workflow,
    load_config,
    load_prompts,
    run_script,
)
from areal_sc.system.sandbox.program import Limits
from areal_sc.workflows.base import EpisodeEngine
from areal_sc.workflows.math_reward import check_answers, numeric_match
from areal_sc.workflows.tool_calls import ToolCall

TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs a Python program, and gives what it prints.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}},
    },
}
LIMITS = Limits(time_s=5.0)
MAX_CHARS = 2000


class CodeTool(Workflow):
    """Programs as the model likes, then the answer, whose value is compared.

    Args:
        max_turns: answers of the model, the last one included.
    """

    def __init__(self, max_turns: int = 4) -> None:
        self.max_turns = max_turns

    async def run_episode(
        self, prompt: dict[str, Any], engine: EpisodeEngine
    ) -> list[Trajectory] | None:
        conversation = Conversation(prompt["prompt"])
        num_programs = 0
        for turns_left in reversed(range(self.max_turns)):
            turn = await engine.chat(conversation, tools=[TOOL])
            if not turn.tool_calls or not turns_left:
                break
            for call in turn.tool_calls:
                conversation.add(call.answer(await self.run(call, engine)))
            num_programs += len(turn.tool_calls)
        score = await engine.score(numeric_match, prompt, turn.content)
        return conversation.trajectories(score, {"accuracy": score, "programs": num_programs})

    async def run(self, call: ToolCall, engine: EpisodeEngine) -> str:
        ended = await engine.run_code(str(call.arguments.get("code", "")), limits=LIMITS)
        printed = (ended.stdout + ended.stderr).decode(errors="replace")
        return f"{printed[-MAX_CHARS:]}({ended.end})"


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    rows = list(load_prompts(config.task["dataset"]))
    check_answers(rows)
    num_train = len(rows) - config.task["num_held_out"]
    PPOTrainer(config).fit(CodeTool(), rows[:num_train], evaluation_prompts=rows[num_train:])


if __name__ == "__main__":
    sys.exit(run_script(main))
