"""OpenAI's `/v1/responses`. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from areal_sc.agents.calls import AnswerStream, CallRefused, ModelAnswer, ModelCall
from areal_sc.agents.dialects.bodies import (
    content_of,
    event,
    function_tool,
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
        "max_tool_calls",  # of tools that OpenAI runs itself
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning",
        "safety_identifier",
        "service_tier",
        "stream_options",
        "user",
    ]
)
_OF_OVERFLOW: Final = (
    "Your input exceeds the context window of this model. Please adjust your input and try again. "
    "This model's maximum context length is {max_tokens} tokens (rollout.max_context_tokens), and "
    "your input has {num_tokens}. (context_length_exceeded)"
)
"""The last word as with chat completions."""
_ID: Final = "resp_"
_LOGPROBS: Final = "message.output_text.logprobs"


class Responses:
    """The dialect of OpenAI's newer clients, and the default of its Agents SDK."""

    path = "/v1/responses"

    def read(self, body: Mapping[str, Any]) -> ModelCall:
        asked = read_body(_with_types(body), _ResponsesBody, without=_WITHOUT)
        if asked.tools and not asked.parallel_tool_calls:
            raise one_call_only()
        sampling = {"temperature": asked.temperature, "top_p": asked.top_p}
        return ModelCall(
            messages=tuple(asked.as_messages()),
            tools=tuple(
                function_tool(it.name, it.description, it.parameters or _NO_PARAMETERS)
                for it in (asked.tools if asked.tool_choice == "auto" else ())
            ),
            max_tokens=asked.max_output_tokens,
            sampling={name: it for name, it in sampling.items() if it is not None},
            model=asked.model,
            wants_logprobs=_LOGPROBS in asked.include,
            is_streamed=asked.stream,
            after=(asked.previous_response_id or "").removeprefix(_ID),
            num_instructions=1 if asked.instructions else 0,
            is_kept=asked.store is not False,
            metadata=asked.metadata,
        )

    def write(self, call: ModelCall, answer: ModelAnswer) -> dict[str, Any]:
        return _ended(_response(call, answer.answer_id, answer.created_s), answer, _output(answer))

    def stream(self, call: ModelCall, answer_id: str, created_s: int) -> AnswerStream:
        return _ResponseStream(call, answer_id, created_s)

    def refuse(self, refused: CallRefused) -> dict[str, Any]:
        return {"error": _error(refused)}


