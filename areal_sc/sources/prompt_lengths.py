"""Prompts that are too long for a run, left out and counted. No torch at import time."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from areal_sc.errors import ModelError, WorkflowError
from areal_sc.hub import local_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_logger = logging.getLogger(__name__)


class PromptLimit:
    """Keeps the rows whose prompt has few tokens.

    A list of messages counts with the model's chat template around it, a text as it is.

    Args:
        max_tokens: of a prompt, >= 1.
        tokenizer: that of the model, or its folder, or the model's name on the hub.
        where: names the rows in what is told.
    Raises: WorkflowError: one of the two is missing, or there is no such tokenizer.
    """

    def __init__(
        self, max_tokens: int, tokenizer: PreTrainedTokenizerBase | str | None, where: str
    ) -> None:
        if max_tokens < 1 or tokenizer is None:
            raise WorkflowError(
                f"{where}: expected max_tokens of at least 1 together with the model's tokenizer, "
                f"as tokenizer=config.actor.path; got max_tokens={max_tokens}, "
                f"tokenizer={tokenizer!r}"
            )
        if isinstance(tokenizer, str):
            from transformers import AutoTokenizer

            try:
                tokenizer = AutoTokenizer.from_pretrained(local_model(tokenizer))
            except (ModelError, OSError, ValueError, KeyError) as error:
                raise WorkflowError(f"{where}: tokenizer={tokenizer!r}: {error}") from error
        self._max_tokens = max_tokens
        self._tokenizer: Any = tokenizer
        self._where = where
        self._has_told = False

    def of_rows(self, rows: Any) -> Any:
        """What is left of a list, of a data set of `datasets`, or of a stream; the same kind.

        Raises: WorkflowError: nothing is left of a list or data set.
        """
        if not hasattr(rows, "__len__"):
            keeps = self._keeps_and_tells_first
            return rows.filter(keeps) if hasattr(rows, "filter") else filter(keeps, rows)
        is_list = isinstance(rows, list)
        kept = [*filter(self._keeps, rows)] if is_list else rows.filter(self._keeps)
        limit = f"prompts have more than max_tokens={self._max_tokens} tokens"
        if len(kept) == 0:
            raise WorkflowError(f"{self._where}: all {len(rows)} {limit}")
        if num_long := len(rows) - len(kept):
            _logger.warning(
                "%s: %d of %d %s, and are left out", self._where, num_long, len(rows), limit
            )
        return kept

    def _keeps(self, row: dict[str, Any]) -> bool:
        return self._count_tokens(row["prompt"]) <= self._max_tokens

    def _keeps_and_tells_first(self, row: dict[str, Any]) -> bool:
        keeps = self._keeps(row)
        if not keeps and not self._has_told:
            self._has_told = True
            _logger.warning(
                "%s: a prompt of %d tokens is left out, as all of more than max_tokens=%d will be",
                self._where,
                self._count_tokens(row["prompt"]),
                self._max_tokens,
            )
        return keeps

    def _count_tokens(self, prompt: Any) -> int:
        if isinstance(prompt, str):
            return len(self._tokenizer.encode(prompt))
        text = self._tokenizer.apply_chat_template(
            prompt, tokenize=False, add_generation_prompt=True
        )
        return len(self._tokenizer.encode(text, add_special_tokens=False))
