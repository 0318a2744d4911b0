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
        model="policy", base_url=f"{url}/v1", api_key=key, streaming=is_streamed, stream_usage=True
    )
    agent = create_agent(model, [find], system_prompt="Answer with a digit.")
    asked = {"messages": [("user", QUESTION)]}
    texts = []
    if is_streamed:
        for mode, chunk in agent.stream(asked, stream_mode=["messages", "values"]):
            if mode == "messages":
                texts.append(chunk[0].content)
            else:
                result = chunk
    else:
        result = agent.invoke(asked)
    message = result["messages"][-1]
    usage = [message.usage_metadata[name] for name in ("input_tokens", "output_tokens")]
    return {"text": message.content, "usage": usage, "texts": texts}


print(json.dumps({"runs": [run(is_streamed) for is_streamed in (False, True)]}))
