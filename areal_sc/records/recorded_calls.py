"""Calls of the model as they are recorded: messages, tools, and which call goes on from which.

A row of several turns is a way through the calls of its episode. Rows of an episode that begin
alike share calls, so these are stored once:

    call 0 -- call 1 -- call 2      row 0: 0, 1, 2
                   \\--- call 3      row 1: 0, 1, 3
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from areal_sc.records.samples import shortened

LEVEL: Final = 1
"""The level of zlib; 6 takes 3 times as long, and saves a tenth."""
MAX_TEXT_CHARS: Final = 2000
"""A longer text is recorded by its beginning and its end; what was read of it is in the tokens."""


class RecordedToolCall(Struct, frozen=True):
    """A tool that the model calls.

    Attributes:
        arguments: in JSON.
    """

    id: str
    name: str
    arguments: str


class RecordedMessage(Struct, frozen=True, omit_defaults=True):
    """A message of a conversation. Long texts are cut.

    Attributes:
        text: its content; of a list of parts, these in JSON.
        reasoning: what the model thought before it.
        answers: id of the tool call that it is the result of; "": of none.
    """

    role: str
    text: str
    reasoning: str = ""
    tool_calls: tuple[RecordedToolCall, ...] = ()
    answers: str = ""

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> RecordedMessage:
        """Args: message: in OpenAI's form, with the arguments of tool calls as objects."""
        calls = message.get("tool_calls") or ()
        return cls(
            role=message["role"],
            text=recorded_text(message.get("content") or ""),
            reasoning=recorded_text(message.get("reasoning_content") or ""),
            tool_calls=tuple(
                RecordedToolCall(
                    recorded_text(call.get("id") or ""),
                    recorded_text(call["function"]["name"]),
                    recorded_text(call["function"]["arguments"]),
                )
                for call in calls
            ),
            answers=recorded_text(message.get("tool_call_id") or ""),
        )


class RecordedCall(Struct, frozen=True, kw_only=True):
    """A call of the model in an episode.

    Attributes:
        number: no other call of its group has it; rows with the same one share the call.
        after: number of the call whose conversation it goes on; -1: it begins one.
        new_row: why it begins a row though it goes on a conversation; "": it does not.
        model: the name by which an agent called the model; "": it gave none.
        began: Unix time in seconds.
        took_s: until the answer was there.
        num_given: tokens that the row gives the model behind the call before.
        num_sampled: tokens of the answer.
        given: messages behind the answer to `after`.
    """

    number: int
    after: int
    new_row: str
    model: str
    began: float
    took_s: float
    num_given: int
    num_sampled: int
    given: tuple[RecordedMessage, ...]
    answer: RecordedMessage


def pack_calls(rows: Sequence[Sequence[RecordedCall]]) -> bytes:
    """The calls of each row of a group; of none b""."""
    known = {call.number: call for row in rows for call in row}
    if not known:
        return b""
    ways = [[call.number for call in row] for row in rows]
    return zlib.compress(msgspec.msgpack.encode(([*known.values()], ways)), LEVEL)


def unpack_calls(content: bytes, num_rows: int) -> list[tuple[RecordedCall, ...]]:
    """Inverse of `pack_calls`. Raises: ValueError: it is something else."""
    if not content:
        return [()] * num_rows
    try:
        calls, ways = _CALLS.decode(zlib.decompress(content))
        known = {call.number: call for call in calls}
        return [tuple(known[number] for number in way) for way in ways]
    except (zlib.error, msgspec.MsgspecError, KeyError) as error:
        raise ValueError(f"calls of the model cannot be read: {error}") from error


def recorded_text(value: Any) -> str:
    """Text that is not too long; JSON of other values. What is no Unicode has question marks."""
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, default=repr)
    return shortened(value, MAX_TEXT_CHARS).encode(errors="replace").decode()


_CALLS: Final = msgspec.msgpack.Decoder(tuple[list[RecordedCall], list[list[int]]])
