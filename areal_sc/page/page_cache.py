"""What the page keeps outside the folders of runs: rows that it has read, and marks of readers."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Final

import msgspec

from areal_sc.errors import RunFolderError
from areal_sc.page.row_search import RowName
from areal_sc.system.durable import write_atomic
from areal_sc.system.json_lines import UNDECODABLE

_UNUSED_S: Final = 30 * 86400.0
"""Rows of a run at which nobody has looked for so long are deleted here."""
MAX_MARKS: Final = 5000


def cache_folder() -> Path:
    """`areal_sc/page` in the user's folder for what can be made anew."""
    told = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(told) if told.startswith("/") else Path.home() / ".cache"
    return base / "areal_sc" / "page"


def database_of(cache: Path, run: Path) -> Path:
    """Where the rows of a run are kept; those at which nobody looks any more go."""
    now = time.time()
    for path in cache.glob("*.sqlite"):
        with suppress(OSError):  # another page has deleted it
            if now - path.stat().st_mtime > _UNUSED_S:
                path.unlink()
    path = cache / f"{_name_of(run)}.sqlite"
    if path.exists():
        os.utime(path)
    return path


class Bookmarks:
    """Rows of a run that the reader has marked, and what for."""

    def __init__(self, cache: Path, run: Path) -> None:
        self._path = cache / f"{_name_of(run)}.marks.json"
        self._writing = Lock()

    def read(self) -> dict[RowName, str]:
        """Name of a row -> a note; "" for none. What is damaged is left out.

        Raises: RunFolderError: the file cannot be read.
        """
        try:
            told = msgspec.json.decode(self._path.read_bytes(), type=list[tuple[RowName, str]])
        except (FileNotFoundError, *UNDECODABLE):
            return {}
        except OSError as error:
            raise RunFolderError(f"{self._path} cannot be read: {error.strerror}") from error
        return dict(told)

    def change(self, names: Iterable[RowName], note: str | None) -> dict[RowName, str]:
        """Marks rows with a note, or, with None, no longer; returns all marks.

        Raises: ValueError: there are too many. RunFolderError: they cannot be read or written.
        """
        with self._writing:
            marks = self.read()
            for name in names:
                marks.pop(name, None)
                if note is not None:
                    marks[name] = note
            if len(marks) > MAX_MARKS:
                raise ValueError(f"expected at most {MAX_MARKS} marked rows of a run")
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_atomic(self._path, msgspec.json.encode(list(marks.items())))
            except OSError as error:
                raise RunFolderError(f"{self._path} cannot be written: {error}") from error
            return marks


def _name_of(run: Path) -> str:
    return hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:24]
