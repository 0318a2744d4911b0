"""What there is under a path of the script's machine, file by file, with hashes.

Of a folder with code these are the files `*.py` below it. Folders are left out whose names begin
with a dot, environments, run folders and `__pycache__`. Of other paths it is every file, but hidden
ones. A link to a file stands for that file, since model hubs keep their files so; links to folders
are not followed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from areal_sc.errors import ConfigError
from areal_sc.run.named_paths import Contents, NamedPath
from areal_sc.shipping.calls import FileFact, Listing

MAX_CODE_BYTES: Final = 64 << 20
MAX_FILES: Final = 10_000
MAX_ENTRIES: Final = 200_000
"""Looked at below one path, whatever they are."""

_NO_CODE: Final = frozenset(("__pycache__", "node_modules", "site-packages"))
_MARKS: Final = ("pyvenv.cfg", "run.json")
"""A folder with one of these files is an environment, or that of a run."""

Stamp = tuple[int, int, int]


class Trees:
    """Lists paths; each file is read once for its hash, as long as it is the same."""

    def __init__(self) -> None:
        self._digests: dict[tuple[str, Stamp], str] = {}

    def list(self, named: NamedPath) -> Listing:
        """What nodes get of it. Blocks.

        Raises: ConfigError: these are more files than a node should get. OSError.
        """
        root = Path(named.path)
        if root.is_file():
            return Listing([self._fact(root, root.name)], is_file=True)
        if not root.is_dir():
            return Listing([], is_missing=True)
        found = list(_files_below(named))
        num_bytes = sum(path.stat().st_size for path in found)
        if named.contents is Contents.code and num_bytes > MAX_CODE_BYTES:
            raise ConfigError(_too_much(named, f"{num_bytes >> 20} MiB of Python files"))
        return Listing([self._fact(path, path.relative_to(root).as_posix()) for path in found])

    def _fact(self, path: Path, name: str) -> FileFact:
        status = path.stat()
        stamp = status.st_ino, status.st_size, status.st_mtime_ns
        key = str(path), stamp
        if key not in self._digests:
            with path.open("rb") as file:
                self._digests[key] = hashlib.file_digest(file, "sha256").hexdigest()
        return FileFact(name, status.st_size, self._digests[key])


def digest_of(listing: Listing) -> str:
    """Names what is listed, by its content."""
    lines = sorted(f"{it.sha256} {it.num_bytes} {it.name}\n" for it in listing.files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _files_below(named: NamedPath) -> Iterator[Path]:
    """In no particular order. Raises: ConfigError: they are too many."""
    root, is_code = Path(named.path), named.contents is Contents.code
    num_entries = num_files = 0
    for folder, subfolders, names in os.walk(root):
        num_entries += len(names) + len(subfolders)
        if num_entries > MAX_ENTRIES:
            raise ConfigError(_too_much(named, f"more than {MAX_ENTRIES} files and folders"))
        subfolders[:] = [it for it in subfolders if not it.startswith(".")]
        if is_code:
            at = Path(folder)
            if at != root and any(mark in names for mark in _MARKS):
                subfolders.clear()
                continue
            subfolders[:] = [it for it in subfolders if it not in _NO_CODE]
            names = [name for name in names if name.endswith(".py")]
        for name in names:
            path = Path(folder, name)
            if name.startswith(".") or not path.is_file():
                continue
            num_files += 1
            if num_files > MAX_FILES:
                raise ConfigError(_too_much(named, f"more than {MAX_FILES} files"))
            yield path


def _too_much(named: NamedPath, what: str) -> str:
    advice = "name the files that are needed, one by one"
    if named.contents is Contents.code:
        advice = "put the script, and what it imports, into a folder of its own"
    return (
        f"{named.path} has {what} in it, too many to bring them to nodes that share no folder with "
        f"the script: {advice}; or take a run folder on a file system that all nodes see"
    )
