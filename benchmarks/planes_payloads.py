"""The payloads that all sides move; numpy alone: the peers' environment makes them too."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

GROUP_SIZE = 8
ROW_BYTES = 8192


@dataclass(frozen=True)
class Payload:
    """Shards of packed rows.

    Attributes:
        lengths: of the rows of each shard.
        shards: for each, field name -> [T] array, T = sum of its lengths.
    """

    lengths: list[list[int]]
    shards: list[dict[str, np.ndarray]]

    @property
    def num_bytes(self) -> int:
        return sum(values.nbytes for shard in self.shards for values in shard.values())


def large(num_shards: int = 9) -> Payload:
    """302 MB: shards of one row of 32 MiB."""
    return _of_float32([[8 << 20]] * num_shards)


def rows(num_rows: int = 1024) -> Payload:
    """8 MB: one shard of rows of 8 KiB."""
    return _of_float32([[ROW_BYTES // 4] * num_rows])


def jagged(num_groups: int = 64) -> Payload:
    """25 MB: groups of 8 trajectories, 13 B a token; lengths lognormal, median 3,100, sigma 0.6."""
    rng = random.Random(0)
    lengths = [
        [max(1, round(3_100 * rng.lognormvariate(0, 0.6))) for _ in range(GROUP_SIZE)]
        for _ in range(num_groups)
    ]
    return Payload(lengths, [_trajectories(sum(group)) for group in lengths])


def long(num_groups: int = 64) -> Payload:
    """302 MB: groups of 8 trajectories of 45,370 tokens, 13 B a token."""
    lengths = [[45_370] * GROUP_SIZE] * num_groups
    return Payload(lengths, [_trajectories(sum(group)) for group in lengths])


PAYLOADS = {"large": large, "long": long, "jagged": jagged, "rows": rows}


def _of_float32(lengths: list[list[int]]) -> Payload:
    shards = [
        {"values": np.arange(first, first + sum(shard), dtype=np.float32)}
        for first, shard in enumerate(lengths)
    ]
    return Payload(lengths, shards)


def _trajectories(num_tokens: int) -> dict[str, np.ndarray]:
    token_ids = np.arange(num_tokens, dtype=np.int32)
    return {
        "input_ids": token_ids,
        "loss_mask": token_ids % 3 == 0,
        "behavior_logprobs": -token_ids.astype(np.float32),
        "versions": token_ids % 7,
    }
