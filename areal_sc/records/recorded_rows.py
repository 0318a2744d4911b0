"""Rows as rollout workers record them: a group a block, numbers in its head, tokens in its body.

What an episode asked of the model stands behind the tokens.

A token takes about 3.5 bytes: ids and log-probabilities (float16) are stored byte by byte, first
all the lowest bytes, so that zlib finds what is alike; what the rows of a group share, their prompt
above all, is stored once.

Answers of evaluations are recorded likewise, those of about a second in a block.

    head    what is told of each answer, compressed together
    body    the tokens of all rows, then what each episode asked of the model, answer by answer

Answers that are recorded together share what their heads have in common: an answer of 20 tokens
takes about 100 bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice, pairwise
from typing import Final, NamedTuple, Protocol

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from areal_sc.records.recorded_calls import (
    LEVEL,
    RecordedCall,
    pack_calls,
    recorded_text,
    unpack_calls,
)
from areal_sc.records.recorded_pictures import RecordedPicture

_TOKEN_BYTES: Final = 64
"""Of a token in a row that waits to be written, about."""

VersionRuns = tuple[tuple[int, int], ...]
"""(policy version, number of successive trained tokens that it sampled), in their order."""


class PlayedRow(Protocol):
    """A row of an episode; `Trajectory` is one.

    Attributes:
        input_ids, loss_mask, behavior_logprobs, versions: [T], see `Trajectory`.
    """

    input_ids: Sequence[int]
    loss_mask: Sequence[bool]
    behavior_logprobs: Sequence[float]
    versions: Sequence[int]
    reward: float
    metrics: dict[str, float]
    calls: Sequence[RecordedCall]
    returns: Sequence[tuple[float, int]]
    shaping: float
    output: str


class RecordedRow(Struct, frozen=True, omit_defaults=True):
    """What the head of a block tells of a row.

    Attributes:
        episode: number within the group, from 0.
        row: number within the episode, from 0.
        returns: of each answer, where they differ from the reward.
        shaping: a part of the reward, see `Trajectory`.
        output: what the episode wrote, as an agent does; a long one is cut.
    """

    episode: int
    row: int
    num_tokens: int
    reward: float
    versions: VersionRuns
    metrics: dict[str, float]
    returns: tuple[float, ...] = ()
    shaping: float = 0.0
    output: str = ""

    @property
    def num_trained_tokens(self) -> int:
        return sum(count for _, count in self.versions)

    @property
    def num_interruptions(self) -> int:
        """How often new weights came between two of its tokens."""
        return max(0, len(self.versions) - 1)


class RecordedRejection(Struct, frozen=True):
    """Episodes of a group that have no rows, for the same cause.

    Attributes:
        message: of the first one.
    """

    cause: str
    message: str
    num_episodes: int


class RecordedGroup(Struct, frozen=True, kw_only=True):
    """What the head of a block tells of a group.

    Attributes:
        worker: the one that played it.
        group, attempt: the numbers of the ledger.
        dataset, index: its prompt.
        prompt: the row of the dataset, as text; a long one is cut.
        admitted_version: policy version when it was admitted.
        began: Unix time in seconds.
        took_s: until its last episode had ended.
        num_call_bytes: of the body, at its end: the calls of the rows.
        left_out: rewards of the rows that are not recorded.
        pictures: of its prompt.
    """

    worker: str
    group: int
    attempt: int
    dataset: int
    index: int
    prompt: str
    admitted_version: int
    began: float
    took_s: float
    rows: tuple[RecordedRow, ...] = ()
    rejected: tuple[RecordedRejection, ...] = ()
    num_call_bytes: int = 0
    left_out: tuple[float, ...] = ()
    pictures: tuple[RecordedPicture, ...] = ()

    @property
    def mean_reward(self) -> float | None:
        """Over all rows, also those that are not recorded; None: there are none."""
        rewards = [*(row.reward for row in self.rows), *self.left_out]
        return sum(rewards) / len(rewards) if rewards else None

    @property
    def has_only_begun(self) -> bool:
        """It is recorded before it runs: what may kill its worker leaves its prompt."""
        return not self.rows and not self.rejected


@dataclass(frozen=True)
class RecordedTokens:
    """The tokens of a recorded row.

    Attributes:
        input_ids: [T] int32.
        loss_mask: [T] bool.
        behavior_logprobs: [T] float32, nats, rounded to float16; 0 where `loss_mask` is False.
        versions: [T] int32; -1 where `loss_mask` is False.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    behavior_logprobs: np.ndarray
    versions: np.ndarray


def numbers_of(row: PlayedRow, episode: int, number: int) -> RecordedRow:
    """What the head tells of a row."""
    sampled = np.asarray(row.versions)[np.asarray(row.loss_mask, bool)]
    runs = tuple((version, len([*same])) for version, same in groupby(sampled.tolist()))
    metrics = {name: float(value) for name, value in row.metrics.items()}
    returns = tuple(float(value) for value, _ in row.returns)
    size, reward, shaping = len(row.input_ids), float(row.reward), float(row.shaping)
    output = recorded_text(row.output)
    return RecordedRow(episode, number, size, reward, runs, metrics, returns, shaping, output)


