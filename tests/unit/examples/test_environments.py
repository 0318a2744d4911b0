"""The examples of a code tool and of a text environment, played by a model that says its part."""

from __future__ import annotations

import json
from typing import Any, cast

import chat_templates as templates
from code_tool import CodeTool
from text_environment import GuessNumber, Play
from unit.workflows.test_chat import engine_for

from areal_sc.config.sandbox_settings import SandboxConfig
from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import GenerationEngine
from areal_sc.rewards.base import RewardFunction, Score
from areal_sc.rewards.pool import RewardPool
from areal_sc.rewards.running import CodeRunner
from areal_sc.workers.episodes import WorkerEpisodeEngine

END = "<|im_end|>"


class Rewards:
    """A pool without processes, with the real sandbox."""

    def __init__(self) -> None:
        self.run_code = CodeRunner(SandboxConfig())

    async def score(self, reward: RewardFunction, prompt: Any, completion: str, name: str) -> Score:
        return Score(cast("float", reward(prompt, completion)))


def called(code: str) -> str:
    arguments = json.dumps({"name": "python", "arguments": {"code": code}})
    return f"<tool_call>\n{arguments}\n</tool_call>{END}"


async def test_the_model_reads_what_its_program_printed() -> None:
    model, rewards = engine_for(templates.QWEN), Rewards()
    model.will_say(called("print(6 * 7)"), called("print(1 / 0)"), f"The answer is 42.{END}")
    engine = WorkerEpisodeEngine(
        cast("GenerationEngine", model), cast("RewardPool", rewards), "g", GenerationConfig()
    )
    try:
        rows = await CodeTool().run_episode({"prompt": "6 * 7 = ?", "answer": "42"}, engine)
    finally:
        await rewards.run_code.close()
    assert rows is not None
    (row,) = rows
    assert (row.reward, row.metrics["accuracy"], row.metrics["programs"]) == (1.0, 1.0, 2)
    read = model.tokenizer.decode(model.sent[-1])
    assert "42\n(exited)" in read
    assert "ZeroDivisionError: division by zero\n(exited)" in read
    assert CodeTool().runs_code()


async def test_the_environment_is_played_to_its_end() -> None:
    model, game = engine_for(templates.QWEN), GuessNumber()
    game.reset(seed=3)
    larger = game.number + 1
    model.will_say(f"Hm?{END}", f"{larger}{END}", f"It is {game.number}.{END}")
    rows = await Play().run_episode({"seed": 3}, model.episode)
    assert rows is not None
    (row,) = rows
    assert (row.reward, row.metrics["steps"]) == (0.8, 3)
    read = model.tokenizer.decode(model.sent[-1])
    assert read.index("That is no number.") < read.index("My number is smaller.")
    model.will_say(*[f"{larger}{END}"] * GuessNumber.max_steps)
    rows = await Play().run_episode({"seed": 3}, model.episode)
    assert rows is not None
    assert (rows[0].reward, rows[0].metrics["steps"]) == (0.0, GuessNumber.max_steps)
