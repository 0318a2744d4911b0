"""Which part of each parameter a rank of this engine has.

    whole tensor ── tensor parallelism ──► a range along one dimension, or all of it (a copy)
                 ── FSDP ────────────────► some rows of that

Ranks are numbered so that those of one tensor group follow each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from areal_sc.engines.training.parts import Box, Parts


@dataclass(frozen=True)
class Cut:
    """What tensor parallelism makes of a parameter.

    Attributes:
        shape: of the whole parameter.
        boxes: of each rank of a tensor group; several may have the same one.
        has_partial_gradients: ranks that have the same box see different parts of its gradient,
            which are to be added up. Otherwise each sees all of it.
    """

    shape: torch.Size
    boxes: tuple[Box, ...]
    has_partial_gradients: bool = False

    @classmethod
    def copies(cls, shape: torch.Size, count: int, *, has_partial_gradients: bool = False) -> Cut:
        """Every rank has all of it."""
        return cls(shape, (Box.whole(shape),) * count, has_partial_gradients)


class CutParts(Parts):
    """Parameters that are cut by tensor parallelism, and then spread by rows.

    Args:
        cuts: parameter -> what tensor parallelism makes of it; of tied ones under all names.
        rank: this one.
        num_rows_ranks: ranks over which FSDP spreads rows.
    """

    def __init__(self, cuts: Mapping[str, Cut], rank: int = 0, num_rows_ranks: int = 1) -> None:
        self.cuts = cuts
        self._num_rows_ranks = num_rows_ranks
        self._num_tensor_ranks = len(next(iter(cuts.values())).boxes) if cuts else 1
        shapes = {name: cut.shape for name, cut in cuts.items()}
        super().__init__(shapes, rank, num_rows_ranks * self._num_tensor_ranks)
        self.are_row_ranges = self._num_tensor_ranks == 1

    @classmethod
    def of_one_rank(cls, causal_lm: Any) -> CutParts:
        """Every parameter is whole."""
        named = causal_lm.named_parameters(remove_duplicate=False)
        return cls({name: Cut.copies(p.shape, 1) for name, p in named})

    def box(self, name: str, rank: int | None = None) -> Box:
        rows_rank, tensor_rank = divmod(self.rank if rank is None else rank, self._num_tensor_ranks)
        box = self.cuts[name].boxes[tensor_rank]
        if not box.sizes:
            return box
        share = -(-box.sizes[0] // self._num_rows_ranks)
        first = min(box.sizes[0], rows_rank * share)
        return box.narrowed(0, first, min(share, box.sizes[0] - first))

    def is_first(self, name: str, rank: int | None = None) -> bool:
        """Whether no rank of a lower number in its tensor group has the same box."""
        tensor_rank = (self.rank if rank is None else rank) % self._num_tensor_ranks
        boxes = self.cuts[name].boxes
        return boxes.index(boxes[tensor_rank]) == tensor_rank

    def given_by(self, name: str, rank: int) -> Box | None:
        box = self.box(name, rank)
        return box if box.numel and self.is_first(name, rank) else None