class _ResponseStream:
    """A response, item by item; text that is there early comes before the reasoning."""

    def __init__(self, call: ModelCall, answer_id: str, created_s: int) -> None:
        self._answer_id = answer_id
        self._response = _response(call, answer_id, created_s)
        self._sent = ""
        self._num_events = 0

    def opening(self) -> Sequence[bytes]:
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._response) for kind in kinds]

    def text(self, added: str) -> Sequence[bytes]:
        item = _message(self._answer_id, "", ())
        opening = [] if self._sent else list(self._begin_item(0, item))
        self._sent += added
        return [*opening, self._text_delta(0, item, added)]

    def rest(self, answer: ModelAnswer) -> Sequence[bytes]:
        output = _output(answer)
        if self._sent:
            output.sort(key=lambda item: item["type"] != "message")  # it has begun
        events = [it for number, item in enumerate(output) for it in self._item(number, item)]
        response = _ended(self._response, answer, output)
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def fail(self, refused: CallRefused) -> Sequence[bytes]:
        error = _error(refused)
        outer = {name: error[name] for name in ("code", "message", "param")}
        return [self._event("error", **outer, error=error)]  # some clients look for the inner one

    def _item(self, number: int, item: Mapping[str, Any]) -> Iterator[bytes]:
        """A whole item, or the rest of the message."""
        if not (self._sent and item["type"] == "message"):
            yield from self._begin_item(number, item)
        at = {"item_id": item["id"], "output_index": number}
        if item["type"] == "function_call":
            arguments = item["arguments"]
            yield self._event("response.function_call_arguments.delta", **at, delta=arguments)
            yield self._event(
                "response.function_call_arguments.done",
                **at,
                name=item["name"],
                arguments=arguments,
            )
        else:
            (part,) = item["content"]
            at["content_index"] = 0
            if part["type"] == "reasoning_text":
                yield self._event("response.reasoning_text.delta", **at, delta=part["text"])
                yield self._event("response.reasoning_text.done", **at, text=part["text"])
            else:
                if rest := part["text"][len(self._sent) :]:
                    yield self._text_delta(number, item, rest)
                told = {"text": part["text"], "logprobs": part["logprobs"]}
                yield self._event("response.output_text.done", **at, **told)
            yield self._event("response.content_part.done", **at, part=part)
        yield self._event("response.output_item.done", output_index=number, item=item)

    def _begin_item(self, number: int, item: Mapping[str, Any]) -> Iterator[bytes]:
        nothing: dict[str, Any] = {"content": []} if "content" in item else {"arguments": ""}
        begun = {**item, **nothing, "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=number, item=begun)
        for part in item.get("content", ()):
            at = {"item_id": item["id"], "output_index": number, "content_index": 0}
            yield self._event("response.content_part.added", **at, part={**part, "text": ""})

    def _text_delta(self, number: int, item: Mapping[str, Any], added: str) -> bytes:
        at = {"item_id": item["id"], "output_index": number, "content_index": 0}
        return self._event("response.output_text.delta", **at, delta=added, logprobs=[])

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._num_events += 1
        return event(kind, sequence_number=self._num_events - 1, **fields)


class _InputText(Struct, tag="input_text"):
    text: str


class _OutputText(Struct, tag="output_text"):
    text: str


class _InputImage(Struct, tag="input_image"):
    image_url: str

    @property
    def picture(self) -> str:
        return self.image_url


_Parts = list[_InputText | _OutputText | _InputImage]


class _MessageItem(Struct, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | _Parts


class _CallItem(Struct, tag="function_call"):
    call_id: str
    name: str
    arguments: str


class _CallOutputItem(Struct, tag="function_call_output"):
    call_id: str
    output: str | _Parts


class _ReasoningText(Struct):
    text: str


class _ReasoningItem(Struct, tag="reasoning"):
    content: list[_ReasoningText] | None = None


class _ResponsesTool(Struct, tag="function"):
    name: str
    parameters: dict[str, Any] | None = None
    description: str | None = None


class _PlainText(Struct):
    type: Literal["text"] = "text"


class _TextOptions(Struct, forbid_unknown_fields=True):
    format: _PlainText | None = None
    verbosity: str | None = None


class _ResponsesBody(Struct, forbid_unknown_fields=True):
    input: str | list[_MessageItem | _CallItem | _CallOutputItem | _ReasoningItem]
    previous_response_id: str | None = None
    store: bool | None = None
    model: str = ""
    instructions: str = ""
    tools: list[_ResponsesTool] = []
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: bool = True
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Literal[0] = 0
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    text: _TextOptions | None = None
    truncation: Literal["disabled"] = "disabled"
    include: list[str] = []
    metadata: dict[str, Any] = {}
    stream: bool = False

    def as_messages(self) -> list[Message]:
        """The items as messages: reasoning, text and calls of one answer are one message."""
        messages = list[Message]()
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            match item:
                case _MessageItem(role="assistant"):
                    _answer(messages, without="content")["content"] = joined_text(item.content)
                case _MessageItem(role="user"):
                    messages.append({"role": "user", "content": content_of(item.content)})
                case _MessageItem():
                    messages.append({"role": "system", "content": joined_text(item.content)})
                case _ReasoningItem(content=None | []):
                    pass
                case _ReasoningItem():
                    answer = _answer(messages, without="reasoning_content")
                    answer["reasoning_content"] = "\n".join(it.text for it in item.content or ())
                case _CallItem():
                    call = call_entry(item.call_id, item.name, item.arguments)
                    _answer(messages).setdefault("tool_calls", []).append(call)
                case _CallOutputItem():
                    content = content_of(item.output)
                    messages.append(
                        {"role": "tool", "tool_call_id": item.call_id, "content": content}
                    )
        return messages


def _with_types(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body with a type for each item: clients leave out that of messages."""
    items = body.get("input")
    if isinstance(items, list):
        items = [{"type": "message", **it} if isinstance(it, dict) else it for it in items]
    return {**body, "input": items}


def _answer(messages: list[Message], without: str | None = None) -> Message:
    """The model's message that an item belongs to: the last one, or the next.

    Args:
        without: what the message must not have yet.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or (without is not None and last.get(without)):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


_NO_PARAMETERS: Final = {"type": "object", "properties": {}}


def _response(call: ModelCall, answer_id: str, created_s: int) -> dict[str, Any]:
    """A response that has nothing yet."""
    return {
        "id": f"{_ID}{answer_id}",
        "object": "response",
        "created_at": created_s,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": call.messages[0]["content"] if call.num_instructions else None,
        "max_output_tokens": call.max_tokens,
        "metadata": dict(call.metadata),
        "model": call.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": f"{_ID}{call.after}" if call.after else None,
        "temperature": call.sampling.get("temperature"),
        "tool_choice": "auto",
        "tools": [{"type": "function", "strict": False, **it["function"]} for it in call.tools],
        "top_p": call.sampling.get("top_p"),
        "truncation": "disabled",
        "usage": None,
    }


def _ended(
    response: Mapping[str, Any], answer: ModelAnswer, output: list[dict[str, Any]]
) -> dict[str, Any]:
    is_whole = answer.turn.finish_reason == "stop"
    num_prompt, num_sampled = answer.num_prompt_tokens, answer.turn.num_tokens
    return {
        **response,
        "status": "completed" if is_whole else "incomplete",
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
        "output": output,
        "usage": {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_sampled,
        },
    }


def _output(answer: ModelAnswer) -> list[dict[str, Any]]:
    turn, answer_id = answer.turn, answer.answer_id
    output = list[dict[str, Any]]()
    if reasoning := turn.message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": reasoning}]
        output.append(
            {"type": "reasoning", "id": f"rs_{answer_id}", "summary": [], "content": content}
        )
    if turn.content or not turn.tool_calls:
        output.append(_message(answer_id, turn.content, openai_tokens(answer)))
    output += [
        {
            "type": "function_call",
            "id": f"fc_{answer_id}_{number}",
            "call_id": it.id,
            "name": it.name,
            "arguments": json.dumps(it.arguments),
            "status": "completed",
        }
        for number, it in enumerate(turn.tool_calls)
    ]
    return output


def _message(answer_id: str, text: str, tokens: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(tokens)}
    return {
        "type": "message",
        "id": f"msg_{answer_id}",
        "status": "completed",
        "role": "assistant",
        "content": [part],
    }


def _error(refused: CallRefused) -> dict[str, Any]:
    return openai_error(refused, _OF_OVERFLOW, "input")
