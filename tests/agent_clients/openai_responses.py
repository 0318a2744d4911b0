"""openai_responses.py URL KEY: OpenAI's client, responses."""

from __future__ import annotations

import json
import sys

from openai import APIError, APIStatusError, OpenAI
from task import DESCRIPTION, PARAMETERS, QUESTION, look_up

TOOLS = [
    {"type": "function", "name": "look_up", "description": DESCRIPTION, "parameters": PARAMETERS}
]


def answer(client: OpenAI, items: list, is_streamed: bool, texts: list, after: str | None = None):
    asked = {"model": "policy", "input": items, "tools": TOOLS}
    if not is_streamed:
        return client.responses.create(**asked, store=False)
    with client.responses.stream(**asked, previous_response_id=after) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                texts.append(event.delta)
        return stream.get_final_response()


def run(client: OpenAI, is_streamed: bool) -> dict:
    """Whole, it sends all items each time; streamed, those behind the response before."""
    items: list = [{"role": "user", "content": QUESTION}]
    texts: list = []
    after = None
    while True:
        response = answer(client, items, is_streamed, texts, after)
        if is_streamed:
            assert response.previous_response_id == after
            after, items = response.id, []
        else:
            items += response.output
        calls = [it for it in response.output if it.type == "function_call"]
        if not calls:
            usage = [response.usage.input_tokens, response.usage.output_tokens]
            return {"text": response.output_text, "usage": usage, "texts": texts}
        for call in calls:
            found = look_up(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": found})


def refusal(client: OpenAI, content: list) -> list:
    try:
        client.responses.create(model="policy", input=[{"role": "user", "content": content}])
    except APIStatusError as error:
        return [type(error).__name__, error.status_code, error.message]


def breaking(client: OpenAI) -> list:
    texts: list = []
    try:
        answer(client, [{"role": "user", "content": QUESTION}], True, texts)
    except APIError as error:
        return [type(error).__name__, error.message, texts]


url, key = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key=key)
image = {"type": "input_image", "image_url": "data:,", "detail": "auto"}
refused = [refusal(client, [image]), refusal(client.with_options(api_key="other"), [])]
runs = [run(client, is_streamed) for is_streamed in (False, True)]
print(json.dumps({"runs": runs, "refused": refused, "broken": breaking(client)}))
