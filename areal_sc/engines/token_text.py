"""The text of an answer's tokens, read while they are sampled. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INCOMPLETE: Final = "\ufffd"
"""What the first bytes of a character decode to."""

_MAX_OPEN_TOKENS: Final = 16
"""Tokens without a whole character that are waited for: a character has at most four bytes, so that
these are no text."""


class TokenText:
    """Decodes tokens as they come.

    A token's text depends on its neighbours: a character may have several tokens, and some
    tokenizers drop the space that begins a text. Tokens are therefore decoded together with those
    before them, back to where the last but one whole character ends.

    Attributes:
        is_settled: more tokens do not change what `read` has returned. It ends with `INCOMPLETE`
            then where the tokens are no text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skips_special: bool) -> None:
        self.is_settled = True
        self._tokenizer = tokenizer
        self._skips_special = skips_special
        self._token_ids: list[int] = []
        self._num_known = 0  # of these tokens; they are there for those behind them
        self._known = ""  # text of these

    def read(self, token_ids: Iterable[int]) -> str:
        """Takes the next tokens; the text behind what was settled before."""
        self._token_ids += token_ids
        text = self._decode()
        new = text[len(self._known) :]
        is_whole = bool(new) and not text.endswith(INCOMPLETE)
        num_open = len(self._token_ids) - self._num_known
        self.is_settled = is_whole or num_open > _MAX_OPEN_TOKENS
        if self.is_settled:
            del self._token_ids[: self._num_known]
            self._num_known, self._known = len(self._token_ids), self._decode()
        return new

    def _decode(self) -> str:
        text: Any = self._tokenizer.decode(
            self._token_ids,
            skip_special_tokens=self._skips_special,
            clean_up_tokenization_spaces=False,
        )
        return str(text)
