"""The task of `tool_use.py`, by an agent that knows nothing of training: it speaks HTTP.

    python examples/agent.py --config configs/tool_use.yaml run_dir=runs/agent

Its body of a call is that of any client of OpenAI's. It runs as it is against another server, too:
only URL and key differ.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import aiohttp
from tool_use import TOOL, train

from areal_sc import AgentWorkflow, run_script


async def look_up(row: dict[str, Any], session: Any) -> float:
    """One call of the tool, and the answer; 1 for the right digit, else 0."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["question"]}]
    headers = {"Authorization": f"Bearer {session.api_key}"}

    async with aiohttp.ClientSession(headers=headers, raise_for_status=True) as client:

        async def ask() -> dict[str, Any]:
            body = {"model": "policy", "messages": messages, "tools": [TOOL]}
            async with client.post(f"{session.base_url}/chat/completions", json=body) as answer:
                message: dict[str, Any] = (await answer.json())["choices"][0]["message"]
                return message

        message = await ask()
        calls = message.get("tool_calls") or []
        if calls:
            messages.append(message)
            for call in calls:
                key = json.loads(call["function"]["arguments"]).get("key")
                found = row["table"].get(str(key), "none")
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": found})
            message = await ask()
    return float(bool(calls) and message["content"] == row["table"][row["key"]])


def main(argv: list[str]) -> None:
    train(argv, AgentWorkflow(look_up))


if __name__ == "__main__":
    sys.exit(run_script(main))
