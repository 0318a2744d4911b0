"""Answers of a model, and their streams."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from areal_sc.agents.calls import Dialect, ModelAnswer, ModelCall
from areal_sc.workflows.chat import ChatTurn
from areal_sc.workflows.chat_format import Message
from areal_sc.workflows.tool_calls import ToolCall

QUESTION = {"role": "user", "content": "How many?"}


def an_answer(text: str = "", reasoning: str = "", *calls: ToolCall, **given: Any) -> ModelAnswer:
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [call.as_message() for call in calls]
    finish = given.pop("finish", "stop")
    turn = ChatTurn(message, text, calls, (), finish, num_tokens=7)
    return ModelAnswer("a1", 1_700_000_000, turn, num_prompt_tokens=5, **given)


def events_of(pieces: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Each event's data, as a browser would read the stream."""
    for piece in b"".join(pieces).decode().split("\n\n")[:-1]:
        kind, data = piece.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        yield event


def streamed(
    dialect: Dialect, answer: ModelAnswer, cuts: tuple[int, ...] = (), call: ModelCall | None = None
) -> list[dict[str, Any]]:
    """Events of an answer whose text is there early up to the last cut."""
    stream = dialect.stream(call or ModelCall(messages=(QUESTION,)), "a1", 1_700_000_000)
    pieces = list(stream.opening())
    for start, end in zip((0, *cuts), cuts, strict=False):
        if added := answer.turn.content[start:end]:
            pieces += stream.text(added)
    return list(events_of([*pieces, *stream.rest(answer)]))
