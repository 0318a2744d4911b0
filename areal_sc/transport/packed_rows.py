"""Rows of several fields, packed without padding: what a pull returns and an engine consumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from areal_sc.metadata import RowMetadata


@dataclass(frozen=True)
class PackedRows:
    """`num_rows` trajectories, one after the other.

    Attributes:
        fields: name -> [T, ...] tensor, T = sum of `lengths`; all fields share the layout.
        lengths: tokens of each row.
        advantages: of each row, as its metadata have it; or None when they are not known (yet).
        metadata: rewards, groups and episodes; None: each row stands alone, with reward 0.
    """

    fields: dict[str, torch.Tensor]
    lengths: tuple[int, ...]
    advantages: tuple[float | tuple[float, ...], ...] | None = None
    metadata: tuple[RowMetadata, ...] | None = None

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

    @property
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
        )
