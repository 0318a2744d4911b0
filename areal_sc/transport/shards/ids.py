"""Names of shards: which life of a worker sealed them, and in which order.

Torch-free, because controllers read sequence numbers to tell a store what may be swept.
"""

from __future__ import annotations

from typing import Final

from areal_sc.errors import MetadataError

MAX_DIGITS: Final = 19
"""What a sequence number may have: it fits into 64 bits."""


def make_shard_id(incarnation: str, sequence: int) -> str:
    """The id of the `sequence`-th shard that an incarnation sealed."""
    return f"{incarnation}.{sequence}"


def parse_shard_id(shard_id: str) -> tuple[str, int]:
    """(incarnation, sequence number) of a shard id.

    Raises: MetadataError: it is not a shard id.
    """
    incarnation, dot, sequence = shard_id.rpartition(".")
    is_number = sequence.isascii() and sequence.isdecimal() and len(sequence) <= MAX_DIGITS
    if not dot or not is_number:
        raise MetadataError(f"a shard id has the form incarnation.sequence, got {shard_id!r}")
    return incarnation, int(sequence)
