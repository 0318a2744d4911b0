"""Tool calls in the text of an answer, read as the model's own chat template writes them. No torch.

A template is given two calls of a tool; what it makes of them shows the form of a call:

    <tool_call>\\n{"name": NAME, "arguments": {...}}\\n</tool_call>   JSON objects behind a marker
    [TOOL_CALLS] [{"name": NAME, "arguments": {...}}, ...]         a JSON list behind a marker
    {"name": NAME, "parameters": {...}}                            JSON without a marker
    <|call|>NAME<|sep|>{...}<|end|>                                a name, and JSON behind it
    <tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE ...      no JSON, but tags
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final

_READ_JSON: Final = json.JSONDecoder().raw_decode
_REST_OF_TAG: Final = re.compile(r"^[^<\[]*[>\]]")

TOOLS: Final = ("areal_first", "areal_second")
"""The tools that a template is tried with."""
TRIED_ARGUMENTS: Final = ({"akey": "avalue", "bkey": "bvalue"}, {"ckey": "cvalue"})
"""And the arguments of a call of each."""


def call_entry(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """An entry of a message's `tool_calls`. Args: arguments: an object, or its text."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


@dataclass(frozen=True)
class ToolCall:
    """A call that the model has written.

    Attributes:
        id: nine letters and digits, which some templates want; the model's own where it is so.
        arguments: values by name.
    """

    id: str
    name: str
    arguments: dict[str, Any]

    def answer(self, content: str) -> dict[str, Any]:
        """The message that tells the model what the tool gave."""
        return {"role": "tool", "tool_call_id": self.id, "name": self.name, "content": content}

    def as_message(self) -> dict[str, Any]:
        """The call as an entry of a message's `tool_calls`."""
        return call_entry(self.id, self.name, self.arguments)


@dataclass(frozen=True)
class ReadAnswer:
    """The text of an answer, taken apart.

    Attributes:
        content: what is no call; a call that cannot be read stays in it.
        calls: (name, arguments, id) of each that can be read; "": it has no id.
        problems: why others cannot, for the model to read.
    """

    content: str
    calls: tuple[tuple[str, dict[str, Any], str], ...] = ()
    problems: tuple[str, ...] = ()


