"""Which experts the tokens of running requests went through. No torch.

A token goes through experts each time that its cache entry is computed: once, and again after new
weights. What counts are the experts with which the log-probability of the token behind it was
computed, or, in a prompt, that of the first token behind the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from areal_sc.token_fields import TensorMetadata


class SlotRoutes:
    """Routes of the rows of a `SlotTable`; arrays are [rows, places, L, k].

    Args:
        field: of a token's routes.

    Attributes:
        entries: of the cache entries, as they are now.
        kept: that count, of the first `num_kept` [rows] tokens of each row.
    """

    def __init__(self, max_rows: int, max_context_tokens: int, field: TensorMetadata) -> None:
        shape = max_rows, max_context_tokens, *field.shape
        self.entries = np.zeros(shape, dtype=field.dtype)
        self.kept = np.zeros(shape, dtype=field.dtype)
        self.num_kept = np.zeros(max_rows, dtype=np.int64)

    def move(self, sources: Sequence[int], targets: Sequence[int], longest: int) -> None:
        """Rows get other places, as their cache entries do."""
        for table in (self.entries, self.kept):
            table[targets, :longest] = table[sources, :longest]
        self.num_kept[targets] = self.num_kept[sources]

    def share(self, source: int, target: int, length: int) -> None:
        """A row gets the first cache entries of another one."""
        self.entries[target, :length] = self.entries[source, :length]

    def keep(self, row: int, length: int) -> None:
        """The token behind the first `length` ones of a row has been sampled."""
        new = slice(self.num_kept[row], length)
        self.kept[row, new] = self.entries[row, new]
        self.num_kept[row] = length

    def of(self, row: int, length: int) -> npt.NDArray[Any]:
        """[length, L, k] the row's; zeros at the last token, behind which nothing was sampled."""
        found = self.kept[row, :length].copy()
        found[self.num_kept[row] :] = 0
        return found
