"""An environment behind a URL, as OpenEnv serves them: `reset` and `step` over one connection.

    uvicorn my_env.server.app:app --port 8000    # any environment of OpenEnv whose action is text
    python examples/openenv_task.py --config configs/one_gpu.yaml actor.path=<model> \
        'task={url: ws://127.0.0.1:8000/ws, action: message, max_steps: 8}'

The model reads each observation as JSON, and what it answers is the field `task.action` of the next
action. Only aiohttp is needed here: what the environment needs stays where it runs.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import aiohttp

from areal_sc import (
    Conversation,
    GRPOConfig,
    PPOTrainer,
    Trajectory,
    Workflow,
    load_config,
    run_script,
)
from areal_sc.errors import ConfigError
from areal_sc.workflows.base import EpisodeEngine

SETTINGS = ("url", "action", "max_steps")
"""What this script reads of `task`; a YAML may have more there, for another script."""


class PlayAtUrl(Workflow):
    """One episode of an environment; its reward is the sum over the steps.

    Args:
        url: of the environment's connections, ws://HOST:PORT/ws.
        action: the field of an action that holds the answer.
        max_steps: that an episode may take.
    """

    def __init__(self, url: str, action: str, max_steps: int) -> None:
        self.url, self.action, self.max_steps = url, action, max_steps

    async def run_episode(
        self, prompt: dict[str, Any], engine: EpisodeEngine
    ) -> list[Trajectory] | None:
        async with aiohttp.ClientSession() as client, client.ws_connect(self.url) as environment:

            async def ask(kind: str, data: dict[str, Any]) -> dict[str, Any]:
                await environment.send_json({"type": kind, "data": data})
                told = await environment.receive_json()
                if told["type"] == "error":
                    raise ValueError(told["data"]["message"])
                found: dict[str, Any] = told["data"]
                return found

            seen = await ask("reset", {"seed": prompt["seed"]})
            conversation, total, num_steps = Conversation(json.dumps(seen["observation"])), 0.0, 0
            while not seen["done"] and num_steps < self.max_steps:
                if num_steps > 0:
                    content = json.dumps(seen["observation"])
                    conversation.add({"role": "user", "content": content})
                turn = await engine.chat(conversation)
                if turn.finish_reason == "context":  # no room for another turn
                    break
                seen = await ask("step", {self.action: turn.content})
                total, num_steps = total + (seen["reward"] or 0.0), num_steps + 1
        return conversation.trajectories(total, {"steps": num_steps})


def workflow_of(task: dict[str, Any]) -> PlayAtUrl:
    """Raises: ConfigError: a setting is missing."""
    if missing := [f"task.{name}" for name in SETTINGS if name not in task]:
        raise ConfigError(
            f"{', '.join(missing)}: not set; the command at the top of examples/openenv_task.py "
            "names all of them"
        )
    return PlayAtUrl(**{name: task[name] for name in SETTINGS})


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    workflow = workflow_of(config.task)
    rows = [{"seed": seed} for seed in range(4096)]
    PPOTrainer(config).fit(workflow, rows[:-64], evaluation_prompts=rows[-64:])


if __name__ == "__main__":
    sys.exit(run_script(main))
