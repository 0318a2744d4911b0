"""anthropic_messages.py URL KEY: Anthropic's client, with its thinking blocks handed back."""

from __future__ import annotations

import json
import sys

from anthropic import Anthropic
from task import DESCRIPTION, PARAMETERS, QUESTION, look_up

TOOLS = [{"name": "look_up", "description": DESCRIPTION, "input_schema": PARAMETERS}]


def answer(client: Anthropic, messages: list, is_streamed: bool):
    asked = {
        "model": "policy",
        "max_tokens": 1024,
        "system": "Answer with a digit.",
        "messages": messages,
        "tools": TOOLS,
        "thinking": {"type": "adaptive"},
    }
    if not is_streamed:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        for _ in stream:
            pass
        return stream.get_final_message()


def run(client: Anthropic, is_streamed: bool) -> dict:
    messages: list = [{"role": "user", "content": QUESTION}]
    while True:
        message = answer(client, messages, is_streamed)
        if message.stop_reason != "tool_use":
            text = "".join(it.text for it in message.content if it.type == "text")
            return {"text": text, "usage": message.usage.model_dump()}
        results = [
            {"type": "tool_result", "tool_use_id": it.id, "content": look_up(**it.input)}
            for it in message.content
            if it.type == "tool_use"
        ]
        messages += [
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": results},
        ]


url, key = sys.argv[1:]
client = Anthropic(base_url=url, api_key=key, max_retries=0)
print(json.dumps([run(client, is_streamed) for is_streamed in (False, True)]))
