"""What the page keeps outside the folders of runs: rows that it has read."""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_UNUSED_S: Final = 30 * 86400.0
"""Rows of a run at which nobody has looked for so long are deleted here."""


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


def _name_of(run: Path) -> str:
    return hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:24]
