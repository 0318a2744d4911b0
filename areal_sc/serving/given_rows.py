"""Rows of clients, in a file of the run folder that workers read. No tinker here: they lack it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from areal_sc.serving.losses import by_token
from areal_sc.sources.prompts import row_to_wire
from areal_sc.sources.row_file import WrittenRows
from areal_sc.sources.values import to_json
from areal_sc.system.durable import own_file


class GivenRows(WrittenRows):
    """Rows by the numbers that they were given with.

    The loss of a row and its settings are one number each in the file, and one a token here.
    """

    def __len__(self) -> int:
        return sys.maxsize  # further ones come

    def given(self, number: int) -> dict[str, Any]:
        """The row as it was given."""
        return super().__getitem__(number)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return by_token(self.given(index))

    def give(self, numbers: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes rows; one whose number the file has was given by an earlier server: it stays.

        Raises: OSError: the file cannot be written.
        """
        with open(self._path, "a+b", opener=own_file) as file:
            self._look_on(file)
            file.truncate(self._end)  # a death has cut a line short
            for number, row in zip(numbers, rows, strict=True):
                if number not in self._places:
                    wire = to_json(row_to_wire(row, number, "given"))
                    file.write(b'{"index": %d, "row": %s}\n' % (number, wire))
            self._look_on(file)

    def beside(self, name: str) -> GivenRows:
        """Those of another file in the same folder."""
        return GivenRows(self._path.with_name(name))

    def delete(self) -> None:
        """Nobody reads it any more."""
        self._path.unlink(missing_ok=True)
