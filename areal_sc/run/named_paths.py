"""Which paths of the script's machine nodes may have: those that the script has named.

    sources/<hash of the path>.path     the path, and what of it is meant

A model folder, a script's folder, a file with prompts. Nothing else leaves the machine, whatever a
node asks for.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from pathlib import Path

from msgspec import MsgspecError, Struct, json

from areal_sc.system.durable import write_atomic


class Contents(StrEnum):
    """What of a path nodes get.

    code: the Python files below it.
    all: all files below it, or the one file that it is.
    """

    code = "code"
    all = "all"


class NamedPath(Struct, frozen=True):
    """A path that the script has named; absolute."""

    path: str
    contents: Contents


def name_path(sources: Path, path: str | Path, contents: Contents) -> None:
    """From now on nodes may have it. Blocks.

    Args:
        sources: the run's folder `sources`.
    Raises: OSError: it cannot be noted.
    """
    named = NamedPath(str(Path(path).absolute()), contents)
    file = _file_of(sources, named.path)
    content = json.encode(named)
    if not file.exists() or file.read_bytes() != content:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, content)


def find_named_path(sources: Path, path: str) -> NamedPath | None:
    """None: the script has not named it."""
    try:
        named = json.decode(_file_of(sources, path).read_bytes(), type=NamedPath)
    except (OSError, MsgspecError):
        return None
    return named if named.path == path else None


def _file_of(sources: Path, path: str) -> Path:
    digest = hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()
    return sources / f"{digest[:32]}.path"
