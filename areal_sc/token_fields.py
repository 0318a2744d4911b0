"""Fields of rows: which values each token has."""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct

from areal_sc.errors import MetadataError

TRAJECTORY_FIELDS: Mapping[str, str] = {
    "input_ids": "int32",
    "loss_mask": "bool",
    "behavior_logprobs": "float32",
    "versions": "int32",
    "temperatures": "float32",
}
"""The fields, and their dtypes, of a generated trajectory; each has one value a token."""

MADE_FIELDS = ("proximal_logprobs", "staleness")
"""Further fields that a trainer makes, by these names."""

TOP_LOGPROBS, TOP_TOKENS = "teacher_top_logprobs", "teacher_top_tokens"
"""Fields of a teacher that tells its k most probable tokens at each place: [T, k] float32, nats,
and [T, k] of integers, the tokens. An update computes its model's log-probabilities of them."""

FIELD_DTYPES: Mapping[str, int] = {
    **{"float32": 4, "float64": 8, "bool": 1, "uint8": 1},
    **{"int8": 1, "int16": 2, "int32": 4, "int64": 8},
}
"""The dtypes of fields that workflows add, and the bytes of a value."""

MAX_DIMENSIONS = 8
MAX_SIZE = 10**9 - 1
MAX_TOKEN_BYTES = 1 << 40
"""What a field has at each place: so many sizes, each up to this one, and no more bytes."""

FIELD_ALIGNMENT_BYTES = 64
"""Each field of a shard takes whole cache lines: any dtype may be viewed in place."""


class TensorMetadata(Struct, frozen=True, array_like=True):
    """A field that a workflow adds to its trajectories: one tensor for each token.

    Attributes:
        shape: of a token's values; () is one number.
        dtype: one of `FIELD_DTYPES`.
        per_row: a trajectory gives one tensor of `shape`, which stands at each of its tokens.
    Raises: MetadataError: there is no such dtype, no value in the shape, or too many.
    """

    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    per_row: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in FIELD_DTYPES:
            raise MetadataError(
                f"dtype of a field: expected one of {', '.join(FIELD_DTYPES)}, got {self.dtype!r}"
            )
        if any(type(size) is not int or size < 1 for size in self.shape):
            raise MetadataError(f"shape of a field: expected sizes >= 1, got {self.shape}")
        if len(self.shape) > MAX_DIMENSIONS or max(self.shape, default=1) > MAX_SIZE:
            raise MetadataError(
                f"shape of a field: expected at most {MAX_DIMENSIONS} sizes <= {MAX_SIZE}, got "
                f"{str(self.shape)[:60]}"
            )
        if self.token_bytes > MAX_TOKEN_BYTES:
            raise MetadataError(
                f"shape of a field: expected at most {MAX_TOKEN_BYTES} bytes a token, got "
                f"{self.token_bytes}"
            )

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's values."""
        return math.prod(self.shape) * FIELD_DTYPES[self.dtype]

    @property
    def type_name(self) -> str:
        """How metadata name the type of a token's values: `float32`, `uint8[48x8]`."""
        return f"{self.dtype}[{'x'.join(map(str, self.shape))}]" if self.shape else self.dtype
