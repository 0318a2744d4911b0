"""Strings that end an answer, found in its tokens while they are sampled. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from areal_sc.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STOP_STRINGS: Final = "at most 16 strings of 1 to 64 characters"
"""What `are_stop_strings` allows."""

_INCOMPLETE: Final = "\ufffd"
"""What the first bytes of a character decode to."""

_MAX_OPEN_TOKENS: Final = 16
"""Tokens without a whole character that are waited for: a character has at most four bytes, so that
these are no text."""


def are_stop_strings(stop: Any) -> bool:
    """Whether a value is a list of strings that may end an answer."""
    return (
        isinstance(stop, list | tuple)
        and len(stop) <= 16
        and all(isinstance(string, str) and 1 <= len(string) <= 64 for string in stop)
    )


class StopStrings:
    """Reads one answer's tokens.

    A token's text depends on its neighbours: a character may have several tokens, and some
    tokenizers drop the space that begins a text. Tokens are therefore decoded together with those
    before them, back to where the last but one whole character ends.

    Raises: ConfigError: a string has a special token in it, which the text of answers leaves out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        added = tokenizer.added_tokens_decoder
        self._special = {token_id: token for token_id, token in added.items() if token.special}
        for token in self._special.values():
            if any(token.content in string for string in self.strings):
                raise ConfigError(
                    f"generation.stop: {token.content!r} is a special token of the model, which is "
                    "no part of an answer's text: give its id to generation.stop_token_ids"
                )
        self._tokenizer = tokenizer
        self._longest = max(map(len, self.strings))
        self._token_ids: list[int] = []
        self._num_known = 0  # of these tokens; they are there for those behind them
        self._known = ""  # text of these
        self._tail = ""  # end of the answer's text up to there: a stop may begin in it

    def completes(self, token_id: int) -> bool:
        """Takes the answer's next token; whether a string is complete with it."""
        if token_id in self._special:
            return False
        self._token_ids.append(token_id)
        text = self._decode()
        seen = self._tail + text[len(self._known) :]
        if any(string in seen for string in self.strings):
            return True
        is_whole = len(text) > len(self._known) and not text.endswith(_INCOMPLETE)
        if is_whole or len(self._token_ids) - self._num_known > _MAX_OPEN_TOKENS:
            self._tail = seen[-self._longest :]
            del self._token_ids[: self._num_known]
            self._num_known, self._known = len(self._token_ids), self._decode()
        return False

    def _decode(self) -> str:
        text: Any = self._tokenizer.decode(
            self._token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)
