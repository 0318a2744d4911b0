"""Answers of evaluations as rollout workers record them: those of about a second in a block.

    head    what is told of each answer, compressed together
    body    the tokens of all rows, then what each episode asked of the model, answer by answer

Answers that are recorded together share what their heads have in common: an answer of 20 tokens
takes about 100 bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from areal_sc.records.recorded_calls import LEVEL, RecordedCall, pack_calls, unpack_calls
from areal_sc.records.recorded_rows import (
    PlayedRow,
    RecordedRejection,
    RecordedRow,
    RecordedTokens,
    numbers_of,
    pack_tokens,
    unpack_tokens,
)


class EvaluatedAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is recorded of an answer to a held-out prompt, but for its tokens.

    Attributes:
        evaluation: name of its result, see `EvaluationResult`: `periodic`, `SET/greedy`.
        step: policy version when the evaluation began; what sampled the tokens, each row says.
        worker: the one that generated it.
        dataset, index: its prompt.
        sample: number of the answer to this prompt, from 0.
        prompt: the row of the dataset, as text; a long one is cut.
        began: Unix time in seconds.
        took_s: until it had ended.
        rows: of its episode; none where that was rejected.
        rejected: why there are no rows.
        num_call_bytes: of the body: the calls of its rows.
    """

    evaluation: str
    step: int
    worker: str
    dataset: int
    index: int
    prompt: str
    began: float
    took_s: float
    sample: int = 0
    rows: tuple[RecordedRow, ...] = ()
    rejected: RecordedRejection | None = None
    num_call_bytes: int = 0


class PlayedAnswer(NamedTuple):
    """An answer that has just ended.

    Attributes:
        answer: without its rows.
        rows: of the episode.
    """

    answer: EvaluatedAnswer
    rows: Sequence[PlayedRow]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.input_ids) for row in self.rows)


class AnswerContent(NamedTuple):
    """An answer with what a body holds of it: tokens and calls, of each of its rows."""

    answer: EvaluatedAnswer
    tokens: list[RecordedTokens]
    calls: list[tuple[RecordedCall, ...]]


def pack_answers(played: Sequence[PlayedAnswer]) -> tuple[bytes, bytes]:
    """Head and body of a block of at least one answer."""
    told, of_calls = [], []
    for answer, rows in played:
        calls = pack_calls([row.calls for row in rows])
        numbers = tuple(numbers_of(row, 0, place) for place, row in enumerate(rows))
        told.append(replace(answer, rows=numbers, num_call_bytes=len(calls)))
        of_calls.append(calls)
    all_rows = [row for _, rows in played for row in rows]
    body = (pack_tokens(all_rows) if all_rows else b"") + b"".join(of_calls)
    return zlib.compress(msgspec.msgpack.encode(told), LEVEL), body


def unpack_answers(head: bytes) -> list[EvaluatedAnswer]:
    """The answers of a block. Raises: ValueError: it is no such head."""
    try:
        return _ANSWERS.decode(zlib.decompress(head))
    except (zlib.error, msgspec.MsgspecError) as error:
        raise ValueError(f"the head of evaluated answers cannot be read: {error}") from error


def unpack_contents(body: bytes, answers: Sequence[EvaluatedAnswer]) -> Iterator[AnswerContent]:
    """The answers of a block with what its body holds of them.

    Raises: ValueError: it is not their body.
    """
    rows = [row for answer in answers for row in answer.rows]
    tokens = iter(unpack_tokens(body, rows) if rows else [])
    at = len(body) - sum(answer.num_call_bytes for answer in answers)
    for answer in answers:
        calls = unpack_calls(body[at : at + answer.num_call_bytes], len(answer.rows))
        at += answer.num_call_bytes
        yield AnswerContent(answer, list(islice(tokens, len(answer.rows))), calls)


_ANSWERS: Final = msgspec.msgpack.Decoder(list[EvaluatedAnswer])
