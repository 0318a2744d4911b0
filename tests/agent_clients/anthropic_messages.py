"""anthropic_messages.py URL KEY: Anthropic's client, with its thinking blocks handed back."""

from __future__ import annotations

import json
import sys

from anthropic import Anthropic, APIError, APIStatusError
from task import DESCRIPTION, PARAMETERS, QUESTION, look_up

TOOLS = [{"name": "look_up", "description": DESCRIPTION, "input_schema": PARAMETERS}]


def answer(client: Anthropic, messages: list, is_streamed: bool, texts: list):
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
        for text in stream.text_stream:
            texts.append(text)
        return stream.get_final_message()


def run(client: Anthropic, is_streamed: bool) -> dict:
    messages: list = [{"role": "user", "content": QUESTION}]
    texts: list = []
    while True:
        message = answer(client, messages, is_streamed, texts)
        if message.stop_reason != "tool_use":
            text = "".join(it.text for it in message.content if it.type == "text")
            usage = [message.usage.input_tokens, message.usage.output_tokens]
            return {"text": text, "usage": usage, "texts": texts}
        results = [
            {"type": "tool_result", "tool_use_id": it.id, "content": look_up(**it.input)}
            for it in message.content
            if it.type == "tool_use"
        ]
        messages += [
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": results},
        ]


def refusal(client: Anthropic, content: list) -> list:
    messages = [{"role": "user", "content": content}]
    try:
        client.messages.create(model="policy", max_tokens=9, messages=messages)
    except APIStatusError as error:
        return [type(error).__name__, error.status_code, error.message]


def breaking(client: Anthropic) -> list:
    texts: list = []
    try:
        answer(client, [{"role": "user", "content": QUESTION}], True, texts)
    except APIError as error:
        return [type(error).__name__, error.message, texts]


url, key = sys.argv[1:]
client = Anthropic(base_url=url, api_key=key)
source = {"type": "base64", "media_type": "image/png", "data": ""}
image = {"type": "image", "source": source}
refused = [refusal(client, [image]), refusal(client.with_options(api_key="other"), [])]
runs = [run(client, is_streamed) for is_streamed in (False, True)]
print(json.dumps({"runs": runs, "refused": refused, "broken": breaking(client)}))
