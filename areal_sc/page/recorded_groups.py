"""Single groups that rollout workers have recorded, with all of their numbers and tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec.structs import asdict
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from areal_sc.errors import RunFolderError
from areal_sc.page.row_index import PlacedGroup, RowIndex, group_of
from areal_sc.page.row_texts import decoded
from areal_sc.page.trained_numbers import TrainedNumbers
from areal_sc.records.blocks import read_block
from areal_sc.records.reading import answers_of, rows_of
from areal_sc.records.recorded_calls import RecordedCall
from areal_sc.records.recorded_rows import RecordedGroup, RecordedRow, RecordedTokens

MAX_TOKENS: Final = 10_000
"""Tokens of one answer: a page shows so many at once."""
_MOST_PARTS: Final = 4
"""Most tokens that make one character: a byte each."""


class RecordedGroups:
    """Reads single groups from where an index says they are."""

    def __init__(self, index: RowIndex, trained: TrainedNumbers) -> None:
        self._index = index
        self._trained = trained

    def of_group(self, number: int) -> list[dict[str, Any]]:
        """The attempts of a group that are recorded and not gone, the newest one last.

        Returns: what `RecordedGroup` says of each; its `rows` have `num_trained_tokens` and
            `num_interruptions`, too.
        Raises: RunFolderError: one cannot be read any more.
        """
        attempts = list[dict[str, Any]]()
        for placed in self._index.places(number).values():
            with suppress(FileNotFoundError):
                group, _, _ = _read(placed)
                attempts.append({**asdict(group), "rows": [_told(row) for row in group.rows]})
        return attempts

    def tokens(
        self,
        number: int,
        attempt: int,
        episode: int,
        row: int,
        tokenizer: Tokenizer | None,
        first: int = 0,
    ) -> dict[str, Any] | None:
        """The turns of a row, and its tokens from the one numbered `first` on, as many as are told.

        Returns: `ids`, `mask`, `logprobs`, `versions` and, with a tokenizer, `texts` (None without
            one), each with one value a token; `first`, `num_tokens` of the row; `turns`, runs of
            tokens that were sampled, or were not, with `is_sampled`, `is_trained`, `begin`, `end`,
            `first_version`, `last_version`, `mean_logprob`, `text` (None without a tokenizer) and,
            of an answer, `call`, if that is recorded; `branches`, of the other rows of the episode
            `row` and `num_shared`, the tokens that both begin with; `trained`, what
            `TrainedNumbers.of_row` tells. None: it is not recorded.
        Raises: RunFolderError: it cannot be read any more.
        """
        placed = self._index.places(number).get(attempt)
        if placed is None:
            return None
        try:
            group, of_rows, of_calls = _read(placed)
        except FileNotFoundError:
            raise RunFolderError(
                f"{placed.path.name} is gone: records.max_bytes has room for newer rows alone"
            ) from None
        names = [(it.episode, it.row) for it in group.rows]
        if (episode, row) not in names:
            return None
        place = names.index((episode, row))
        tokens = of_rows[place]
        branches = [
            {"row": other, "num_shared": _num_shared(tokens.input_ids, it.input_ids)}
            for (of_episode, other), it in zip(names, of_rows, strict=True)
            if of_episode == episode and other != row
        ]
        told = slice(max(first, 0), max(first, 0) + MAX_TOKENS)
        ids = tokens.input_ids[told].tolist()
        return {
            "ids": ids,
            "mask": tokens.loss_mask[told].tolist(),
            "logprobs": [round(it, 5) for it in tokens.behavior_logprobs[told].tolist()],
            "versions": tokens.versions[told].tolist(),
            "texts": None if tokenizer is None else texts_of(tokenizer, ids),
            "first": told.start,
            "num_tokens": len(tokens.input_ids),
            "turns": _turns(tokens, of_calls[place], tokenizer),
            "branches": branches,
            "trained": self._trained.of_row(
                (number, attempt, episode, row), tokens.loss_mask, told, group.began
            ),
        }


def _told(row: RecordedRow) -> dict[str, Any]:
    of_row = {name: getattr(row, name) for name in ("num_trained_tokens", "num_interruptions")}
    return {**asdict(row), **of_row}


def _turns(
    tokens: RecordedTokens, calls: Sequence[RecordedCall], tokenizer: Tokenizer | None
) -> list[dict[str, Any]]:
    mask = tokens.loss_mask
    parts = _parts(mask, calls)
    texts = (
        [None] * len(parts)
        if tokenizer is None
        else decoded([tokens.input_ids[part] for part, _, _ in parts], tokenizer)
    )
    return [
        {
            "is_sampled": is_sampled,
            "is_trained": bool(mask[part.start]),
            "begin": part.start,
            "end": part.stop,
            "first_version": int(tokens.versions[part.start]),
            "last_version": int(tokens.versions[part.stop - 1]),
            "mean_logprob": float(tokens.behavior_logprobs[part].mean()),
            "text": text,
            "call": call,
        }
        for (part, is_sampled, call), text in zip(parts, texts, strict=True)
    ]


def _parts(
    mask: np.ndarray, calls: Sequence[RecordedCall]
) -> list[tuple[slice, bool, RecordedCall | None]]:
    """What was given and what was sampled: tokens, whether sampled, and the call of an answer."""
    parts, end = list[tuple[slice, bool, RecordedCall | None]](), 0
    for call in calls:
        begin, end = end + call.num_given, end + call.num_given + call.num_sampled
        parts.append((slice(begin - call.num_given, begin), False, None))
        parts.append((slice(begin, end), True, call))
    if end != len(mask):  # no conversation, or the workflow has made another row of it
        ends = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(mask)]
        parts = [(slice(*pair), bool(mask[pair[0]]), None) for pair in pairwise(ends)]
    return [it for it in parts if it[0].start < it[0].stop]


def _num_shared(first: np.ndarray, second: np.ndarray) -> int:
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length


def _read(
    placed: PlacedGroup,
) -> tuple[RecordedGroup, list[RecordedTokens], list[tuple[RecordedCall, ...]]]:
    """What is at a place: the group, and tokens and calls of each of its rows.

    Raises: FileNotFoundError: it is gone. RunFolderError: it cannot be read any more.
    """
    try:
        head, body = read_block(placed.path, placed.begin, placed.end)
        if placed.nth is None:
            return rows_of(head, body)
        content = answers_of(head, body)[placed.nth]
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{placed.path.name} cannot be read: {error}") from error
    return group_of(content.answer), content.tokens, content.calls


def texts_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token; that of a character which several tokens make stands at the last.

    Tokens that together make no character are replacement characters.
    """
    stream, texts, num_silent = DecodeStream(skip_special_tokens=False), list[str](), 0
    for number in ids:
        try:
            text = stream.step(tokenizer, number) or ""
        except Exception:  # it has no class of its own: those before make no character with it
            _make_replacements(texts, num_silent)
            stream, num_silent = DecodeStream(skip_special_tokens=False), 0
            text = stream.step(tokenizer, number) or ""
        texts.append(text)
        num_silent = 0 if text else num_silent + 1
        if num_silent > _MOST_PARTS:
            _make_replacements(texts, num_silent)
            stream, num_silent = DecodeStream(skip_special_tokens=False), 0
    return texts


def _make_replacements(texts: list[str], num_last: int) -> None:
    texts[len(texts) - num_last :] = ["\N{REPLACEMENT CHARACTER}"] * num_last


def tokenizer_of(*folders: Path) -> Tokenizer | None:
    """The tokenizer of the first folder that has one; None: none of them has."""
    for folder in folders:
        path = folder / "tokenizer.json"
        if os.access(path, os.R_OK):
            try:
                return Tokenizer.from_file(str(path))
            except Exception:  # it has no class of its own
                continue
    return None
