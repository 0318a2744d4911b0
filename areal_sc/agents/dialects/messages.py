"""Anthropic's `/v1/messages`. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from areal_sc.agents.calls import AnswerStream, CallRefused, ModelAnswer, ModelCall
from areal_sc.agents.dialects.bodies import (
    content_of,
    event,
    function_tool,
    joined_text,
    one_call_only,
    read_body,
)
from areal_sc.workflows.chat_format import Message
from areal_sc.workflows.tool_calls import call_entry

_WITHOUT: Final = frozenset(
    ["cache_control", "inference_geo", "metadata", "service_tier", "speed", "user_profile_id"]
)

_ERRORS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}

_OF_OVERFLOW: Final = (
    "prompt is too long: {num_tokens} tokens > {max_tokens} maximum (rollout.max_context_tokens)"
)

_STOP_REASONS: Final = {"length": "max_tokens", "context": "model_context_window_exceeded"}


class AnthropicMessages:
    """The dialect of Anthropic's clients."""

    path = "/v1/messages"

    def read(self, body: Mapping[str, Any]) -> ModelCall:
        asked = read_body(body, _MessagesBody, without=_WITHOUT)
        if asked.tool_choice.disable_parallel_tool_use and asked.tools:
            raise one_call_only()
        sampling = {"temperature": asked.temperature, "top_p": asked.top_p, "top_k": asked.top_k}
        has_tools = asked.tool_choice.type == "auto"
        return ModelCall(
            messages=tuple(asked.as_messages()),
            tools=tuple(
                function_tool(it.name, it.description, it.input_schema)
                for it in (asked.tools if has_tools else ())
            ),
            stop=tuple(asked.stop_sequences),
            max_tokens=asked.max_tokens,
            sampling={name: it for name, it in sampling.items() if it is not None},
            model=asked.model,
            wants_reasoning=asked.thinking.type != "disabled",
            is_streamed=asked.stream,
        )

    def write(self, call: ModelCall, answer: ModelAnswer) -> dict[str, Any]:
        body = _message(call.model, answer.answer_id)
        return {**body, "content": _blocks(call, answer), **_stop(answer), "usage": _usage(answer)}

    def stream(self, call: ModelCall, answer_id: str, created_s: int) -> AnswerStream:
        return _BlockStream(call, answer_id)

    def refuse(self, refused: CallRefused) -> dict[str, Any]:
        return {"type": "error", "error": _error(refused)}


class _BlockStream:
    """A message, block by block; text that is there early comes before the reasoning."""

    def __init__(self, call: ModelCall, answer_id: str) -> None:
        self._call = call
        self._message = _message(call.model, answer_id)
        self._sent = ""

    def opening(self) -> Sequence[bytes]:
        usage = {"input_tokens": 0, "output_tokens": 0}  # the end tells them
        return [event("message_start", message={**self._message, "usage": usage})]

    def text(self, added: str) -> Sequence[bytes]:
        opening = [] if self._sent else [_start(0, {"type": "text", "text": ""})]
        self._sent += added
        return [*opening, _delta(0, {"type": "text_delta", "text": added})]

    def rest(self, answer: ModelAnswer) -> Sequence[bytes]:
        events = list[bytes]()
        blocks = _blocks(self._call, answer)
        if self._sent:
            blocks = [it for it in blocks if it["type"] != "text"]
            if rest := answer.turn.content[len(self._sent) :]:
                events += self.text(rest)
            events.append(event("content_block_stop", index=0))
        for index, block in enumerate(blocks, bool(self._sent)):
            events += _block_events(index, block)
        stop = event("message_delta", delta=_stop(answer), usage=_usage(answer))
        return [*events, stop, event("message_stop")]

    def fail(self, refused: CallRefused) -> Sequence[bytes]:
        return [event("error", error=_error(refused))]


class _AnthropicText(Struct, tag="text"):
    text: str


class _Base64Source(Struct, tag="base64"):
    media_type: str
    data: str

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class _UrlSource(Struct, tag="url"):
    url: str


class _ImageBlock(Struct, tag="image"):
    source: _Base64Source | _UrlSource

    @property
    def picture(self) -> str:
        return self.source.url


class _ThinkingBlock(Struct, tag="thinking"):
    thinking: str


