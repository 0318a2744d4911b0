"""Files and folders that a crash leaves with their old content, or with all of the new.

    replace_file    a file's content, written piece by piece; `write_atomic` is for one piece
    commit_folder   a folder's content; the new one may come from another file system
    append_or_undo  what a file gets at its end; `own_file` opens one
    without_pipes   a path at which nothing that is opened holds up its reader

The first two write beside the target, bring everything to the disk, and rename. A folder cannot
take the name of another one in a single step, so for a moment the former one has another name;
whoever looks for it calls `recover_folder` first. Locks on files are in `file_lock`.
What the operating system refuses becomes an error of this package by `os_errors_as`.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path, PosixPath
from typing import Any, BinaryIO

from areal_sc.errors import ArealError

_OWNER_ONLY = 0o700
_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{16}\.partial")
_MODE = 0o666  # less what the process's umask takes away


@contextmanager
def replace_file(target: Path, *, mode: int = _MODE) -> Iterator[BinaryIO]:
    """Gives a file to write to; when the block ends, `target` holds what was written, whole.

    If the block raises, or the process ends before, `target` keeps its former content.

    Args:
        mode: permissions of the file, from its first moment on.
    Raises: OSError: it cannot be written.
    """
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
    # exclusive: it is never a file, or a link, that somebody else has put there
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(fd)
        partial.replace(target)
        _sync(target.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def delete_unfinished(folder: Path) -> None:
    """Deletes what `replace_file` was writing at a kill. Nobody may write there now."""
    for path in folder.glob(".*.partial"):
        if _UNFINISHED.fullmatch(path.name):
            path.unlink(missing_ok=True)


def write_atomic(target: Path, content: bytes) -> None:
    """Replaces a file: afterwards, crash or not, it holds the old or the new content, whole.

    Raises: OSError: it cannot be written; the old content stays.
    """
    with replace_file(target) as file:
        file.write(content)


def without_pipes(path: Path) -> Path:
    """The same path. At it, and at all that are made of it, no named pipe is opened."""
    return _PathWithoutPipes(path)


class _PathWithoutPipes(PosixPath):
    def open(self, *args: Any, **kwargs: Any) -> Any:
        return open(self, *args, **kwargs, opener=_open_no_pipe)  # type: ignore[call-overload]


def _open_no_pipe(path: str, flags: int, mode: int = _MODE) -> int:
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK, mode)
    except BlockingIOError:  # no pipe: another machine has a lease of it, and gives it back
        descriptor = os.open(path, flags, mode)
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is a named pipe, not a file", path)
    return descriptor


def own_file(path: str, flags: int) -> int:
    """Opens a file, as `opener` of `open`; no link, which somebody else may have put there."""
    try:
        return _open_no_pipe(path, flags | os.O_NOFOLLOW, _MODE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            error.strerror = "it is a link, and links are not followed here"
        raise


def append_or_undo(file: FileIO, content: bytes | memoryview) -> None:
    """Appends all of the content to a file that is open for appending, or nothing.

    Raises: OSError: it cannot be written. Whatever is raised, the file ends where it did.
    """
    end, rest = os.fstat(file.fileno()).st_size, memoryview(content)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except BaseException:  # Ctrl-C, too
        with suppress(OSError):
            file.truncate(end)
        raise


def partial_of(final: Path) -> Path:
    """Where the new content of a folder is gathered, beside it."""
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
        recover_folder(final)
        if partial.parent != final.parent:
            final.parent.mkdir(parents=True, exist_ok=True)
            remove(beside)
            shutil.move(partial, beside)
        else:
            beside = partial
        sync_folder(beside)
        remove(former)
        if final.exists():
            final.rename(former)
        beside.rename(final)
        _sync(final.parent)
    except OSError:
        with suppress(OSError):
            recover_folder(final)
        for rest in (beside, partial):
            with suppress(OSError):
                remove(rest)
        raise
    for rest in (former, partial):
        with suppress(OSError):  # the next commit deletes what is left of it
            remove(rest)


def recover_folder(final: Path) -> None:
    """Gives back the content of a folder whose replacement was cut short between two renames."""
    former = _former(final)
    if former.exists() and not final.exists():
        former.rename(final)


def sync_folder(folder: Path) -> None:
    """Brings to the disk what this machine has written to a folder, at any depth."""
    for entry in [*folder.rglob("*"), folder]:
        _sync(entry)


def remove(path: Path) -> None:
    """Deletes a file, a link or a folder with all that is in it; does nothing without one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def set_aside(entries: Iterable[Path], folder: Path) -> None:
    """Moves files and folders to `folder/<n>/`, with the next n.

    Raises: OSError: one cannot be moved.
    """
    folder.mkdir(exist_ok=True, mode=_OWNER_ONLY)
    numbers = [int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal()]
    target = folder / str(max(numbers, default=0) + 1)  # the user may have deleted some
    target.mkdir(mode=_OWNER_ONLY)
    for entry in entries:
        entry.rename(target / entry.name)


def _former(final: Path) -> Path:
    return final.with_name(f".{final.name}.former")


def _sync(path: Path) -> None:
    """Makes a file's content, or the names in a folder, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def os_errors_as(kind: type[ArealError], what: str) -> Iterator[None]:
    """An OSError within is raised as `kind`; `what` says what cannot be done."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}") from error
