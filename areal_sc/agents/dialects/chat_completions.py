"""OpenAI's `/v1/chat/completions`. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from areal_sc.agents.calls import AnswerStream, CallRefused, ModelAnswer, ModelCall
from areal_sc.agents.dialects.bodies import (
    content_of,
    joined_text,
    one_call_only,
    openai_error,
    openai_tokens,
    read_body,
)
from areal_sc.workflows.chat_format import Message
from areal_sc.workflows.tool_calls import call_entry

_WITHOUT: Final = frozenset(
    [
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "seed",
        "service_tier",
        "store",
        "user",
        "verbosity",
    ]
)
_OF_OVERFLOW: Final = (
    "This model's maximum context length is {max_tokens} tokens. However, your messages resulted "
    "in {num_tokens} tokens. Please reduce the length of the messages, or raise "
    "rollout.max_context_tokens. (context_length_exceeded)"
)
"""The last word is the error's code: some clients read the message alone, and look for it there."""
_SAMPLING: Final = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty")


class ChatCompletions:
    """The dialect that most clients speak."""

    path = "/v1/chat/completions"

    def read(self, body: Mapping[str, Any]) -> ModelCall:
        asked = read_body(body, _ChatBody, without=_WITHOUT)
        if asked.tools and not asked.parallel_tool_calls:
            raise one_call_only()
        sampling = {name: getattr(asked, name) for name in _SAMPLING}
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop
        limits = (asked.max_tokens, asked.max_completion_tokens)
        return ModelCall(
            messages=tuple(it.as_message() for it in asked.messages),
            tools=tuple(
                map(msgspec.to_builtins, asked.tools if asked.tool_choice == "auto" else ())
            ),
            stop=tuple(stop),
            max_tokens=min((it for it in limits if it is not None), default=None),
            sampling={name: it for name, it in sampling.items() if it is not None},
            model=asked.model,
            wants_logprobs=asked.logprobs,
            wants_usage=asked.stream_options.include_usage,
            is_streamed=asked.stream,
        )

    def write(self, call: ModelCall, answer: ModelAnswer) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "refusal": None, **_message(answer)},
            "logprobs": _logprobs(call, answer),
            "finish_reason": _finish_reason(answer),
        }
        head = _head(call, answer.answer_id, answer.created_s, "chat.completion")
        return {**head, "choices": [choice], "usage": _usage(answer)}

    def stream(self, call: ModelCall, answer_id: str, created_s: int) -> AnswerStream:
        return _Chunks(call, answer_id, created_s)

    def refuse(self, refused: CallRefused) -> dict[str, Any]:
        return {"error": openai_error(refused, _OF_OVERFLOW, "messages")}


class _Chunks:
    """An answer in chunks; text that is there early comes before the reasoning."""

    def __init__(self, call: ModelCall, answer_id: str, created_s: int) -> None:
        self._call = call
        self._head = _head(call, answer_id, created_s, "chat.completion.chunk")
        self._sent = ""

    def opening(self) -> Sequence[bytes]:
        return [self._chunk({"role": "assistant", "content": ""})]

    def text(self, added: str) -> Sequence[bytes]:
        self._sent += added
        return [self._chunk({"content": added})]

    def rest(self, answer: ModelAnswer) -> Iterator[bytes]:
        message = _message(answer)
        if reasoning := message.get("reasoning_content"):
            yield self._chunk({"reasoning_content": reasoning})
        if rest := (message["content"] or "")[len(self._sent) :]:
            yield self._chunk({"content": rest})
        for number, it in enumerate(message.get("tool_calls", ())):
            yield self._chunk({"tool_calls": [{"index": number, **it}]})
        yield self._chunk({}, _finish_reason(answer), _logprobs(self._call, answer))
        if self._call.wants_usage:
            yield _event({**self._head, "choices": [], "usage": _usage(answer)})
        yield b"data: [DONE]\n\n"

    def fail(self, refused: CallRefused) -> Sequence[bytes]:
        return [_event(ChatCompletions().refuse(refused))]

    def _chunk(
        self,
        delta: Mapping[str, Any],
        finish_reason: str | None = None,
        logprobs: Mapping[str, Any] | None = None,
    ) -> bytes:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return _event({**self._head, "choices": [choice]})


