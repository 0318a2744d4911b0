"""What a person at a shell wants of a run that goes on: that it pauses, or has other workers.

    pause, resume, scale ──► .pause, .scale in the run folder ──► the script looks, and acts
                                                   status.json ◄── what it has heard

A pause holds as long as its file is there, for later starts of the script, too. A wish for workers
is deleted once it is answered. The files are private, and only those of the folder's owner count.
"""

from __future__ import annotations

import getpass
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from areal_sc.errors import RunFolderError
from areal_sc.run.run_files import RunFiles
from areal_sc.system.durable import own_file, replace_file
from areal_sc.system.json_lines import UNDECODABLE, to_json
from areal_sc.system.os_errors import os_errors_as

W = TypeVar("W", bound=msgspec.Struct)
_MODE = 0o600


class PauseWish(msgspec.Struct, frozen=True):
    """The run shall stand still.

    Attributes:
        since: Unix time.
        by: user and machine.
    """

    since: float
    by: str

    @classmethod
    def of_now(cls) -> PauseWish:
        """A wish of this process's user."""
        return cls(time.time(), _user())


class ScaleWish(msgspec.Struct, frozen=True):
    """The run shall have so many rollout workers.

    Attributes:
        id: tells it from others.
        by: user and machine.
    """

    num_workers: int
    id: str
    by: str

    @classmethod
    def of_now(cls, num_workers: int) -> ScaleWish:
        """A wish of this process's user."""
        return cls(num_workers, secrets.token_hex(8), _user())


class RunWishes(msgspec.Struct, frozen=True):
    """All that is wished now. None: nothing is."""

    pause: PauseWish | None = None
    scale: ScaleWish | None = None

    def renewed(self, files: RunFiles, warn: Callable[[str], None]) -> RunWishes:
        """What is wished now.

        Args:
            warn: is told of a file that cannot be used; what it said before still counts.
        """

        def read(path: Path, before: W | None, kind: type[W]) -> W | None:
            try:
                return _read(path, kind)
            except RunFolderError as error:
                warn(str(error))
                return before

        return RunWishes(
            read(files.pause_path, self.pause, PauseWish),
            read(files.scale_path, self.scale, ScaleWish),
        )


def write_wish(path: Path, wish: PauseWish | ScaleWish) -> None:
    """Replaces a wish. Raises: RunFolderError: it cannot be written."""
    cannot = os_errors_as(RunFolderError, f"cannot write {path}")
    with cannot, replace_file(path, mode=_MODE) as file:
        file.write(to_json(wish))


def take_back(path: Path) -> bool:
    """Whether there was a wish to delete. Raises: RunFolderError: it cannot be deleted."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise RunFolderError(f"cannot delete {path}: {error.strerror}") from error
    return True


def drop_scale(files: RunFiles, wish: ScaleWish) -> None:
    """Deletes a wish for workers, unless another one has taken its place, or does so just now."""
    path = files.scale_path
    aside = path.with_name(f"{path.name}.dropped")
    with suppress(OSError, RunFolderError):
        if _read(path, ScaleWish) != wish:
            return
        path.rename(aside)  # another one may have taken its place just now
        found = None
        with suppress(RunFolderError):
            found = _read(aside, ScaleWish)
        if found != wish:
            with suppress(FileExistsError):  # else it counts again, unless there is a newer one
                os.link(aside, path)
        aside.unlink()


def told_pause(wish: PauseWish, run_dir: Path) -> str:
    """What people read of a pause."""
    return f"paused by {_origin(wish)}; `python -m areal_sc resume {run_dir}` lets the run go on"


def told_pause_end(wish: PauseWish) -> str:
    """What people read when a pause is over."""
    return f"the pause by {_origin(wish)} is over: the run goes on"


def _origin(wish: PauseWish) -> str:
    return f"{wish.by} at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(wish.since))}"


def _read(path: Path, kind: type[W]) -> W | None:
    try:
        with open(path, "rb", opener=own_file) as file:
            found = os.fstat(file.fileno())
            content = file.read()
        owner = path.parent.stat().st_uid  # a file server may know this user by another number
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror}") from error
    if found.st_uid != owner or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RunFolderError(
            f"{path} is left alone: expected a file of user {owner} that nobody else can write "
            f"to, got one of user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}"
        )
    try:
        return msgspec.json.decode(content, type=kind)
    except UNDECODABLE as error:
        raise RunFolderError(f"{path} is damaged: {error}") from error


def _user() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in containers
        name = f"user {os.getuid()}"
    return f"{name} on {socket.gethostname()}"
