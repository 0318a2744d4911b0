"""The examples of tools and environments, played by a model that says its part."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

import chat_templates as templates
import pytest
import verifiers_task
from aiohttp import web
from aiohttp.test_utils import TestServer
from code_tool import CodeTool
from openenv_task import PlayAtUrl
from text_environment import GuessNumber, Play
from unit.workflows.test_chat import engine_for

from areal_sc.agents.agent import NamedAgent, check_in_interpreter
from areal_sc.config.sandbox_settings import SandboxConfig
from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import GenerationEngine
from areal_sc.errors import ConfigError, WorkflowError
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


async def guessing(request: web.Request) -> web.WebSocketResponse:
    """An environment that answers as a server of OpenEnv does: its secret is the seed."""
    told, secret = web.WebSocketResponse(), -1
    await told.prepare(request)
    async for message in told:
        asked = message.json()
        data = asked["data"]
        if asked["type"] == "reset":
            secret, seen = data["seed"], {"text": "Guess!"}
            answer = {"observation": seen, "reward": None, "done": False}
        elif data.keys() != {"message"}:
            await told.send_json({"type": "error", "data": {"message": "Invalid message"}})
            continue
        else:
            is_right = data["message"] == str(secret)
            seen = {"text": "Right." if is_right else "Wrong."}
            answer = {"observation": seen, "reward": float(is_right), "done": is_right}
        await told.send_json({"type": "observation", "data": answer})
    return told


async def test_an_environment_behind_a_url_is_played_to_its_end() -> None:
    app = web.Application()
    app.add_routes([web.get("/ws", guessing)])
    async with TestServer(app) as server:
        model, url = engine_for(templates.QWEN), str(server.make_url("/ws")).replace("http", "ws")
        model.will_say(f"2{END}", f"3{END}", f"2{END}", f"2{END}", f"2{END}")
        rows = await PlayAtUrl(url, "message", 8).run_episode({"seed": 3}, model.episode)
        assert rows is not None
        (row,) = rows
        assert (row.reward, row.metrics["steps"]) == (1.0, 2)
        assert '{"text": "Wrong."}' in model.tokenizer.decode(model.sent[-1])
        rows = await PlayAtUrl(url, "message", 2).run_episode({"seed": 3}, model.episode)
        assert rows is not None
        assert (rows[0].reward, rows[0].metrics["steps"]) == (0.0, 2)
        with pytest.raises(ValueError, match="Invalid message"):
            await PlayAtUrl(url, "guess", 2).run_episode({"seed": 3}, model.episode)


def test_verifiers_is_missed_before_a_run(tmp_path: Path) -> None:
    settings = [f"run_dir={tmp_path}", "total_steps=1", "actor.path=m"]
    with pytest.raises(ConfigError, match="in which verifiers is installed"):
        verifiers_task.main([*settings, "task={taskset: x, num_tasks: 1}"])
    with pytest.raises(WorkflowError, match="No module named 'verifiers'"):
        check_in_interpreter(NamedAgent.find(verifiers_task.AGENT), sys.executable)
