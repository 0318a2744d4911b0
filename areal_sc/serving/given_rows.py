"""Rows of clients, in a file of the run folder that workers read. No tinker here: they lack it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_sc.sources.prompts import row_to_wire
from areal_sc.sources.row_file import WrittenRows
from areal_sc.sources.values import to_json
from areal_sc.system.durable import own_file


class GivenRows(WrittenRows):
    """Rows by their numbers, from 0 on, in the order in which they were given.

    Args: path: of a file in the run's folder of sources.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._num_given = 0

    def __len__(self) -> int:
        return sys.maxsize  # further ones come

    def give(self, rows: Sequence[Mapping[str, Any]]) -> range:
        """Their numbers. A row whose number the file has was given by an earlier server: it stays.

        Raises: OSError: the file cannot be written.
        """
        numbers = range(self._num_given, self._num_given + len(rows))
        with open(self._path, "a+b", opener=own_file) as file:
            self._look_on(file)
            file.truncate(self._end)  # a death has cut a line short
            for number, row in zip(numbers, rows, strict=True):
                if number not in self._places:
                    wire = to_json(row_to_wire(row, number, "given"))
                    file.write(b'{"index": %d, "row": %s}\n' % (number, wire))
            self._look_on(file)
        self._num_given = numbers.stop
        return numbers
