"""Rows of JSON Lines, JSON and CSV files, as they are written. No torch.

Nothing is guessed: what JSON calls a text or an integer is one, of any length, and every cell of a
CSV is a text, so `007` and dates stay what they are. An empty cell is None: CSV has no other null.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, TextIO

from areal_sc.errors import WorkflowError

Row = dict[str, Any]

_EXPECTED: Final = '{"prompt": "...", "answer": "..."}'


def read_rows(path: Path, kind: str = "") -> Iterator[Row]:
    """The rows of a file, one after the other.

    Args:
        kind: an ending of READERS, if it is not that of the file.
    Raises: WorkflowError: the file is not there, or a row is none; names its line.
    """
    read = READERS[kind or path.suffix.lower()]
    try:
        # of a mark of byte order, and half of a pair in text that was cut
        with path.open(encoding="utf-8-sig", errors="surrogatepass", newline="") as file:
            yield from read(file, path)
    except FileNotFoundError:
        raise WorkflowError(f"the dataset {path} does not exist") from None
    except (OSError, UnicodeDecodeError, csv.Error, RecursionError) as error:
        raise WorkflowError(f"the dataset {path} cannot be read: {error}") from error


def _json_lines(file: TextIO, path: Path) -> Iterator[Row]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise WorkflowError(f"{path}:{number}: no JSON: {error}") from error
            yield _checked(row, f"{path}:{number}", line)


def _json(file: TextIO, path: Path) -> Iterator[Row]:
    """A list of objects; or JSON Lines, which many files of that name hold."""
    text = file.read()
    if not text.lstrip().startswith("["):
        file.seek(0)
        yield from _json_lines(file, path)
        return
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise WorkflowError(f"{path}: no JSON: {error}") from error
    for number, row in enumerate(rows):
        yield _checked(row, f"{path}: row {number}", repr(row))


def _csv(file: TextIO, path: Path) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    lines = csv.reader(file, strict=True)
    names = next(lines, [])
    if len(set(names)) < len(names):
        raise WorkflowError(f"{path}: two columns have one name: {', '.join(names)}")
    for cells in lines:
        if cells and len(cells) != len(names):
            raise WorkflowError(
                f"{path}:{lines.line_num}: expected {len(names)} cells ({', '.join(names)}), got "
                f"{len(cells)}; a cell with commas stands in quotes"
            )
        if cells:
            yield {name: cell or None for name, cell in zip(names, cells, strict=True)}


READERS: Final[Mapping[str, Callable[[TextIO, Path], Iterator[Row]]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
}
"""By the ending of a file's name."""


def _checked(row: Any, where: str, text: str) -> Row:
    if not isinstance(row, dict):
        raise WorkflowError(
            f"{where}: expected a JSON object such as {_EXPECTED}, got {text.strip()[:80]!r}"
        )
    return row


def stream_of(splits: Mapping[str, Sequence[Path]], split: str) -> Iterator[Row]:
    """The rows of a whole split, read while they are taken. Raises: the errors of `part_of`."""
    if split not in splits:
        raise WorkflowError(
            f"expected a whole split ({', '.join(splits)}), as it is to be streamed"
        )
    return chain.from_iterable(map(read_rows, splits[split]))


def part_of(splits: Mapping[str, Sequence[Path]], split: str) -> Iterator[Row]:
    """The rows of a split, or of parts: `train[:1000]`, `train[:10%]+test[-10%:]`.

    Args:
        splits: name -> files.
    Raises: WorkflowError: `split` names nothing of these; or see `read_rows`.
    """
    for part in split.split("+"):
        match = re.fullmatch(r"\s*([^\[\]]+?)\s*(?:\[(-?\d*%?):(-?\d*%?)\])?\s*", part)
        if match is None or match[1] not in splits:
            name = next(iter(splits))
            raise WorkflowError(
                f"there is no split {part.strip()!r}: expected {' or '.join(splits)}, or a part "
                f"such as {name}[:1000] or {name}[10%:]"
            )
        rows = list(stream_of(splits, match[1]))
        begin, end = (_place(text or "", len(rows)) for text in match.group(2, 3))
        yield from rows[begin:end]


def _place(text: str, num_rows: int) -> int | None:
    if text in ("", "-", "%", "-%"):
        return None
    return round(num_rows * int(text[:-1]) / 100) if text.endswith("%") else int(text)
