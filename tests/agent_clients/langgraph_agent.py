"""langgraph_agent.py URL KEY: an agent of LangChain and LangGraph, by chat completions."""

from __future__ import annotations

import json
import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from task import QUESTION, look_up

url, key = sys.argv[1:]


def find(key: str) -> str:
    """Gives the digit that belongs to a key."""
    return look_up(key)


find.__name__ = "look_up"


def run(is_streamed: bool) -> dict:
    model = ChatOpenAI(
        model="policy", base_url=f"{url}/v1", api_key=key, max_retries=0, streaming=is_streamed
    )
    agent = create_agent(model, [find], system_prompt="Answer with a digit.")
    result = agent.invoke({"messages": [("user", QUESTION)]})
    message = result["messages"][-1]
    return {"text": message.content, "usage": message.usage_metadata}


print(json.dumps([run(is_streamed) for is_streamed in (False, True)]))
