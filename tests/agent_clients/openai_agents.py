"""openai_agents.py URL KEY: OpenAI's Agents SDK as it is, which takes responses."""

from __future__ import annotations

import asyncio
import json
import os
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled
from task import QUESTION, look_up

url, key = sys.argv[1:]
os.environ |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
set_tracing_disabled(True)

agent = Agent(name="Keeper", instructions="Answer with a digit.", tools=[function_tool(look_up)])


async def run(is_streamed: bool) -> dict:
    texts: list = []
    if is_streamed:  # and sends what is new alone
        result = Runner.run_streamed(agent, QUESTION, auto_previous_response_id=True)
        async for event in result.stream_events():
            if getattr(getattr(event, "data", None), "type", "") == "response.output_text.delta":
                texts.append(event.data.delta)
    else:
        result = await Runner.run(agent, QUESTION)
    usage = result.context_wrapper.usage.request_usage_entries[-1]
    counted = [usage.input_tokens, usage.output_tokens]
    return {"text": result.final_output, "usage": counted, "texts": texts}


async def main() -> dict:
    return {"runs": [await run(is_streamed) for is_streamed in (False, True)]}


print(json.dumps(asyncio.run(main())))