class _ToolUseBlock(Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class _ToolResultBlock(Struct, tag="tool_result"):
    tool_use_id: str
    content: str | list[_AnthropicText | _ImageBlock] = ""
    is_error: bool = False


class _UserTurn(Struct, tag_field="role", tag="user"):
    content: str | list[_AnthropicText | _ImageBlock | _ToolResultBlock]

    def as_messages(self) -> Iterator[Message]:
        blocks = [_AnthropicText(self.content)] if isinstance(self.content, str) else self.content
        said = list[_AnthropicText | _ImageBlock]()
        for block in blocks:
            if not isinstance(block, _ToolResultBlock):
                said.append(block)
                continue
            if said:
                yield {"role": "user", "content": content_of(said)}
                said.clear()
            content = content_of(block.content)
            if block.is_error:
                error = "Error: "
                content = (
                    error + content
                    if isinstance(content, str)
                    else [{"type": "text", "text": error}, *content]
                )
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        if said or not blocks:
            yield {"role": "user", "content": content_of(said)}


class _AssistantTurn(Struct, tag_field="role", tag="assistant"):
    content: str | list[_AnthropicText | _ThinkingBlock | _ToolUseBlock]

    def as_messages(self) -> Iterator[Message]:
        blocks = [_AnthropicText(self.content)] if isinstance(self.content, str) else self.content
        message: Message = {
            "role": "assistant",
            "content": joined_text([it for it in blocks if isinstance(it, _AnthropicText)]),
        }
        thoughts = [it.thinking for it in blocks if isinstance(it, _ThinkingBlock)]
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        calls = [it for it in blocks if isinstance(it, _ToolUseBlock)]
        if calls:
            message["tool_calls"] = [call_entry(it.id, it.name, it.input) for it in calls]
        yield message


class _MessagesTool(Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None


class _ToolChoice(Struct):
    type: Literal["auto", "none"] = "auto"
    disable_parallel_tool_use: bool = False


class _ThinkingMode(Struct):
    type: Literal["enabled", "adaptive", "disabled"] = "disabled"


class _OutputConfig(Struct, forbid_unknown_fields=True):
    effort: str | None = None
    format: None = None


class _MessagesBody(Struct, forbid_unknown_fields=True):
    messages: Annotated[list[_UserTurn | _AssistantTurn], Meta(min_length=1)]
    model: str = ""
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    system: str | list[_AnthropicText] = ""
    tools: list[_MessagesTool] = []
    tool_choice: _ToolChoice = msgspec.field(default_factory=_ToolChoice)
    stop_sequences: list[str] = []
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    thinking: _ThinkingMode = msgspec.field(default_factory=_ThinkingMode)
    output_config: _OutputConfig | None = None

    def as_messages(self) -> Iterator[Message]:
        if system := joined_text(self.system):
            yield {"role": "system", "content": system}
        for turn in self.messages:
            yield from turn.as_messages()


def _error(refused: CallRefused) -> dict[str, str]:
    other = "invalid_request_error" if refused.status < 500 else "api_error"
    return {"type": _ERRORS.get(refused.status, other), "message": refused.told(_OF_OVERFLOW)}


def _message(model: str, answer_id: str) -> dict[str, Any]:
    return {
        "id": f"msg_{answer_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _blocks(call: ModelCall, answer: ModelAnswer) -> list[dict[str, Any]]:
    turn = answer.turn
    blocks = list[dict[str, Any]]()
    if call.wants_reasoning and (thinking := turn.message.get("reasoning_content")):
        blocks.append({"type": "thinking", "thinking": thinking, "signature": ""})
    if turn.content:
        blocks.append({"type": "text", "text": turn.content})
    blocks += [
        {"type": "tool_use", "id": it.id, "name": it.name, "input": it.arguments}
        for it in turn.tool_calls
    ]
    return blocks


def _stop(answer: ModelAnswer) -> dict[str, Any]:
    turn = answer.turn
    reason = _STOP_REASONS.get(turn.finish_reason)
    if reason is None:
        reason = "tool_use" if turn.tool_calls else "stop_sequence" if answer.stop else "end_turn"
    matched = answer.stop if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": matched}


def _usage(answer: ModelAnswer) -> dict[str, Any]:
    return {"input_tokens": answer.num_prompt_tokens, "output_tokens": answer.turn.num_tokens}


def _block_events(index: int, block: Mapping[str, Any]) -> Iterator[bytes]:
    """A whole block at once."""
    if block["type"] == "thinking":
        empty: dict[str, Any] = {"thinking": ""}
        delta = {"type": "thinking_delta", "thinking": block["thinking"]}
    elif block["type"] == "text":
        empty = {"text": ""}
        delta = {"type": "text_delta", "text": block["text"]}
    else:
        empty = {"input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    yield _start(index, {**block, **empty})
    yield _delta(index, delta)
    yield event("content_block_stop", index=index)


def _start(index: int, block: Mapping[str, Any]) -> bytes:
    return event("content_block_start", index=index, content_block=block)


def _delta(index: int, delta: Mapping[str, Any]) -> bytes:
    return event("content_block_delta", index=index, delta=delta)
