"""openai_responses.py URL KEY: OpenAI's client, responses."""

from __future__ import annotations

import json
import sys

from openai import OpenAI
from task import DESCRIPTION, PARAMETERS, QUESTION, look_up

TOOLS = [
    {"type": "function", "name": "look_up", "description": DESCRIPTION, "parameters": PARAMETERS}
]


def answer(client: OpenAI, items: list, is_streamed: bool):
    asked = {"model": "policy", "input": items, "tools": TOOLS, "store": False}
    if not is_streamed:
        return client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        return stream.get_final_response()


def run(client: OpenAI, is_streamed: bool) -> dict:
    items: list = [{"role": "user", "content": QUESTION}]
    while True:
        response = answer(client, items, is_streamed)
        items += response.output
        calls = [it for it in response.output if it.type == "function_call"]
        if not calls:
            return {"text": response.output_text, "usage": response.usage.model_dump()}
        for call in calls:
            found = look_up(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": found})


url, key = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
print(json.dumps([run(client, is_streamed) for is_streamed in (False, True)]))
