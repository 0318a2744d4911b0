"""What is asked of a table of rows, as the parameters of an address tell it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

METRIC: Final = "metrics."
"""Begins the name of a number that the workflow reports of a row."""

VERSION: Final = "version"
"""Rows are filtered by it, too: that of any of their tokens."""

SHOWN_CHARS: Final = 400
"""Characters of a text in a list."""
MAX_ROWS: Final = 500
"""Rows of one answer."""

_PLAIN: Final = ("text", "sort", "at", "limit", "key")


@dataclass(frozen=True)
class RowQuery:
    """Which rows are asked for.

    Attributes:
        text: in prompt or answer, in small letters or capitals; "": any.
        choices: name of a word that rows have -> the wanted one.
        ranges: name of a number -> smallest and largest value.
        sort: name of a number.
    """

    text: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    sort: str = "step"
    is_descending: bool = True

    @classmethod
    def of(
        cls,
        words: Mapping[str, str],
        numbers: Collection[str],
        choices: Collection[str],
        sort: str = "-step",
    ) -> RowQuery:
        """The query that the parameters of an address give: `reward=0..0.5`, `sort=-step`.

        Args:
            numbers, choices: names of what rows have, beside `metrics.NAME`.
            sort: where the address names none; with `-` the largest number comes first.
        Raises: ValueError: a name or a range is none.
        """
        ranges, chosen = {}, {}
        for name, text in words.items():
            if name in numbers or name == VERSION or name.startswith(METRIC):
                if text:
                    ranges[name] = _range(name, text)
            elif name in choices:
                if text:
                    chosen[name] = text
            elif name not in _PLAIN:
                known = ", ".join((*numbers, VERSION, *choices))
                raise ValueError(f"expected {known} or metrics.NAME, got {name!r}")
        sort = words.get("sort") or sort
        name = sort.removeprefix("-")
        if name not in numbers and not name.startswith(METRIC):
            raise ValueError(f"sort: expected {', '.join(numbers)} or metrics.NAME, got {name!r}")
        return cls(words.get("text", ""), chosen, ranges, name, sort.startswith("-"))


def _range(name: str, text: str) -> tuple[float, float]:
    first, dots, last = text.partition("..")
    try:
        low = float(first) if first.strip() else -math.inf
        high = (float(last) if last.strip() else math.inf) if dots else low
    except ValueError:
        low = high = math.nan
    if math.isnan(low) or math.isnan(high):
        raise ValueError(f"{name}: expected a number, or a range such as 0..0.5, got {text!r}")
    return low, high
