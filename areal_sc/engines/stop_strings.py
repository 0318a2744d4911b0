"""Strings that end an answer, found in its tokens while they are sampled. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from areal_sc.engines.token_text import TokenText
from areal_sc.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STOP_STRINGS: Final = "at most 16 strings of 1 to 64 characters"
"""What `are_stop_strings` allows."""


def are_stop_strings(stop: Any) -> bool:
    """Whether a value is a list of strings that may end an answer."""
    return (
        isinstance(stop, list | tuple)
        and len(stop) <= 16
        and all(isinstance(string, str) and 1 <= len(string) <= 64 for string in stop)
    )


def special_token_in(tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> str:
    """Which special token stands in one of the strings, and what to do about it; "": none."""
    for token in tokenizer.added_tokens_decoder.values():
        if token.special and any(token.content in string for string in strings):
            return (
                f"{token.content!r} is a special token of the model, which is no part of an "
                "answer's text: give its id to generation.stop_token_ids"
            )
    return ""


class StopStrings:
    """Reads one answer's tokens.

    Raises: ConfigError: a string has a special token in it, which the text of answers leaves out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        added = tokenizer.added_tokens_decoder
        self._special = {token_id for token_id, token in added.items() if token.special}
        if problem := special_token_in(tokenizer, strings):
            raise ConfigError(f"generation.stop: {problem}")
        self._longest = max(map(len, self.strings))
        self._text = TokenText(tokenizer, skips_special=True)
        self._tail = ""  # end of the text before what is read: a stop may begin in it

    def completes(self, token_id: int) -> bool:
        """Takes the answer's next token; whether a string is complete with it."""
        if token_id in self._special:
            return False
        seen = self._tail + self._text.read((token_id,))
        if any(string in seen for string in self.strings):
            return True
        if self._text.is_settled:
            self._tail = seen[-self._longest :]
        return False
