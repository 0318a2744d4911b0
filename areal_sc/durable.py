"""Files and folders that a crash leaves with their old content, or with all of the new.

    write_atomic    a file's content, replaced
    commit_folder   a folder's content, replaced; the new one may come from another file system

Both write beside the target, bring everything to the disk, and rename. A folder cannot take the
name of another one in a single step, so for a moment the former one has another name; whoever
looks for it calls `recover_folder` first.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path


def write_atomic(target: Path, content: bytes) -> None:
    """Replaces a file: afterwards, crash or not, it holds the old or the new content, whole.

    Raises: OSError: it cannot be written; the old content stays.
    """
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
        _sync(target.parent)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def partial_of(final: Path) -> Path:
    """Where the new content of a file or folder is gathered, beside it."""
    return final.with_name(f".{final.name}.partial")


def commit_folder(partial: Path, final: Path) -> None:
    """Gives a folder its final name once all of it is on the disk; replaces what had that name.

    If the process is killed at any moment, `final` holds its former content or the whole new one,
    at the latest after `recover_folder`.

    Args:
        partial: the new content; it is copied where `final` is on another file system.
    Raises: OSError: the former content stays; of the new one nothing does.
    """
    beside, former = partial_of(final), _former(final)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        recover_folder(final)
        if partial.parent != final.parent:
            _remove(beside)
            shutil.move(partial, beside)
        else:
            beside = partial
        for entry in [*beside.rglob("*"), beside]:
            _sync(entry)
        _remove(former)
        if final.exists():
            final.rename(former)
        beside.rename(final)
        _sync(final.parent)
    except OSError:
        with suppress(OSError):
            recover_folder(final)
        for rest in (beside, partial):
            with suppress(OSError):
                _remove(rest)
        raise
    for rest in (former, partial):
        with suppress(OSError):  # the next commit deletes what is left of it
            _remove(rest)


def recover_folder(final: Path) -> None:
    """Gives back the content of a folder whose replacement was cut short between two renames."""
    former = _former(final)
    if former.exists() and not final.exists():
        former.rename(final)


def _former(final: Path) -> Path:
    return final.with_name(f".{final.name}.former")


def _remove(path: Path) -> None:
    """Deletes a file or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Makes a file's content, or the names in a folder, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
