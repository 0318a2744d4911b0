"""Agents that a user might write, with the standard library alone, most of them wrong."""

from __future__ import annotations

import json
import os
import socket
import urllib.request
from typing import Any


def ask(text: str) -> str:
    """What the model answers."""
    return answer_to([{"role": "user", "content": text}])


def answer_to(messages: list[dict[str, str]], **more: Any) -> str:
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": "any", "messages": messages, **more}).encode(),
        {
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as answer:
        content: str = json.load(answer)["choices"][0]["message"]["content"]
    return content


def asks_twice(row: dict[str, Any]) -> float:
    """A conversation of two turns."""
    messages = [{"role": "user", "content": row["prompt"]}]
    messages += [
        {"role": "assistant", "content": answer_to(messages)},
        {"role": "user", "content": row["then"]},
    ]
    return float(len(answer_to(messages)))


def asks_with_a_tool(row: dict[str, Any]) -> float:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    return float(len(answer_to([{"role": "user", "content": row["prompt"]}], tools=[tool])))


def sees_the_model_alone(row: dict[str, Any]) -> float:
    """1 where there is nobody else to connect to."""
    ask(row["prompt"])
    try:
        with socket.create_connection(("127.0.0.1", row["port"])):
            return 0.0
    except OSError:
        return 1.0


def does(row: dict[str, Any]) -> Any:
    """What the row says."""
    if row["does"] == "calls nobody":
        return 1.0
    content = ask(row["prompt"])
    print("the model said", content)
    if row["does"] == "raises":
        raise KeyError(content)
    if row["does"] == "dies":
        os._exit(3)
    return {"returns None": None, "returns NaN": float("nan"), "returns text": content}.get(
        row["does"], 0.5
    )