class _TextPart(Struct, tag="text"):
    text: str


_Content = str | list[_TextPart]


class _Said(Struct, tag_field="role"):
    """A message; what else clients put there means nothing to a model."""

    content: _Content

    def as_message(self) -> Message:
        return {"role": type(self).__struct_config__.tag, "content": joined_text(self.content)}


class _System(_Said, tag="system"):
    pass


class _Developer(_Said, tag="developer"):
    """A newer name of `system`, which most templates do not know, and leave out."""

    def as_message(self) -> Message:
        return {**super().as_message(), "role": "system"}


class _ImageUrl(Struct):
    url: str


class _ImagePart(Struct, tag="image_url"):
    image_url: _ImageUrl

    @property
    def picture(self) -> str:
        return self.image_url.url


class _User(Struct, tag_field="role", tag="user"):
    content: str | list[_TextPart | _ImagePart]

    def as_message(self) -> Message:
        return {"role": "user", "content": content_of(self.content)}


class _ToolSaid(_Said, tag="tool"):
    tool_call_id: str

    def as_message(self) -> Message:
        return {**super().as_message(), "tool_call_id": self.tool_call_id}


class _Function(Struct):
    name: str
    arguments: str


class _CallSaid(Struct):
    id: str
    function: _Function
    type: Literal["function"] = "function"

    def as_message(self) -> dict[str, Any]:
        return call_entry(self.id, self.function.name, self.function.arguments)


class _Assistant(Struct, tag_field="role", tag="assistant"):
    content: _Content | None = None
    tool_calls: list[_CallSaid] | None = None
    reasoning_content: str | None = None
    function_call: None = None
    audio: None = None

    def as_message(self) -> Message:
        message: Message = {"role": "assistant", "content": joined_text(self.content or "")}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [it.as_message() for it in self.tool_calls]
        return message


class _ToolFunction(Struct, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _FunctionTool(Struct):
    type: Literal["function"]
    function: _ToolFunction


class _StreamOptions(Struct, frozen=True):
    include_usage: bool = False


class _AnswerFormat(Struct):
    type: Literal["text"]


class _ChatBody(Struct, forbid_unknown_fields=True):
    messages: list[_System | _Developer | _User | _Assistant | _ToolSaid]
    model: str = ""
    tools: list[_FunctionTool] = []
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: bool = True
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=0)] = {}
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: str | list[str] = []
    n: Literal[1] = 1
    logprobs: bool = False
    top_logprobs: Literal[0] = 0
    response_format: _AnswerFormat | None = None
    modalities: list[Literal["text"]] = []
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()


def _head(call: ModelCall, answer_id: str, created_s: int, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answer_id}",
        "object": kind,
        "created": created_s,
        "model": call.model,
        "system_fingerprint": None,
    }


def _message(answer: ModelAnswer) -> dict[str, Any]:
    """What the model said, without its role."""
    turn = answer.turn
    message: dict[str, Any] = {"content": turn.content or (None if turn.tool_calls else "")}
    if reasoning := turn.message.get("reasoning_content"):
        message["reasoning_content"] = reasoning
    if turn.tool_calls:
        message["tool_calls"] = [
            call_entry(it.id, it.name, json.dumps(it.arguments)) for it in turn.tool_calls
        ]
    return message


def _finish_reason(answer: ModelAnswer) -> str:
    if answer.turn.finish_reason != "stop":
        return "length"
    return "tool_calls" if answer.turn.tool_calls else "stop"


def _logprobs(call: ModelCall, answer: ModelAnswer) -> dict[str, Any] | None:
    if not call.wants_logprobs:
        return None
    return {"content": openai_tokens(answer), "refusal": None}


def _usage(answer: ModelAnswer) -> dict[str, Any]:
    num_prompt, num_sampled = answer.num_prompt_tokens, answer.turn.num_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
