"""Whether files have changed, without reading them."""

from __future__ import annotations

from pathlib import Path

Stamp = list[tuple[str, int, int]]
"""Name, size and time of change, in nanoseconds, of each file that is there."""


def stamp_of(*paths: Path) -> Stamp:
    """The stamp of some files; a folder stands for what is in it."""
    found = []
    for path in paths:
        try:
            for file in sorted(path.iterdir()) if path.is_dir() else (path,):
                stat = file.stat()
                found.append((file.name, stat.st_size, stat.st_mtime_ns))
        except OSError:  # it is gone, or may not be read: as if it were not there
            continue
    return found
