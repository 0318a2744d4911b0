"""A run folder is its user's: what lies in it was put there, and can be changed, by nobody else.

Workers import what is in it, and its logs are written with the user's rights. Both are verified at
each start, since a folder may be older than the run. Permissions are taken back where they are too
wide; what belongs to somebody else, or may have been put there by somebody else, ends the start.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from areal_sc.errors import RunFolderError

_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH
_ROOT: Final = 0


def make_private(folder: Path, warn: Callable[[str], None]) -> None:
    """Verifies a folder, and what lies in it; only what others could write to is searched.

    Args:
        warn: is told what stays open to others.
    Raises: RunFolderError: it is another user's, or has something in it that is, or that may be.
        OSError: it cannot be read, or its permissions not be changed.
    """
    with TemporaryFile(dir=folder) as probe:  # a file server may know this user by another number
        user = os.fstat(probe.fileno()).st_uid
    found = folder.stat()
    if found.st_uid != user:
        raise RunFolderError(
            f"folder {folder}: it belongs to user {found.st_uid}, and you are user {user}: "
            "start as that user, give it to yourself by `chown -R`, or choose another folder"
        )
    above = folder.parent.stat().st_mode
    if above & stat.S_IWOTH and not above & stat.S_ISVTX:
        warn(f"{folder.parent}: anybody can put another folder in the place of {folder.name}")
    _verify(folder, user, warn, was_open=_take_back(folder, found, warn))


def _verify(folder: Path, user: int, warn: Callable[[str], None], *, was_open: bool) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            found, path = entry.stat(follow_symlinks=False), Path(entry.path)
            is_link = stat.S_ISLNK(found.st_mode)
            if found.st_uid not in (user, _ROOT):
                raise RunFolderError(
                    f"{path} belongs to user {found.st_uid}, and you are user {user}: somebody "
                    "else has put it there. Look at it, then delete it, or choose another folder"
                )
            if is_link and was_open:
                raise RunFolderError(
                    f"{path} is a link to {os.readlink(path)}, in a folder that other users could "
                    "write to. Look at it, then delete it, or choose another folder"
                )
            could_write = not is_link and _take_back(path, found, warn)
            if stat.S_ISDIR(found.st_mode) and (could_write or was_open):
                _verify(path, user, warn, was_open=True)


def _take_back(path: Path, found: os.stat_result, warn: Callable[[str], None]) -> bool:
    """Whether others could write to a file or folder; from now on they cannot."""
    if not found.st_mode & _BY_OTHERS:
        return False
    path.chmod(stat.S_IMODE(found.st_mode) & ~_BY_OTHERS)
    if path.stat().st_mode & _BY_OTHERS:
        warn(f"{path}: others can write to it, and its file system keeps it so")
    return True