def pack_tokens(rows: Sequence[PlayedRow]) -> bytes:
    """The beginning of a body."""
    ids = np.concatenate([np.asarray(row.input_ids, "<i4") for row in rows])
    mask = np.concatenate([np.asarray(row.loss_mask, bool) for row in rows])
    logprobs = np.concatenate([np.asarray(row.behavior_logprobs) for row in rows])
    with np.errstate(over="ignore"):  # what float16 cannot hold is -inf
        sampled = logprobs[mask].astype("<f2")
    content = by_byte(ids) + np.packbits(mask).tobytes() + by_byte(sampled)
    return zlib.compress(content, LEVEL)


def unpack_tokens(body: bytes, rows: Sequence[RecordedRow]) -> list[RecordedTokens]:
    """Inverse of `pack_tokens`; what stands behind that is left alone.

    Raises: ValueError: it is not the body of such rows.
    """
    try:
        content = zlib.decompress(body)
    except zlib.error as error:
        raise ValueError(f"tokens cannot be read: {error}") from error
    num_tokens = sum(row.num_tokens for row in rows)
    num_sampled = sum(row.num_trained_tokens for row in rows)
    mask_at, logprobs_at = 4 * num_tokens, 4 * num_tokens + (num_tokens + 7) // 8
    if len(content) != logprobs_at + 2 * num_sampled:
        raise ValueError(f"expected {num_tokens} tokens, got {len(content)} bytes of other ones")
    ids = from_bytes(content[:mask_at], "<i4")
    bits = np.frombuffer(content[mask_at:logprobs_at], np.uint8)
    mask = np.unpackbits(bits, count=num_tokens).astype(bool)
    if mask.sum() != num_sampled:
        raise ValueError(f"expected {num_sampled} trained tokens, got {mask.sum()}")
    logprobs = np.zeros(num_tokens, np.float32)
    logprobs[mask] = from_bytes(content[logprobs_at:], "<f2")
    versions = np.full(num_tokens, -1, np.int32)
    runs = [run for row in rows for run in row.versions]
    versions[mask] = np.repeat([run[0] for run in runs], [run[1] for run in runs])
    ends = np.cumsum([row.num_tokens for row in rows]).tolist()
    return [
        RecordedTokens(ids[begin:end], mask[begin:end], logprobs[begin:end], versions[begin:end])
        for begin, end in pairwise([0, *ends])
    ]


def pack_group(group: RecordedGroup) -> bytes:
    """The head of a block; `unpack_group` is its inverse."""
    return zlib.compress(msgspec.msgpack.encode(group), LEVEL)


def unpack_group(head: bytes) -> RecordedGroup:
    """Raises: ValueError: it is none."""
    try:
        return _GROUPS.decode(zlib.decompress(head))
    except (zlib.error, msgspec.MsgspecError) as error:
        raise ValueError(f"the head of a group cannot be read: {error}") from error


def by_byte(values: np.ndarray) -> bytes:
    """All lowest bytes, then all second ones, and so on."""
    return values.view(np.uint8).reshape(len(values), -1).T.tobytes()


def from_bytes(content: bytes, dtype: str) -> np.ndarray:
    """Inverse of `by_byte`."""
    size = np.dtype(dtype).itemsize
    return np.ascontiguousarray(np.frombuffer(content, np.uint8).reshape(size, -1).T).view(dtype)[
        :, 0
    ]


_GROUPS: Final = msgspec.msgpack.Decoder(RecordedGroup)


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
        pictures: of its prompt.
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
    pictures: tuple[RecordedPicture, ...] = ()


def tokens_like(pictures: Sequence[bytes]) -> int:
    """How many tokens take as much memory while they wait to be written."""
    return sum(map(len, pictures)) // _TOKEN_BYTES


class PlayedAnswer(NamedTuple):
    """An answer that has just ended.

    Attributes:
        answer: without its rows and pictures.
        rows: of the episode.
        pictures: of its prompt, compressed.
    """

    answer: EvaluatedAnswer
    rows: Sequence[PlayedRow]
    pictures: Sequence[bytes] = ()

    @property
    def num_tokens(self) -> int:
        return tokens_like(self.pictures) + sum(len(row.input_ids) for row in self.rows)


class AnswerContent(NamedTuple):
    """An answer with what a body holds of it: tokens and calls, of each of its rows."""

    answer: EvaluatedAnswer
    tokens: list[RecordedTokens]
    calls: list[tuple[RecordedCall, ...]]


def pack_answers(played: Sequence[PlayedAnswer]) -> tuple[bytes, bytes]:
    """Head and body of a block of at least one answer."""
    told, of_calls = [], []
    for answer, rows, _ in played:
        calls = pack_calls([row.calls for row in rows])
        numbers = tuple(numbers_of(row, 0, place) for place, row in enumerate(rows))
        told.append(replace(answer, rows=numbers, num_call_bytes=len(calls)))
        of_calls.append(calls)
    all_rows = [row for it in played for row in it.rows]
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
