"""What train ranks record of the rows that they train: three numbers a token.

A block is rows of one group in one minibatch. Its body holds float16: first all gaps, then all
entropies, then all advantages, of trained tokens alone. The gap to the sampler is recorded, not the
trainer's log-probability, as float16 tells small numbers finely.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct

from areal_sc.records.recorded_rows import LEVEL, by_byte, from_bytes

_NAMES: Final = ("gaps", "entropies", "advantages")


class TrainedRow(Struct, frozen=True):
    """What the head of a block tells of a row.

    Attributes:
        episode, row: as of `RecordedRow`.
        num_tokens: that were trained.
    """

    episode: int
    row: int
    num_tokens: int


class TrainedGroup(Struct, frozen=True, kw_only=True):
    """What the head of a block tells.

    Attributes:
        step: that trained the rows, as in `metrics.jsonl`.
        minibatch: number within the step, from 0.
        at: Unix time in seconds. Of a step that was made again, the later record counts.
    """

    group: int
    attempt: int
    step: int
    minibatch: int
    rows: tuple[TrainedRow, ...]
    at: float


@dataclass(frozen=True)
class TrainedTokens:
    """Numbers of the trained tokens of a row, [N] float32, NaN where the trainer has none.

    Attributes:
        gaps: nats, log-probability of the proximal policy less that of the sampler. Without a
            proximal policy it is that of the policy that made the update.
        entropies: nats, of the distribution that the update saw.
        advantages: of each token.
    """

    gaps: np.ndarray
    entropies: np.ndarray
    advantages: np.ndarray


@dataclass(frozen=True)
class TrainedRows:
    """Rows of a group that an update has trained; arguments of `TrainedGroup` and `TrainedRow`.

    Attributes:
        rows: (episode, row) -> its tokens.
    """

    group: int
    attempt: int
    step: int
    minibatch: int
    rows: dict[tuple[int, int], TrainedTokens]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.gaps) for row in self.rows.values())

    def packed(self) -> tuple[bytes, bytes]:
        """Head and body of a block; `unpack_trained` and `unpack_trained_tokens` read them."""
        rows = tuple(TrainedRow(*name, len(it.gaps)) for name, it in self.rows.items())
        head = TrainedGroup(
            group=self.group,
            attempt=self.attempt,
            step=self.step,
            minibatch=self.minibatch,
            rows=rows,
            at=time.time(),
        )
        columns = [[getattr(it, name) for it in self.rows.values()] for name in _NAMES]
        with np.errstate(over="ignore"):  # what float16 cannot hold is infinite
            values = np.concatenate([it.astype("<f2") for its in columns for it in its])
        return msgspec.msgpack.encode(head), zlib.compress(by_byte(values), LEVEL)


def unpack_trained(head: bytes) -> TrainedGroup:
    """Raises: ValueError: it is none."""
    try:
        return msgspec.msgpack.decode(head, type=TrainedGroup)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the head of trained rows cannot be read: {error}") from error


def unpack_trained_tokens(body: bytes, rows: Sequence[TrainedRow]) -> list[TrainedTokens]:
    """The tokens of each row.

    Raises: ValueError: it is not the body of such rows.
    """
    num_tokens = sum(row.num_tokens for row in rows)
    try:
        values = from_bytes(zlib.decompress(body), "<f2").astype(np.float32)
        columns = values.reshape(len(_NAMES), num_tokens)
    except (zlib.error, ValueError) as error:
        raise ValueError(f"numbers of trained tokens cannot be read: {error}") from error
    ends = np.cumsum([row.num_tokens for row in rows])
    parts = [np.split(column, ends[:-1]) for column in columns]
    return [TrainedTokens(*its) for its in zip(*parts, strict=True)]
