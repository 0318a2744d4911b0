"""Tool calls, in the forms in which the templates of common models write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import chat_templates as templates
import pytest

from areal_sc.workflows.chat_format import format_of
from areal_sc.workflows.tool_calls import ToolFormat, find_format


def tool(name: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER = tool("weather", city="string", days="integer", places="array")
TWO = (("weather", {"city": "Paris"}), ("weather", {"city": "Rome", "days": 3, "places": [1, "b"]}))
ONE = TWO[1:]


def format_for(template: str) -> ToolFormat:
    tokenizer = templates.tokenizer_for(template)
    found = format_of(
        tokenizer, [WEATHER], {}, frozenset(templates.end_token_ids(tokenizer))
    ).tool_format
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        (
            "QWEN",
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
            '<tool_call>\n{"name":"weather","arguments":{"city":"Rome","days":3,"places":[1,"b"]}}',
            TWO,
        ),
        (
            "LLAMA",
            '{"name": "weather", "parameters": {"city": "Rome", "days": 3, "places": [1, "b"]}}',
            ONE,
        ),
        (
            "MISTRAL",
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}, '
            '{"name": "weather", "arguments": {"city": "Rome", "days": 3, "places": [1, "b"]}}]',
            TWO,
        ),
        (
            "DEEPSEEK",
            '<|calls|><|call|>function<|sep|>weather\n```json\n{"city": "Paris"}\n```<|call_end|>'
            "<|call|>function<|sep|>weather\n```json\n"
            '{"city": "Rome", "days": 3, "places": [1, "b"]}\n```<|call_end|><|calls_end|>',
            TWO,
        ),
        (
            "GLM",
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
            '<arg_key>places</arg_key>\n<arg_value>[1, "b"]</arg_value>\n</tool_call>',
            TWO,
        ),
    ],
)
def test_calls_are_read_as_the_template_writes_them(
    name: str, text: str, calls: Sequence[tuple[str, Mapping[str, Any]]]
) -> None:
    found = format_for(getattr(templates, name))
    read = found.read(text, [WEATHER])
    assert read.content == ""
    assert [call[:2] for call in read.calls] == list(calls)
    assert read.problems == ()
    if name != "LLAMA":  # whose calls are the whole answer
        read = found.read(f"I look it up.\n{text}", [WEATHER])
        assert (read.content, len(read.calls)) == ("I look it up.", len(calls))
    assert found.read("It is sunny.", [WEATHER]).content == "It is sunny."


def test_a_call_has_the_id_that_the_model_gives_it() -> None:
    text = '[TOOL_CALLS][{"name": "weather", "arguments": {}, "id": "abcdefghi"}]'
    assert format_for(templates.MISTRAL).read(text, [WEATHER]).calls[0][2] == "abcdefghi"


def test_arguments_between_tags_with_the_name_in_a_tag() -> None:
    """The form of Qwen3-Coder, where a value may have several lines."""

    def written(name: str, **values: str) -> str:
        pairs = "".join(f"<parameter={key}>\n{it}\n</parameter>\n" for key, it in values.items())
        return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"

    found = find_format(
        written("areal_first", akey="avalue", bkey="bvalue")
        + "\n"
        + written("areal_second", ckey="cvalue")
    )
    assert found is not None
    read = found.read(written("weather", city="New\nYork", days="3"), [WEATHER])
    assert read.calls == (("weather", {"city": "New\nYork", "days": 3}, ""),)
    for text, problem in (
        ("<tool_call>\n<function=weather>\n<parameter=city>\nRome", "expected '</function>"),
        (written("weather", days="three"), "no JSON"),
        (written("wether"), "there is no tool 'wether'"),
    ):
        read = found.read(text, [WEATHER])
        assert read.calls == ()
        assert problem in read.problems[0]
        assert read.content == text


def test_several_calls_without_a_marker() -> None:
    found = format_for(templates.LLAMA)
    calls = '{"name": "weather", "parameters": {}}; {"name": "weather", "parameters": {}}'
    read = found.read(calls, [WEATHER])
    assert (len(read.calls), read.content) == (1, "")
    assert read.problems == ("the call of weather: expected at most 1 in an answer",)
    assert len(replace(found, max_calls=None).read(calls, [WEATHER]).calls) == 2
    assert found.read('{"temperature": 20}', [WEATHER]).problems == ()  # an answer in JSON
    assert "no JSON" in found.read('{"name": "weather", ', [WEATHER]).problems[0]


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ('{"name": ["weather"], "arguments": {}}', "there is no tool ['weather']"),
        ('{"name": {"a": 1}, "arguments": {}}', "there is no tool {'a': 1}"),
        ('{"name": "weather", "arguments": ' + "[" * 100_000, "no JSON"),
    ],
)
def test_a_call_that_nothing_can_read_is_a_problem(call: str, problem: str) -> None:
    read = format_for(templates.QWEN).read(f"<tool_call>{call}</tool_call>", [WEATHER])
    assert read.calls == ()
    assert problem in read.problems[0]


@pytest.mark.parametrize("text", ["", "areal_first then areal_second", "call:areal_first{akey:1}"])
def test_an_unknown_form_is_none(text: str) -> None:
    assert find_format(text) is None


@pytest.mark.parametrize(
    "value", ["NaN", "-Infinity", "1e999", r'"\ud83d"', r'["a", {"\ud83d": 1}]']
)
def test_what_only_python_takes_for_json_is_no_call(value: str) -> None:
    text = f'<tool_call>\n{{"name": "weather", "arguments": {{"city": {value}}}}}\n</tool_call>'
    read = format_for(templates.QWEN).read(text, [WEATHER])
    assert (read.calls, read.content) == ((), text)
    assert "no JSON" in read.problems[0]
    read.problems[0].encode()
