"""overflow.py URL KEY: what clients make of a conversation that is too long, and of no path."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from anthropic import Anthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI
from openai import OpenAI

url, key = sys.argv[1:]
messages = [{"role": "user", "content": "word " * 500}]
openai, anthropic = OpenAI(base_url=f"{url}/v1", api_key=key), Anthropic(base_url=url, api_key=key)
langchain = {"model": "policy", "base_url": f"{url}/v1", "api_key": key}


def refusal(ask: Callable[[], object]) -> list:
    try:
        ask()
    except Exception as error:
        body = error.body or {}
        told = body.get("error", body)  # OpenAI's client takes the inner one
        is_known = isinstance(error, ContextOverflowError)
        return [type(error).__name__, is_known, told.get("code"), told["type"], told["message"]]


def by_anthropic(**more: object) -> object:
    return anthropic.messages.create(model="policy", max_tokens=9, messages=messages, **more)


asked = {
    "chat": lambda: openai.chat.completions.create(model="policy", messages=messages),
    "responses": lambda: openai.responses.create(model="policy", input=messages),
    "messages": by_anthropic,
    "streamed": lambda: list(by_anthropic(stream=True)),
    "langchain": lambda: ChatOpenAI(**langchain).invoke(messages),
    "langchain_responses": lambda: ChatOpenAI(**langchain, use_responses_api=True).invoke(messages),
    "count": lambda: anthropic.messages.count_tokens(model="policy", messages=messages),
}
print(json.dumps({name: refusal(ask) for name, ask in asked.items()}))
