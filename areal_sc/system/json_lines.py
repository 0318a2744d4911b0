"""Files of one JSON object a line: appended to line by line, and read while they grow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from areal_sc.errors import RunFolderError
from areal_sc.system.durable import append_or_undo, os_errors_as, own_file

T = TypeVar("T")

UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoders raise of what is something else, or is nested too deep."""


class JsonLines:
    """Appends lines to a file, each written at once.

    A last line that an earlier process did not finish is cut off first.
    """

    def __init__(self, path: Path) -> None:
        """Raises: RunFolderError: the file cannot be opened."""
        self._path = path
        with os_errors_as(RunFolderError, f"cannot open {path}"):
            # without a buffer, nothing is left to fail when it is closed
            self._file = open(path, "ab", buffering=0, opener=own_file)  # noqa: SIM115
            _cut_unfinished_line(path)

    def append(self, *values: Any) -> None:
        """Adds one line for each value.

        Raises: RunFolderError: they cannot be written, for example because the disk is full. The
            file is as before.
        """
        lines = b"".join(to_json(value) + b"\n" for value in values)
        with os_errors_as(RunFolderError, f"cannot write {self._path}"):
            append_or_undo(self._file, lines)

    def close(self) -> None:
        self._file.close()


def read_json_lines(path: Path, line_type: type[T]) -> list[T]:
    """All lines of a file, in order; an unfinished last line is left out.

    Args:
        line_type: what a line holds, for msgspec.
    Raises: RunFolderError: the file cannot be read, or a line before the last is of another type.
    """
    with os_errors_as(RunFolderError, f"cannot read {path}"):
        lines = path.read_bytes().split(b"\n")
    decoder, found = msgspec.json.Decoder(line_type), []
    for number, line in enumerate(lines[:-1], start=1):  # after the last newline: unfinished
        try:
            found.append(decoder.decode(line))
        except UNDECODABLE as error:
            raise RunFolderError(
                f"{path}, line {number}: expected a JSON object, got {line[:200]!r}: {error}; "
                "delete the line, or move the file away"
            ) from error
    return found


def to_json(value: Any) -> bytes:
    """JSON in one line; floats that are not finite are null, NumPy's numbers are floats.

    What is no Unicode, as a file's name may be, is shown by question marks.
    """
    try:
        return msgspec.json.encode(value, enc_hook=float)
    except UnicodeEncodeError:
        return msgspec.json.encode(_as_unicode(msgspec.to_builtins(value, enc_hook=float)))


def _as_unicode(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_as_unicode(key): _as_unicode(inner) for key, inner in value.items()}
    return [_as_unicode(inner) for inner in value] if isinstance(value, list) else value


def _cut_unfinished_line(path: Path) -> None:
    """Shortens the file to its last newline."""
    if path.exists():
        with path.open("rb") as file:
            content = file.read(path.stat().st_size)
        end = content.rfind(b"\n") + 1
        if end < len(content):
            os.truncate(path, end)
