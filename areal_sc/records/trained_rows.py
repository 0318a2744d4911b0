"""What train ranks record of the rows that they train: three numbers a token, a block a row.

The body of a block holds float16: first all gaps, then all entropies, then all advantages, of
trained tokens alone. The gap to the sampler is recorded, not the trainer's log-probability, as
float16 tells small numbers finely.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from areal_sc.records.recorded_calls import LEVEL
from areal_sc.records.recorded_rows import by_byte, from_bytes


class TrainedRow(Struct, frozen=True, kw_only=True):
    """A row that was trained; what the head of its block tells.

    Attributes:
        worker: the rank.
        group, attempt, episode, row: name it, as in the other records.
        step: the one that trained it, by its number in `metrics.jsonl`.
        minibatch: number within its update, from 0; a step may have several updates.
        at: Unix time in seconds. Of a step that was made again, the later record counts.
    """

    worker: str
    group: int
    attempt: int
    episode: int
    row: int
    step: int
    minibatch: int
    at: float


class TrainedTokens(NamedTuple):
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


def pack_trained(row: TrainedRow, tokens: TrainedTokens) -> tuple[bytes, bytes]:
    """Head and body of a block; `unpack_trained` and `unpack_trained_tokens` read them."""
    with np.errstate(over="ignore"):  # what float16 cannot hold is infinite
        values = np.concatenate(tokens).astype("<f2")
    return msgspec.msgpack.encode(row), zlib.compress(by_byte(values), LEVEL)


def unpack_trained(head: bytes) -> TrainedRow:
    """Raises: ValueError: it is none."""
    try:
        return msgspec.msgpack.decode(head, type=TrainedRow)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the head of a trained row cannot be read: {error}") from error


def unpack_trained_tokens(body: bytes) -> TrainedTokens:
    """Raises: ValueError: it is not the body of a trained row."""
    try:
        values = from_bytes(zlib.decompress(body), "<f2").astype(np.float32)
        return TrainedTokens(*values.reshape(len(TrainedTokens._fields), -1))
    except (zlib.error, ValueError) as error:
        raise ValueError(f"numbers of trained tokens cannot be read: {error}") from error
