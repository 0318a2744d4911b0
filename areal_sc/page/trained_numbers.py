"""What train ranks have recorded of the tokens of rows, found by the names of the rows."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from areal_sc.page.followed_blocks import FollowedBlocks
from areal_sc.records.blocks import read_block
from areal_sc.records.record_files import Series
from areal_sc.records.trained_rows import unpack_trained, unpack_trained_tokens


class TrainedNumbers:
    """Follows the files of trained rows.

    Args:
        folder: `records/` of a run.
    """

    def __init__(self, folder: Path) -> None:
        self._blocks = FollowedBlocks(folder, (Series.trained,))
        self._lock = Lock()
        self._places: dict[tuple[int, int, int, int], tuple[float, Path, int, int]] = {}

    @property
    def damage(self) -> list[str]:
        """What could not be read, or is gone, in sentences."""
        with self._lock:
            return self._blocks.damage

    def of_row(
        self, name: tuple[int, int, int, int], mask: np.ndarray, told: slice, began: float
    ) -> dict[str, Any] | None:
        """The newest numbers of a row.

        Args:
            name: group, attempt, episode, row.
            mask: [T] bool, the row's trained tokens.
            told: of the T tokens, those that are asked for.
            began: Unix time in seconds, of the group. Older numbers are of another group that had
                its number, before its journal was lost.
        Returns: `step` and `minibatch`, and with one value a token `gaps`, `entropies` and
            `advantages`; None where the trainer has none. None: they are not recorded, are damaged,
            gone, or older than the group.
        """
        with self._lock:
            self._follow()
            at, path, begin, end = self._places.get(name, (-math.inf, Path(), 0, 0))
        if at < began:
            return None
        with suppress(OSError, ValueError):
            head, body = read_block(path, begin, end)
            row, tokens = unpack_trained(head), unpack_trained_tokens(body)
            numbers = {of: _spread(its, mask)[told] for of, its in tokens._asdict().items()}
            return {"step": row.step, "minibatch": row.minibatch, **numbers}
        return None

    def _follow(self) -> None:
        if self._blocks.begins_again():
            self._places.clear()
        for file, _, found in self._blocks.read_new():
            try:
                row = unpack_trained(found.head)
            except ValueError as error:
                self._blocks.note_bad(file, str(error))
                continue
            name = row.group, row.attempt, row.episode, row.row
            place = row.at, file.path, found.begin, found.end
            self._places[name] = max(place, self._places.get(name, place))


def _spread(values: np.ndarray, mask: np.ndarray) -> list[float | None]:
    """[T] of numbers of the trained tokens.

    Raises: ValueError: there are other ones.
    """
    spread = np.full(len(mask), np.nan)
    spread[mask] = values
    return [round(it, 6) if math.isfinite(it) else None for it in spread.tolist()]
