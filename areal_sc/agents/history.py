"""Which earlier answer a call goes on from. No torch.

A call has a whole list of messages. Where it begins with those of an earlier call and with the
answer to it, it goes on from there. Clients write messages otherwise on their way back, so they are
compared by what they mean: arguments of tools by their values, `null` as nothing, and reasoning
only where it is there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from areal_sc.agents.session_call import SessionCall
from areal_sc.workflows.chat_format import Message

_ENCODE: Final = msgspec.json.Encoder(order="sorted")
_COMPARED_APART: Final = frozenset(["reasoning_content", "tool_calls"])


@dataclass(frozen=True)
class CallPlace:
    """Where a call stands among the earlier ones.

    Attributes:
        after: the last answer that it goes on from; None: from none.
        is_rewritten: behind that stands an answer that the model did not give to these messages.
        digests: of the messages up to each one.
    """

    after: SessionCall | None
    is_rewritten: bool
    digests: list[bytes]


@dataclass(frozen=True)
class CallHistory:
    """The calls of a session, by their messages."""

    _answers: dict[bytes, list[SessionCall]] = field(default_factory=dict)
    _prompts: set[bytes] = field(default_factory=set)

    def place(self, messages: Sequence[Message], named: SessionCall | None = None) -> CallPlace:
        """Where a call with these messages stands.

        Args:
            named: goes before other answers that say the same to the same messages.
        Raises: UnicodeError: a text of a message is none.
        """
        digests, last = list[bytes](), b""
        for message in messages:
            last = _digest(last, message)
            digests.append(last)
        is_rewritten = False
        for number in range(len(messages) - 1, -1, -1):
            if messages[number]["role"] != "assistant":
                continue
            same = reversed(self._answers.get(digests[number], ()))
            for answer in sorted(same, key=lambda it: it is not named):
                if _agrees(answer, messages):
                    return CallPlace(answer, is_rewritten, digests)
            is_rewritten |= number > 0 and digests[number - 1] in self._prompts
        return CallPlace(None, is_rewritten, digests)

    def add(self, place: CallPlace, answer: SessionCall) -> None:
        """Notes the answer to a call."""
        prompt = place.digests[-1]
        self._prompts.add(prompt)
        self._answers.setdefault(_digest(prompt, answer.message), []).append(answer)


def _agrees(answer: SessionCall | None, messages: Sequence[Message]) -> bool:
    """Whether the reasoning of the messages, where they have some, is that of the answers."""
    while answer is not None:
        told = messages[answer.num_messages - 1].get("reasoning_content")
        if told and told != answer.message.get("reasoning_content"):
            return False
        answer = answer.after
    return True


def _digest(before: bytes, message: Message) -> bytes:
    meant = [it for it in sorted(message.items()) if it[1] and it[0] not in _COMPARED_APART]
    calls = [_meant_by(call) for call in message.get("tool_calls") or ()]
    told = before + _ENCODE.encode((meant, calls))
    return hashlib.blake2b(told, digest_size=16).digest()


def _meant_by(call: Mapping[str, Any]) -> tuple[Any, ...]:
    function = call["function"]
    return call.get("id"), function["name"], _value(function["arguments"])


def _value(value: Any) -> Any:
    """The value, with whole numbers as such: 1.0 is 1 to a client in JavaScript."""
    if isinstance(value, dict):
        return {name: _value(it) for name, it in value.items()}
    if isinstance(value, list):
        return [_value(it) for it in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
