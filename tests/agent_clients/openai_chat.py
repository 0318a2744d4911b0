"""openai_chat.py URL KEY: OpenAI's client, chat completions."""

from __future__ import annotations

import json
import sys

from openai import APIError, APIStatusError, OpenAI
from task import DESCRIPTION, PARAMETERS, QUESTION, look_up

FUNCTION = {"name": "look_up", "description": DESCRIPTION, "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]


def answer(client: OpenAI, messages: list, is_streamed: bool, texts: list):
    asked = {"model": "policy", "messages": messages, "tools": TOOLS}
    if not is_streamed:
        return client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        for event in stream:
            if event.type == "content.delta":
                texts.append(event.delta)
        return stream.get_final_completion()


def run(client: OpenAI, is_streamed: bool) -> dict:
    messages: list = [{"role": "user", "content": QUESTION}]
    texts: list = []
    while True:
        completion = answer(client, messages, is_streamed, texts)
        (choice,) = completion.choices
        if choice.finish_reason != "tool_calls":
            usage = [completion.usage.prompt_tokens, completion.usage.completion_tokens]
            return {"text": choice.message.content, "usage": usage, "texts": texts}
        messages.append(choice.message)
        for call in choice.message.tool_calls:
            found = look_up(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})


def refusal(client: OpenAI, content: list) -> list:
    try:
        client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": content}]
        )
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
image = {"type": "image_url", "image_url": {"url": "data:,"}}
refused = [refusal(client, [image]), refusal(client.with_options(api_key="other"), [])]
runs = [run(client, is_streamed) for is_streamed in (False, True)]
print(json.dumps({"runs": runs, "refused": refused, "broken": breaking(client)}))
