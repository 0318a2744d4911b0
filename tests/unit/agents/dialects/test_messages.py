"""Anthropic's `/v1/messages`."""

from __future__ import annotations

from typing import Any

import pytest
from unit.agents.dialects.answers import an_answer, events_of, streamed

from areal_sc.agents.calls import CallRefused, ModelCall
from areal_sc.agents.dialects.messages import AnthropicMessages
from areal_sc.workflows.tool_calls import ToolCall

DIALECT = AnthropicMessages()
TOOL = {"name": "f", "description": "Looks.", "input_schema": {"type": "object"}}


def test_a_whole_history_is_read() -> None:
    call = DIALECT.read(
        {
            "model": "policy",
            "max_tokens": 9,
            "system": [
                {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "Be sure."},
            ],
            "messages": [
                {"role": "user", "content": "key c"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "I look.", "signature": ""},
                        {"type": "text", "text": "Wait."},
                        {"type": "tool_use", "id": "x", "name": "f", "input": {"key": "c"}},
                        {"type": "tool_use", "id": "y", "name": "g", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "x", "content": "7"},
                        {
                            "type": "tool_result",
                            "tool_use_id": "y",
                            "content": [{"type": "text", "text": "8"}],
                            "is_error": True,
                        },
                        {"type": "tool_result", "tool_use_id": "z"},
                        {"type": "text", "text": "So?"},
                    ],
                },
                {"role": "assistant", "content": "It is 7."},
                {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
            ],
            "tools": [TOOL],
            "tool_choice": {"type": "auto"},
            "stop_sequences": ["END"],
            "temperature": 1,
            "top_k": 5,
            "metadata": {"user_id": "u"},
            "stream": True,
        }
    )
    assert call == ModelCall(
        messages=(
            {"role": "system", "content": "Be brief.\nBe sure."},
            {"role": "user", "content": "key c"},
            {
                "role": "assistant",
                "content": "Wait.",
                "reasoning_content": "I look.",
                "tool_calls": [
                    {
                        "id": "x",
                        "type": "function",
                        "function": {"name": "f", "arguments": {"key": "c"}},
                    },
                    {"id": "y", "type": "function", "function": {"name": "g", "arguments": {}}},
                ],
            },
            {"role": "tool", "tool_call_id": "x", "content": "7"},
            {"role": "tool", "tool_call_id": "y", "content": "Error: 8"},
            {"role": "tool", "tool_call_id": "z", "content": ""},
            {"role": "user", "content": "So?"},
            {"role": "assistant", "content": "It is 7."},
            {"role": "user", "content": "Sure?"},
        ),
        tools=(
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "description": "Looks.",
                    "parameters": {"type": "object"},
                },
            },
        ),
        stop=("END",),
        max_tokens=9,
        sampling={"temperature": 1, "top_k": 5},
        model="policy",
        wants_reasoning=False,
        is_streamed=True,
    )


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "source"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]}, "red"),
        ({"messages": [{"role": "tool", "content": "7"}]}, "tool"),
        ({"messages": []}, "messages"),
        ({"messages": "key c"}, "messages"),
        ({"system": [{"type": "image"}]}, "image"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tools": [{"name": "f"}]}, "input_schema"),
        ({"tool_choice": {"type": "any"}}, "any"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "tools": [TOOL]},
            "parallel",
        ),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "format"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"mcp_servers": [{"url": "u"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(asked: dict[str, Any], named: str) -> None:
    messages = [{"role": "user", "content": "key c"}]
    with pytest.raises(CallRefused, match=named) as caught:
        DIALECT.read({"messages": messages, "max_tokens": 9, **asked})
    assert (caught.value.status, caught.value.code) == (400, "invalid_body")


def test_thoughts_are_for_who_asks_for_them() -> None:
    body = {"messages": [{"role": "user", "content": "key c"}], "max_tokens": 9}
    answer = an_answer("It is 7.", "I look.")
    for asked, kinds in [
        ({}, ["text"]),
        ({"thinking": {"type": "disabled"}}, ["text"]),
        ({"thinking": {"type": "adaptive"}}, ["thinking", "text"]),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, ["thinking", "text"]),
    ]:
        written = DIALECT.write(DIALECT.read({**body, **asked}), answer)
        assert [it["type"] for it in written["content"]] == kinds


@pytest.mark.parametrize(
    ("given", "reason", "sequence"),
    [
        ({"text": "7"}, "end_turn", None),
        ({"text": "7", "stop": "END"}, "stop_sequence", "END"),
        ({"text": "7", "finish": "length"}, "max_tokens", None),
        ({"finish": "context"}, "model_context_window_exceeded", None),
    ],
)
def test_why_an_answer_ends(given: dict[str, Any], reason: str, sequence: str | None) -> None:
    body = DIALECT.write(ModelCall(messages=()), an_answer(**given))
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)


def test_an_answer_with_calls_ends_for_them() -> None:
    body = DIALECT.write(ModelCall(messages=()), an_answer("", "", ToolCall("x", "f", {})))
    assert (body["stop_reason"], body["stop_sequence"]) == ("tool_use", None)


def test_the_order_of_events() -> None:
    answer = an_answer("It is", "I look.", ToolCall("x", "f", {"key": "c"}))
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    kinds = [it["type"] for it in streamed(DIALECT, answer)]
    assert kinds == ["message_start", *block, *block, *block, "message_delta", "message_stop"]
    early = ["content_block_start", "content_block_delta", *block[1:]]
    kinds = [it["type"] for it in streamed(DIALECT, answer, (3,))]
    assert kinds == ["message_start", *early, *block, *block, "message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (409, "invalid_request_error"),
        (429, "rate_limit_error"),
        (502, "api_error"),
    ],
)
def test_errors_have_anthropics_form(status: int, kind: str) -> None:
    refused = CallRefused(status, "a_code", "why")
    body = {"type": "error", "error": {"type": kind, "message": "why"}}
    assert DIALECT.refuse(refused) == body
    assert list(events_of(DIALECT.stream(ModelCall(messages=()), "a1", 1).fail(refused))) == [body]
