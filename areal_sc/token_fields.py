"""Fields of rows: which values each token, row or group has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

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

ROUTED_EXPERTS: Final = "routed_experts"
"""The field of rollout workers, with `actor.routing_replay`: the experts that each token went
through, [layers, experts of a token]."""

ADAPTER: Final = "adapter"
"""The place of the adapter that a row belongs to, with `actor.lora.places`: a field of rows, or the
same number at each token. Rows without the field belong to place 0."""
PICTURES: Final = "pictures"
"""The field of a model that reads pictures: those of a row, compressed as they came; once a group.
See `sources.pictures`."""

TEACHER_LOGPROBS: Final = "teacher_logprobs"
"""A field of a teacher: its log-probability of each token, [T] float32, nats."""
TOP_LOGPROBS, TOP_TOKENS = "teacher_top_logprobs", "teacher_top_tokens"
"""Fields of a teacher that tells its k most probable tokens at each place: [T, k] float32, nats,
and [T, k] of integers, the tokens. An update computes its model's log-probabilities of them."""

GIVEN_WEIGHTS: Final = "given_weights"
"""The field of a workflow whose rows have trained tokens that nobody has sampled: [T] float32,
the weight of each one's cross entropy; 0 at all others."""

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


def aligned(num_bytes: int) -> int:
    """What so many bytes take in a shard."""
    return -(-num_bytes // FIELD_ALIGNMENT_BYTES) * FIELD_ALIGNMENT_BYTES


class FieldType(NamedTuple):
    """How a field lies in shards.

    Attributes:
        per: `token`, `row` or `group`: what has a value of its own.
        has_own_length: a value is [n, ...], and n differs.
        type_name: of what stands at each place, see `tensor_bytes.type_named`. A token, a row or a
            group has one place; of values with their own length each has n.
    """

    per: str
    has_own_length: bool
    type_name: str


@lru_cache(maxsize=1024)  # a batch names few
def field_type(name: str) -> FieldType:
    """What metadata say of a field: `float32`, `row:float32[4]`, `group:uint8[?x3]`.

    Raises: MetadataError: nothing has values of its own in this way.
    """
    per, _, values = name.rpartition(":")
    has_own_length = "?" in values
    if per not in ("", "row", "group") or (has_own_length and not per):
        raise MetadataError(f"the type of a field cannot be {name[:60]!r}")
    stored = values.replace("[?]", "").replace("[?x", "[")
    return FieldType(per or "token", has_own_length, stored)


class FieldBytes(NamedTuple):
    """Most bytes of the fields that a workflow adds: a token, a row and a group.

    Those of a row and a group are what they take in a shard.
    """

    token: int = 0
    row: int = 0
    group: int = 0


NO_FIELDS: Final = FieldBytes()


class TensorMetadata(Struct, frozen=True, array_like=True):
    """A field that a workflow adds to its trajectories: a tensor for each token, row or group.

    Attributes:
        shape: of a value; () is one number. None in front, of rows and groups: each value is
            [n, ...], with an n of its own.
        dtype: one of `FIELD_DTYPES`.
        device: where values are stored: in the memory of nodes.
        per_row: a trajectory gives one value.
        per_group: all trajectories of a group give the same value, which is stored once.
        max_bytes: of a value whose length is its own; room is reserved for so many.
    Raises: MetadataError: there is no such dtype or device, no value in the shape, or too many.
    """

    shape: tuple[int | None, ...] = ()
    dtype: str = "float32"
    device: str = "cpu"
    per_row: bool = False
    per_group: bool = False
    max_bytes: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in FIELD_DTYPES:
            raise MetadataError(
                f"dtype of a field: expected one of {', '.join(FIELD_DTYPES)}, got {self.dtype!r}"
            )
        if self.device != "cpu":
            raise MetadataError(
                f"device of a field: expected 'cpu', the memory of a node, got {self.device!r}"
            )
        if self.per_row and self.per_group:
            raise MetadataError("place of a field: expected per_row or per_group, got both")
        if any(type(size) is not int or size < 1 for size in self.sizes):
            raise MetadataError(f"shape of a field: expected sizes >= 1, got {self.shape}")
        if self.has_own_length != (self.max_bytes > 0) or (self.has_own_length and self.per_token):
            raise MetadataError(
                "shape of a field: expected None in front of that of rows or groups with max_bytes "
                f"> 0, and of no others, got {self.shape} with max_bytes={self.max_bytes}"
            )
        is_large = max(self.sizes, default=1) > MAX_SIZE or self.value_bytes > MAX_TOKEN_BYTES
        if len(self.shape) > MAX_DIMENSIONS or is_large:
            raise MetadataError(
                f"shape of a field: expected at most {MAX_DIMENSIONS} sizes <= {MAX_SIZE}, and "
                f"values of at most {MAX_TOKEN_BYTES} bytes, got {str(self.shape)[:60]}"
            )

    @property
    def per_token(self) -> bool:
        """Whether each token has a value."""
        return not (self.per_row or self.per_group)

    @property
    def has_own_length(self) -> bool:
        """Whether each value is [n, ...], with an n of its own."""
        return self.shape[:1] == (None,)

    @property
    def sizes(self) -> tuple[Any, ...]:
        """The shape of a value, without the length that is its own."""
        return self.shape[1:] if self.has_own_length else self.shape

    @property
    def value_bytes(self) -> int:
        """Most bytes of a value."""
        return self.max_bytes or math.prod(self.sizes) * FIELD_DTYPES[self.dtype]

    @property
    def type_name(self) -> str:
        """How metadata name it: `float32`, `uint8[48x8]`, `row:float32[?x4]`; see `field_type`."""
        per = "" if self.per_token else "row:" if self.per_row else "group:"
        sizes = "x".join("?" if size is None else str(size) for size in self.shape)
        return f"{per}{self.dtype}[{sizes}]" if sizes else f"{per}{self.dtype}"

    def shape_for(self, num_tokens: int) -> tuple[int | None, ...]:
        """The shape of what a trajectory of so many tokens gives; None: any size."""
        return (num_tokens, *self.shape) if self.per_token else self.shape


Declared = Mapping[str, TensorMetadata]
"""The fields that a workflow adds, by name."""
