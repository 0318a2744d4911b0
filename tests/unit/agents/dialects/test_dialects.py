"""What all dialects promise: a history that comes back is the one that was sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.agents.dialects.answers import QUESTION, an_answer, streamed

from areal_sc.agents.calls import CallRefused, ContextOverflow, Dialect, ModelAnswer, ModelCall
from areal_sc.agents.dialects.chat_completions import ChatCompletions
from areal_sc.agents.dialects.messages import AnthropicMessages
from areal_sc.agents.dialects.responses import Responses
from areal_sc.workflows.chat_format import Message
from areal_sc.workflows.tool_calls import ToolCall

CHAT, RESPONSES, MESSAGES = ChatCompletions(), Responses(), AnthropicMessages()


def with_message(body: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [QUESTION, body["choices"][0]["message"]]}


def with_output(body: dict[str, Any]) -> dict[str, Any]:
    return {"input": [QUESTION, *body["output"]]}


def with_content(body: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [QUESTION, {"role": "assistant", "content": body["content"]}]}


HANDS_BACK = [
    pytest.param(CHAT, with_message, id="chat completions"),
    pytest.param(RESPONSES, with_output, id="responses"),
    pytest.param(MESSAGES, with_content, id="messages"),
]

TEXTS = st.text(min_size=1).filter(lambda text: text.strip())
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
    max_leaves=5,
)
CALLS = st.builds(
    ToolCall,
    id=st.from_regex("[A-Za-z0-9]{9}", fullmatch=True),
    name=st.from_regex("[a-z_]{1,12}", fullmatch=True),
    arguments=st.dictionaries(st.text(), VALUES, max_size=3),
)


ANSWERS = st.builds(
    lambda text, reasoning, calls: an_answer(text, reasoning, *calls),
    st.just("") | TEXTS,
    st.just("") | TEXTS,
    st.lists(CALLS, max_size=3),
)


def as_values(message: Message) -> Message:
    """A message with the arguments of its calls as values."""
    calls = message.get("tool_calls", ())
    read = []
    for call in calls:
        function = dict(call["function"])
        if isinstance(function["arguments"], str):
            function["arguments"] = json.loads(function["arguments"])
        read.append({**call, "function": function})
    return {**message, "tool_calls": read} if read else message


@pytest.mark.parametrize(("dialect", "hand_back"), HANDS_BACK)
@settings(max_examples=50)
@given(answer=ANSWERS)
def test_an_answer_comes_back_as_it_was(
    dialect: Dialect, hand_back: Callable[[dict[str, Any]], dict[str, Any]], answer: ModelAnswer
) -> None:
    body = json.loads(json.dumps(dialect.write(ModelCall(messages=(QUESTION,)), answer)))
    question, *rest = dialect.read(hand_back(body)).messages
    assert question == QUESTION
    assert [as_values(it) for it in rest] == [answer.turn.message]


@settings(max_examples=50)
@given(answer=ANSWERS, cuts=st.lists(st.integers(1, 20), max_size=4))
def test_a_streamed_response_is_the_whole_one(answer: ModelAnswer, cuts: list[int]) -> None:
    events = streamed(RESPONSES, answer, tuple(sorted(cuts)))
    assert [it["sequence_number"] for it in events] == list(range(len(events)))
    whole = RESPONSES.write(ModelCall(messages=(QUESTION,)), answer)
    last = events[-1]["response"]
    order = [it["item"] for it in events if it["type"] == "response.output_item.done"]
    assert last["output"] == order
    is_earlier = sorted(whole["output"], key=lambda it: it["type"])
    assert sorted(last.pop("output"), key=lambda it: it["type"]) == is_earlier
    assert last == {name: it for name, it in whole.items() if name != "output"}
    deltas = [it["delta"] for it in events if it["type"] == "response.output_text.delta"]
    assert "".join(deltas) == answer.turn.content
    _, *rest = RESPONSES.read({"input": [QUESTION, *order]}).messages
    assert [as_values(it) for it in rest] == [answer.turn.message]


@settings(max_examples=50)
@given(answer=ANSWERS, cuts=st.lists(st.integers(1, 20), max_size=4))
def test_a_streamed_message_is_the_whole_one(answer: ModelAnswer, cuts: list[int]) -> None:
    events = streamed(MESSAGES, answer, tuple(sorted(cuts)))
    blocks = list[dict[str, Any]]()
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                block["input"] = json.loads(delta["partial_json"])
            else:
                (name,) = set(delta) - {"type"}
                block[name] += delta[name]
    whole = MESSAGES.write(ModelCall(messages=(QUESTION,)), answer)
    by_kind = [sorted(it, key=lambda block: block["type"]) for it in (blocks, whole["content"])]
    assert by_kind[0] == by_kind[1]
    assert events[-2]["usage"] == whole["usage"]
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    assert events[-1]["type"] == "message_stop"


@pytest.mark.parametrize("dialect", [CHAT, RESPONSES, MESSAGES])
@given(body=st.dictionaries(st.sampled_from(["input", "messages", "tools", "model"]), VALUES))
def test_any_other_body_is_refused(dialect: Dialect, body: dict[str, Any]) -> None:
    with suppress(CallRefused):  # and nothing else is raised
        dialect.read(body)


@pytest.mark.parametrize(
    ("dialect", "words"),
    [
        # litellm; vLLM's and OpenAI's callers; LangChain
        (CHAT, "this model's maximum context length is 50 tokens"),
        (CHAT, "however, your messages resulted in 99 tokens"),
        (CHAT, "please reduce the length of the messages"),
        (CHAT, "context_length_exceeded"),
        (RESPONSES, "your input exceeds the context window of this model"),
        (RESPONSES, "this model's maximum context length is"),
        (RESPONSES, "context_length_exceeded"),
        (MESSAGES, "prompt is too long: 99 tokens > 50 maximum"),
        (MESSAGES, "invalid_request_error"),
    ],
)
def test_a_conversation_that_is_too_long_is_told_in_words_that_clients_look_for(
    dialect: Dialect, words: str
) -> None:
    refused = ContextOverflow(99, 50)
    assert refused.status == 400
    error = dialect.refuse(refused)["error"]
    assert words in error["message"].lower() or words == error["type"]


def test_developer_is_another_name_of_system() -> None:
    said = {"role": "developer", "content": "Be sure."}
    (message,) = CHAT.read({"messages": [said]}).messages
    assert message == RESPONSES.read({"input": [said]}).messages[0]
    assert message["role"] == "system"


@pytest.mark.parametrize("field", ["function_call", "audio"])
def test_what_an_assistant_cannot_have_said_is_refused(field: str) -> None:
    said = {"role": "assistant", "content": "so", field: {"id": "x", "name": "f"}}
    with pytest.raises(CallRefused, match=field):
        ChatCompletions().read({"messages": [said, {"role": "user", "content": "hi"}]})
