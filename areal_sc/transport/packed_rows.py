"""Rows of several fields, packed without padding: what a pull returns and an engine consumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch

from areal_sc.metadata import RowMetadata
from areal_sc.token_fields import PICTURES, FieldType


@dataclass(frozen=True)
class RowValues:
    """A field that has values of rows, not of tokens.

    Attributes:
        values: [V, *shape], one after the other.
        spans: (start, stop) of each row's among them; of what rows share the spans are the same.
        type: of the field.
    """

    values: torch.Tensor
    spans: tuple[tuple[int, int], ...]
    type: FieldType

    @classmethod
    def of_bytes(cls, each: Sequence[bytes]) -> RowValues:
        """Bytes of each row, as many as it has; equal ones are there once."""
        different = list(dict.fromkeys(each))
        stops = list(accumulate(map(len, different), initial=0))
        values = torch.frombuffer(bytearray(b"".join(different)) or bytearray(1), dtype=torch.uint8)
        spans = dict(zip(different, pairwise(stops), strict=True))
        of_rows = tuple(spans[it] for it in each)
        return cls(values[: stops[-1]], of_rows, FieldType("row", True, "uint8"))

    def take(self, rows: Sequence[int]) -> RowValues:
        """Those of the named rows, in the given order; what several share is there once."""
        starts, size = dict[tuple[int, int], int](), 0
        for span in (self.spans[row] for row in rows):
            if span not in starts:
                starts[span] = size
                size += span[1] - span[0]
        parts = [self.values[start:stop] for start, stop in starts]
        spans = [self.spans[row] for row in rows]
        return replace(
            self,
            values=torch.cat(parts) if parts else self.values[:0],
            spans=tuple((starts[it], starts[it] + it[1] - it[0]) for it in spans),
        )

    @property
    def of_rows(self) -> torch.Tensor | list[torch.Tensor]:
        """[R, *shape], where each row has one value of its own; else a view a row."""
        if self.type.per == "row" and not self.type.has_own_length:
            return self.values
        places = (self.values[start:stop] for start, stop in self.spans)
        return [its if self.type.has_own_length else its[0] for its in places]


@dataclass(frozen=True)
class PackedRows:
    """`num_rows` trajectories, one after the other.

    Attributes:
        fields: name -> [T, ...] tensor, T = sum of `lengths`; all fields share the layout.
        lengths: tokens of each row.
        advantages: of each row, as its metadata have it; or None when they are not known (yet).
        metadata: rewards, groups and episodes; None: each row stands alone, with reward 0.
        row_fields: fields that have values of rows, or of groups.
    """

    fields: dict[str, torch.Tensor]
    lengths: tuple[int, ...]
    advantages: tuple[float | tuple[float, ...], ...] | None = None
    metadata: tuple[RowMetadata, ...] | None = None
    row_fields: Mapping[str, RowValues] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in self.fields.items():
            if values.dim() < 1 or len(values) != self.num_tokens:
                raise ValueError(
                    f"field {name!r} has shape {tuple(values.shape)}, "
                    f"but the rows have {self.num_tokens} tokens"
                )
        if self.advantages is not None and len(self.advantages) != len(self.lengths):
            raise ValueError(f"{len(self.advantages)} advantages for {len(self.lengths)} rows")
        if self.metadata is not None and len(self.metadata) != len(self.lengths):
            raise ValueError(f"metadata of {len(self.metadata)} rows for {len(self.lengths)} rows")

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First token of each row."""
        return tuple(accumulate(self.lengths, initial=0))[:-1]

    def take(self, rows: Sequence[int]) -> PackedRows:
        """The named rows, in the given order."""
        starts = self.starts
        spans = [(starts[row], starts[row] + self.lengths[row]) for row in rows]
        return PackedRows(
            {
                name: torch.cat([values[a:b] for a, b in spans]) if spans else values[:0]
                for name, values in self.fields.items()
            },
            tuple(self.lengths[row] for row in rows),
            None if self.advantages is None else tuple(self.advantages[row] for row in rows),
            None if self.metadata is None else tuple(self.metadata[row] for row in rows),
            self.take_row_fields(rows),
        )

    def picture_bytes(self, rows: Sequence[int]) -> list[bytes]:
        """The field `pictures` of the named rows; none where the rows do not have it."""
        if PICTURES not in self.row_fields:
            return []
        its = self.row_fields[PICTURES]
        return [bytes(its.values[slice(*its.spans[row])].numpy()) for row in rows]

    def take_row_fields(self, rows: Sequence[int]) -> dict[str, RowValues]:
        """Those of the named rows, in the given order."""
        return {name: it.take(rows) for name, it in self.row_fields.items()}
