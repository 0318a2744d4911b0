"""Agents as users have them: each finds the model by the variables of its client."""

from __future__ import annotations


def ask(row: dict) -> float:
    """Asks by the client that the row names; 0.5 for an answer."""
    answer = {"agents": by_agents, "anthropic": by_anthropic, "langgraph": by_langgraph}
    return 0.5 if isinstance(answer[row["client"]](row["prompt"]), str) else 0.0


def by_agents(prompt: str) -> str:
    from agents import Agent, ModelBehaviorError, Runner, set_tracing_disabled

    set_tracing_disabled(True)
    try:
        return Runner.run_sync(Agent(name="Keeper"), prompt).final_output
    except ModelBehaviorError as error:  # what the SDK makes of an answer that was cut
        return str(error)


def by_anthropic(prompt: str) -> str:
    from anthropic import Anthropic

    messages = [{"role": "user", "content": prompt}]
    message = Anthropic().messages.create(model="policy", max_tokens=4, messages=messages)
    return "".join(block.text for block in message.content)


def by_langgraph(prompt: str) -> str:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    result = create_agent(ChatOpenAI(model="policy"), []).invoke({"messages": [("user", prompt)]})
    return result["messages"][-1].content