class _Broken(Exception):
    """A call that cannot be read."""


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls: `marker` before each, and before the first `section`, too.

    Attributes:
        max_calls: most that the template takes in one answer; None: any number.
    """

    marker: str
    section: str
    max_calls: int | None = field(default=None, kw_only=True)

    def read(self, text: str, tools: Sequence[Mapping[str, Any]]) -> ReadAnswer:
        """Takes an answer apart.

        Args:
            tools: all that there are, in OpenAI's form; a call of another one is a problem.
        """
        content, *parts = self._parts(text)
        known = {tool["function"]["name"]: tool["function"] for tool in tools}
        calls, problems = list[tuple[str, dict[str, Any], str]](), list[str]()
        for part in parts:
            try:
                for name, arguments, call_id in self._calls(part, known):
                    if not isinstance(name, str) or name not in known:
                        raise _Broken(f"there is no tool {name!r:.80}, only {', '.join(known)}")
                    if not isinstance(arguments, dict):
                        found = type(arguments).__name__
                        raise _Broken(f"the arguments of {name} are a {found}, not an object")
                    calls.append((name, arguments, call_id))
            except _Broken as error:
                problems.append(f"tool call {len(calls) + len(problems) + 1}: {error}")
                content += self.marker + part
        if too_many := calls[self.max_calls :] if self.max_calls else []:
            del calls[self.max_calls :]
            problems += [
                f"the call of {name}: expected at most {self.max_calls} in an answer"
                for name, _, _ in too_many
            ]
        if parts:
            content = content.rstrip().removesuffix(self.section).rstrip()
        return ReadAnswer(content, tuple(calls), tuple(problems))

    def is_call(self, text: str) -> bool | None:
        """Whether an answer that begins so is a call as a whole; None: more of it will tell."""
        return False

    def _parts(self, text: str) -> list[str]:
        """What is before the first call, and then each call."""
        return text.split(self.marker)

    def _calls(self, part: str, known: Mapping[str, Any]) -> Iterator[tuple[Any, Any, str]]:
        raise NotImplementedError


@dataclass(frozen=True)
class JsonCalls(ToolFormat):
    """A JSON object with the name and the arguments, or a list of them, behind each marker."""

    name_key: str
    arguments_key: str

    def is_call(self, text: str) -> bool | None:
        if self.marker:
            return False
        begun = self._begun(text)
        key, found = f'"{self.name_key}', begun.removeprefix("{").lstrip()
        if begun.startswith("{") and found.startswith(key):
            return True
        is_open = not begun or (begun.startswith("{") and key.startswith(found))
        return None if is_open or self.section.startswith(text.strip()) else False

    def _parts(self, text: str) -> list[str]:
        if self.marker:
            return super()._parts(text)
        return ["", self._begun(text)] if self.is_call(text) else [text]

    def _begun(self, text: str) -> str:
        return text.strip().removeprefix(self.section).lstrip()

    def _calls(self, part: str, known: Mapping[str, Any]) -> Iterator[tuple[Any, Any, str]]:
        value, rest = _json(part)
        items = value if isinstance(value, list) else [value]
        while not self.marker and (rest := rest.strip(" \n;")):
            value, rest = _json(rest)
            items.append(value)
        for item in items:
            call_id = str(item.get("id") or "") if isinstance(item, dict) else ""
            if isinstance(item, dict) and isinstance(item.get("function"), dict):
                item = item["function"]
            if not isinstance(item, dict) or not {self.name_key, self.arguments_key} <= set(item):
                raise _Broken(f"expected an object with {self.name_key} and {self.arguments_key}")
            yield item[self.name_key], item[self.arguments_key], call_id


@dataclass(frozen=True)
class NamedCalls(ToolFormat):
    """A name, a separator, and the arguments as JSON."""

    separator: str

    def _calls(self, part: str, known: Mapping[str, Any]) -> Iterator[tuple[Any, Any, str]]:
        name, separator, rest = part.partition(self.separator)
        if not separator:
            raise _Broken(f"expected a name, {self.separator!r} and a JSON object")
        yield name.strip(), _json(rest)[0], ""


@dataclass(frozen=True)
class TaggedCalls(ToolFormat):
    """A name, and behind it each argument's name and value between tags.

    Attributes:
        behind_name: ends the name.
        before_key, behind_key, behind_value: stand around a name and its value.
        end: ends the call.
    """

    behind_name: str
    before_key: str
    behind_key: str
    behind_value: str
    end: str

    def _calls(self, part: str, known: Mapping[str, Any]) -> Iterator[tuple[Any, Any, str]]:
        ended, end, _ = part.partition(self.end)
        if not end:
            raise _Broken(f"expected {self.end!r} at its end")
        name = re.split(f"{re.escape(self.behind_name)}|{re.escape(self.before_key)}", ended)[0]
        name = name.strip()
        types = known.get(name, {}).get("parameters", {}).get("properties", {})
        arguments = dict[str, Any]()
        for pair in ended.split(self.before_key)[1:]:
            key, _, rest = pair.partition(self.behind_key)
            value, closed, _ = rest.partition(self.behind_value)
            if not closed:
                raise _Broken(f"expected {self.behind_value!r} behind the argument {key:.80}")
            is_text = types.get(key, {}).get("type", "string") == "string"
            arguments[key] = value.strip("\n") if is_text else _json(value)[0]
        yield name, arguments, ""


def find_format(answer: str) -> ToolFormat | None:
    """The form of calls in what a template makes of `TOOLS` called with `TRIED_ARGUMENTS`.

    Args:
        answer: from where an answer begins to before the token that ends it.
    Returns: None: it is none of the known ones.
    """
    answer = answer.rpartition("</think>")[2]  # an empty thought, with which some begin
    first, second = (answer.find(name) for name in TOOLS)
    if first < 0:
        return None
    for start in (found.start() for found in re.finditer(r"[\[{]", answer)):
        try:
            value, end = _READ_JSON(answer, start)
        except ValueError:
            continue
        between = answer[end:second] if second > end else None
        if value == TRIED_ARGUMENTS[0]:
            marker, section = _shared_end(answer[:first], between)
            separator = answer[first + len(TOOLS[0]) : start].strip()
            is_clear = marker and separator and "{" not in separator
            return NamedCalls(marker, section, separator) if is_clear else None
        item = value[0] if isinstance(value, list) and value else value
        if isinstance(item, dict):
            item = item.get("function", item)
            name = next((key for key, it in item.items() if it == TOOLS[0]), "")
            arguments = next((key for key, it in item.items() if it == TRIED_ARGUMENTS[0]), "")
            if name and arguments:
                between = between and between[: between.rindex("{")]
                marker, section = _shared_end(answer[:start], between)
                return JsonCalls(marker, section, name, arguments)
    return _find_tags(answer, first, second) if second > first else None


def _find_tags(answer: str, first: int, second: int) -> TaggedCalls | None:
    places = [(first, TOOLS[0])]
    for word in ("akey", "avalue", "bkey", "bvalue"):
        places.append((answer.find(word, places[-1][0]), word))
    if min(place for place, _ in places) < 0:
        return None
    name, behind_key, between, _ = (
        answer[place + len(word) : places[n + 1][0]] for n, (place, word) in enumerate(places[:-1])
    )
    before_key, behind_value = _shared_end(between, name)
    behind_all = answer[places[-1][0] + len("bvalue") : second]
    marker, section = _shared_end(answer[:first], behind_all)
    end = behind_all.strip().removesuffix(marker.strip()).strip().removeprefix(behind_value)
    behind_name = name.strip().removesuffix(before_key).strip() or "\n"
    if not (marker and before_key and behind_key.strip() and behind_value and end.strip()):
        return None
    return TaggedCalls(
        marker, section, behind_name, before_key, behind_key.strip(), behind_value, end.strip()
    )


def _shared_end(one: str, other: str | None) -> tuple[str, str]:
    """What both texts end with, and what else the first one has before it; without whitespace.

    Args:
        other: None: there is no other text.
    """
    pairs = zip(reversed(one), reversed(one if other is None else other), strict=False)
    num_shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    end = _REST_OF_TAG.sub("", one[len(one) - num_shared :]) if other is not None else one
    return end.strip(), one[: len(one) - len(end)].strip()


def _json(text: str) -> tuple[Any, str]:
    """The value that a text begins with, and the rest of it."""
    text = text.lstrip()
    try:
        value, end = _READ_JSON(text)
        # Python reads NaN, Infinity and halves of characters, which no client can be sent
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise _Broken(f"no JSON: {error}") from error
    return value, text[end:]
