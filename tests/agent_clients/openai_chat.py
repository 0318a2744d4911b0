"""openai_chat.py URL KEY: OpenAI's client, chat completions."""

from __future__ import annotations

import json
import sys

from openai import OpenAI
from task import DESCRIPTION, PARAMETERS, QUESTION, look_up

FUNCTION = {"name": "look_up", "description": DESCRIPTION, "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]


def answer(client: OpenAI, messages: list, is_streamed: bool):
    asked = {"model": "policy", "messages": messages, "tools": TOOLS}
    if not is_streamed:
        return client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion()


def run(client: OpenAI, is_streamed: bool) -> dict:
    messages: list = [{"role": "user", "content": QUESTION}]
    while True:
        completion = answer(client, messages, is_streamed)
        (choice,) = completion.choices
        if choice.finish_reason != "tool_calls":
            return {"text": choice.message.content, "usage": completion.usage.model_dump()}
        messages.append(choice.message)
        for call in choice.message.tool_calls:
            found = look_up(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})


url, key = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
print(json.dumps([run(client, is_streamed) for is_streamed in (False, True)]))
