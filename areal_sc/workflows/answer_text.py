"""The text of an answer, and its content while it is still being sampled. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

from areal_sc.engines.token_text import INCOMPLETE, TokenText

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from transformers import PreTrainedTokenizerBase

    from areal_sc.engines.base import Completion, OnTokens
    from areal_sc.workflows.chat_format import ChatFormat

_THINK: Final = "<think>"
_THOUGHT: Final = "</think>"
_OPENING_TOKENS: Final = 8
"""End of a prompt in which a thought may begin."""


def text_of(
    tokenizer: PreTrainedTokenizerBase, completion: Completion, ends: AbstractSet[int]
) -> str:
    """The answer up to what ends it, with special tokens: calls and reasoning may have some."""
    tokens = completion.token_ids
    if tokens and tokens[-1] in ends:
        tokens = tokens[:-1]
    decoded: Any = tokenizer.decode(
        tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    starts = [start for stop in completion.stop if (start := decoded.find(stop)) >= 0]
    return str(decoded)[: min(starts, default=None)]


def begins_thought(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> bool:
    """Whether the beginning of the answer's reasoning stands in the prompt."""
    opening = str(tokenizer.decode(list(prompt[-_OPENING_TOKENS:]), skip_special_tokens=False))
    return opening.rstrip().endswith(_THINK)


def split_reasoning(text: str, *, is_thinking: bool) -> dict[str, Any]:
    """The reasoning that an answer begins with, and the rest of it, as fields of a message.

    Args:
        is_thinking: its beginning stands in the prompt.
    """
    begun = text.lstrip().startswith(_THINK)
    if not (begun or is_thinking):
        return {"content": text}
    reasoning, _, content = text.partition(_THOUGHT)
    return {
        "content": content.strip(),
        "reasoning_content": reasoning.lstrip().removeprefix(_THINK).strip(),
    }


class TextStream:
    """The content of an answer, as far as it is sure while the answer is being sampled.

        tokens ─► whole characters ─► before a stop string ─► behind reasoning ─► before calls

    What it gives is always the beginning of the content that the answer will have, whatever tokens
    come. So it holds back what may be the beginning of a stop string, of a call, of reasoning, or
    of what the template itself puts around an answer, and whitespace that may be the last. At the
    first special token it ends, and at what is no text.

    Args:
        stop: strings that end the answer.
        is_thinking: the beginning of its reasoning stands in the prompt.
    """

    def __init__(self, chat: ChatFormat, stop: Sequence[str], *, is_thinking: bool) -> None:
        self._chat = chat
        self._stop = stop
        self._is_thinking = is_thinking
        self._is_over = False
        self._token_text = TokenText(chat.tokenizer, skips_special=False)
        self._byte_tokens = _byte_tokens(chat.tokenizer)
        self._special_tokens = _special_tokens(chat.tokenizer)
        self._unread: list[int] = []
        self._raw = ""  # a stop string may begin in it
        self._text = ""  # before every stop string, and not given
        gates = [self._pass_reasoning] if chat.splits_reasoning else []
        self._gates: list[Callable[[], bool]] = [*gates, self._pass_opening, self._pass_call]
        calls = chat.tool_format
        self._marker = calls.marker if calls is not None else ""
        section = calls.section if calls is not None else ""
        self._no_content = [it for it in (self._marker, section, chat.around[1]) if it]

    def to(self, on_text: Callable[[str], None]) -> OnTokens:
        """A function that takes tokens, and calls `on_text` with the content that they add."""

        def on_tokens(token_ids: Sequence[int]) -> None:
            if added := self.add(token_ids):
                on_text(added)

        return on_tokens

    def add(self, token_ids: Sequence[int]) -> str:
        """Takes the answer's next tokens; the content that is sure now and was not before."""
        if self._is_over:
            return ""
        self._unread += takewhile(lambda token: token not in self._chat.ends, token_ids)
        self._is_over = any(token in self._chat.ends for token in token_ids)
        if not self._unread or self._unread[-1] in self._byte_tokens:
            return ""
        added = self._token_text.read(self._unread)
        self._unread.clear()
        if not self._token_text.is_settled:
            return ""
        if added.endswith(INCOMPLETE):
            self._is_over = True
            return ""
        self._raw += added
        self._pass_before_stop()
        while self._gates:
            if not self._gates[0]():
                return ""
            del self._gates[0]
        return self._pass_content()

    def _pass_before_stop(self) -> None:
        starts = [start for stop in self._stop if (start := self._raw.find(stop)) >= 0]
        self._is_over |= bool(starts)
        num_held = max((_num_begun(self._raw, stop) for stop in self._stop), default=0)
        end = min(starts, default=len(self._raw) - num_held)
        self._text += self._raw[:end]
        self._raw = self._raw[end:]

    def _pass_reasoning(self) -> bool:
        begun = self._text.lstrip()
        if not self._is_thinking:
            if not begun.startswith(_THINK):
                return not _THINK.startswith(begun)
            self._is_thinking = True
        before, end, content = self._text.partition(_THOUGHT)
        self._text = content if end else before[-len(_THOUGHT) :]
        if end:
            self._gates.insert(1, self._pass_space)
        return bool(end)

    def _pass_space(self) -> bool:
        self._text = self._text.lstrip()
        return bool(self._text)

    def _pass_opening(self) -> bool:
        """What the template itself puts before the content of an answer."""
        before = self._chat.around[0]
        if before.startswith(self._text) and self._text != before:
            return False
        self._text = self._text.removeprefix(before)
        return True

    def _pass_call(self) -> bool:
        """Calls without a marker are the whole answer."""
        is_call: bool | None = False
        if self._chat.tool_format is not None:
            is_call = self._chat.tool_format.is_call(self._text)
        self._is_over |= is_call is True
        return is_call is False

    def _pass_content(self) -> str:
        content = self._text.partition(self._marker)[0] if self._marker else self._text
        if special := self._special_tokens.search(content):
            content = content[: special.start()]
        self._is_over |= len(content) < len(self._text)
        sure = None
        while content != sure:
            sure, content = content, content.rstrip()
            for string in self._no_content:
                content = content[: len(content) - _num_begun(content, string)]
        self._text = self._text[len(content) :]
        return content


def _num_begun(text: str, string: str) -> int:
    """How many of the text's last characters are the beginning of a string."""
    start = text.find(string[0], max(0, len(text) - len(string)))
    while start >= 0 and not string.startswith(text[start:]):
        start = text.find(string[0], start + 1)
    return len(text) - start if start >= 0 else 0


@lru_cache(maxsize=8)
def _byte_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that are bytes: all in a row are one text, so it is known when another one comes."""
    vocabulary = tokenizer.get_vocab()
    names = (f"<0x{byte:02X}>" for byte in range(256))
    return frozenset(vocabulary[name] for name in names if name in vocabulary)


@lru_cache(maxsize=8)
def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    texts = [str(it.content) for it in tokenizer.added_tokens_decoder.values() if it.special]
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")
