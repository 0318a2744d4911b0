"""OpenAI's `/v1/responses`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from unit.agents.dialects.answers import an_answer, streamed

from areal_sc.agents.calls import CallRefused, ModelCall, SampledToken
from areal_sc.agents.dialects.responses import Responses
from areal_sc.workflows.tool_calls import ToolCall

DIALECT = Responses()


def test_a_whole_history_is_read() -> None:
    call = DIALECT.read(
        {
            "model": "policy",
            "instructions": "Be brief.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "key c"}]},
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "I look."}],
                },
                {
                    "type": "message",
                    "id": "msg_1",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "Wait.", "annotations": []}],
                },
                {"type": "function_call", "call_id": "x", "name": "f", "arguments": '{"key":"c"}'},
                {"type": "function_call", "call_id": "y", "name": "g", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "x", "output": "7"},
                {
                    "type": "function_call_output",
                    "call_id": "y",
                    "output": [{"type": "input_text", "text": "8"}],
                },
                {"role": "assistant", "content": "It is 7."},
                {"role": "assistant", "content": "Or 8."},
                {"role": "developer", "content": "Be sure."},
            ],
            "tools": [
                {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
            ],
            "max_output_tokens": 9,
            "temperature": 0,
            "top_p": 0.5,
            "stream": True,
            "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "store": False,
            "previous_response_id": "resp_a1-7",
            "user": None,
        }
    )
    assert call == ModelCall(
        messages=(
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "key c"},
            {
                "role": "assistant",
                "content": "Wait.",
                "reasoning_content": "I look.",
                "tool_calls": [
                    {
                        "id": "x",
                        "type": "function",
                        "function": {"name": "f", "arguments": '{"key":"c"}'},
                    },
                    {"id": "y", "type": "function", "function": {"name": "g", "arguments": "{}"}},
                ],
            },
            {"role": "tool", "tool_call_id": "x", "content": "7"},
            {"role": "tool", "tool_call_id": "y", "content": "8"},
            {"role": "assistant", "content": "It is 7."},
            {"role": "assistant", "content": "Or 8."},
            {"role": "system", "content": "Be sure."},
        ),
        tools=({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},),
        max_tokens=9,
        sampling={"temperature": 0, "top_p": 0.5},
        model="policy",
        wants_logprobs=True,
        is_streamed=True,
        after="a1-7",
        num_instructions=1,
    )


def test_without_a_choice_of_tools_there_are_none() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    call = DIALECT.read({"input": "key c", "tools": [tool], "tool_choice": "none"})
    assert call == ModelCall(messages=({"role": "user", "content": "key c"},), is_kept=True)


IMAGE = {"type": "input_image", "image_url": "data:,", "detail": "auto"}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"input": [{"role": "system", "content": [IMAGE]}]}, "messages of the user"),
        ({"input": [{"role": "assistant", "content": [IMAGE]}]}, "messages of the user"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "image_url",
        ),
        ({"input": [{"role": "tool", "content": "7"}]}, "tool"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "call_id"),
        ({"input": [7]}, "int"),
        ({"input": None}, "input"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tool_choice": "required"}, "required"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"parallel_tool_calls": False, "tools": [{"type": "function", "name": "f"}]}, "parallel"),
        ({"text": {"format": {"type": "json_object"}}}, "json_object"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}}, "json_schema"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": 3}, "top_k"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(asked: dict[str, Any], named: str) -> None:
    with pytest.raises(CallRefused, match=named) as caught:
        DIALECT.read({"input": "key c", **asked})
    assert (caught.value.status, caught.value.code) == (400, "invalid_body")


def test_what_is_told_back_is_what_was_done() -> None:
    call = DIALECT.read(
        {"input": "key c", "instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.3}
    )
    sampled = replace(call, sampling={"temperature": 1.0, "top_p": 0.9}, max_tokens=64)
    body = DIALECT.write(sampled, an_answer("7"))
    assert (body["instructions"], body["metadata"]) == ("Be brief.", {"a": "b"})
    assert (body["temperature"], body["top_p"], body["max_output_tokens"]) == (1.0, 0.9, 64)


@pytest.mark.parametrize("finish", ["length", "context"])
def test_an_answer_that_was_cut_is_incomplete(finish: str) -> None:
    answer = an_answer("It i", finish=finish)
    body = DIALECT.write(ModelCall(messages=()), answer)
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert streamed(DIALECT, answer)[-1]["type"] == "response.incomplete"


def test_tokens_stand_at_their_text() -> None:
    tokens = (SampledToken("7", -0.25), SampledToken("é", -1.5))
    body = DIALECT.write(
        ModelCall(messages=(), wants_logprobs=True), an_answer("7é", tokens=tokens)
    )
    assert body["output"][0]["content"][0]["logprobs"] == [
        {"token": "7", "bytes": [55], "logprob": -0.25, "top_logprobs": []},
        {"token": "é", "bytes": [195, 169], "logprob": -1.5, "top_logprobs": []},
    ]


def test_the_order_of_events() -> None:
    answer = an_answer("It is", "I look.", ToolCall("x", "f", {"key": "c"}))
    text, thought, called = [
        ["response.output_item.added", *inner, "response.output_item.done"]
        for inner in (
            [
                "response.content_part.added",
                "response.output_text.delta",
                "response.output_text.delta",
                "response.output_text.done",
                "response.content_part.done",
            ],
            [
                "response.content_part.added",
                "response.reasoning_text.delta",
                "response.reasoning_text.done",
                "response.content_part.done",
            ],
            ["response.function_call_arguments.delta", "response.function_call_arguments.done"],
        )
    ]
    begin, end = ["response.created", "response.in_progress"], ["response.completed"]
    kinds = [it["type"] for it in streamed(DIALECT, answer, (3,))]
    assert kinds == [*begin, *text, *thought, *called, *end]
    text.remove("response.output_text.delta")
    kinds = [it["type"] for it in streamed(DIALECT, answer)]
    assert kinds == [*begin, *thought, *text, *called, *end]


def test_errors_have_openais_form() -> None:
    refused = CallRefused(401, "unknown_key", "no session has this key")
    error = {
        "message": "no session has this key",
        "type": "invalid_request_error",
        "param": None,
        "code": "unknown_key",
    }
    assert DIALECT.refuse(refused) == {"error": error}
