"""What the dialects share: a body read by its types, and events written. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Final, TypeVar

import msgspec

from areal_sc.agents.calls import CallRefused, ContextOverflow, ModelAnswer

_Body = TypeVar("_Body", bound=msgspec.Struct)

_OF_ONE_CALL: Final = r"at `\$\.(messages|input|max_\w+)\b"
"""In what msgspec says of a field that is another one in each call."""


def read_body(body: Mapping[str, Any], kind: type[_Body], *, without: Collection[str]) -> _Body:
    """A body as a struct, whose types say what can be asked for; null is as if it was not there.

    Args:
        without: names of fields that change nothing in what is sampled, whatever they hold.
    Raises: CallRefused: 400: a field is wrong, or nothing that the struct has.
    """
    asked = {name: it for name, it in body.items() if it is not None and name not in without}
    try:
        return msgspec.convert(asked, kind)
    except msgspec.ValidationError as error:
        told = (
            f"{error}: it is wrong, or cannot be done here: leave it out (docs/agent-frameworks.md)"
        )
        is_for_all = not re.search(_OF_ONE_CALL, str(error))
        raise CallRefused(400, "invalid_body", told, is_for_all=is_for_all) from error


def function_tool(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """A tool in the form that chat templates read.

    Args:
        parameters: JSON schema of the arguments.
    """
    told = {} if description is None else {"description": description}
    function = {"name": name, **told, "parameters": parameters}
    return {"type": "function", "function": function}


def joined_text(content: str | list[Any]) -> str:
    """A content, whose parts have a `text` each.

    Raises: CallRefused: 400: a part is a picture.
    """
    if isinstance(content, str):
        return content
    if any(hasattr(it, "picture") for it in content):
        why = "pictures (images): expected in messages of the user and results of tools alone"
        raise CallRefused(400, "invalid_body", why)
    return "\n".join(it.text for it in content)


def content_of(content: str | list[Any]) -> str | list[dict[str, str]]:
    """A content as templates read it: text, or parts where one is a `picture`."""
    if isinstance(content, str) or not any(hasattr(it, "picture") for it in content):
        return joined_text(content)
    return [
        {"type": "image", "image": it.picture}
        if hasattr(it, "picture")
        else {"type": "text", "text": it.text}
        for it in content
    ]


def openai_tokens(answer: ModelAnswer) -> list[dict[str, Any]]:
    """The sampled tokens, as OpenAI's clients read log-probabilities."""
    return [
        {
            "token": it.text,
            "bytes": list(it.text.encode()),
            "logprob": it.logprob,
            "top_logprobs": [],
        }
        for it in answer.tokens
    ]


def one_call_only() -> CallRefused:
    """The refusal of a call that must not be answered with several calls of tools."""
    return CallRefused(
        400,
        "invalid_body",
        "parallel calls of tools cannot be forbidden: the model calls as many as it samples; "
        "leave it out, and run the calls one after the other",
        is_for_all=True,
    )


def openai_error(refused: CallRefused, of_overflow: str, prompt: str) -> dict[str, Any]:
    """A refusal as OpenAI's clients read it.

    Args:
        of_overflow: see `CallRefused.told`.
        prompt: the field that has the prompt.
    """
    return {
        "message": refused.told(of_overflow),
        "type": "invalid_request_error" if refused.status < 500 else "server_error",
        "param": prompt if isinstance(refused, ContextOverflow) else None,
        "code": refused.code,
    }


def event(kind: str, **fields: Any) -> bytes:
    """A piece of `text/event-stream`."""
    body = json.dumps({"type": kind, **fields}, separators=(",", ":"))
    return f"event: {kind}\ndata: {body}\n\n".encode()
