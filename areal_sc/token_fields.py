"""Fields of rows: which values each token has, and the columns that hold them in a batch."""

from __future__ import annotations

import math
import re
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

MAX_COLUMNS = 240
"""Values a token that a workflow may add: a request names each of them."""

FIELD_DTYPES: Mapping[str, int] = {"float32": 4, "int32": 4, "uint8": 1, "bool": 1}
"""The dtypes of fields that workflows add, and the bytes of a value."""

FIELD_ALIGNMENT_BYTES = 64
"""Each field of a shard takes whole cache lines: any dtype may be viewed in place."""


class TensorMetadata(Struct, frozen=True, array_like=True):
    """A field that a workflow adds to its trajectories: one tensor for each token.

    Of [T, *shape] values a batch has a column for each number in `shape`, of one value a token, as
    every other column has; a model's worker puts them together again.

    Attributes:
        shape: of a token's values; () is one number.
        dtype: one of `FIELD_DTYPES`.
        per_row: a trajectory gives one tensor of `shape`, which stands at each of its tokens.
    Raises: MetadataError: there is no such dtype, or no value in the shape.
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

    @property
    def num_values(self) -> int:
        """Numbers of a token."""
        return math.prod(self.shape)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's values."""
        return self.num_values * FIELD_DTYPES[self.dtype]

    def columns(self, name: str) -> list[str]:
        """Names of its columns, in the order of the flat values."""
        if not self.shape:
            return [name]
        shape = "x".join(map(str, self.shape))
        return [f"{name}[{shape}].{number}" for number in range(self.num_values)]


def shape_of_column(column: str) -> tuple[str, tuple[int, ...]]:
    """The name of its field, and the shape of a token's values there; () of a column alone."""
    if not (found := _COLUMN.fullmatch(column)):
        return column, ()
    return found[1], tuple(map(int, found[2].split("x")))


def number_of_column(column: str) -> int:
    """Its place among the columns of its field."""
    found = _COLUMN.fullmatch(column)
    return int(found[3]) if found else 0


_COLUMN = re.compile(r"(\w+)\[(\d+(?:x\d+)*)\]\.(\d+)")
