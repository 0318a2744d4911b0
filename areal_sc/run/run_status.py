"""What a run says of itself in `status.json` of its folder, and what people at a shell want of it.

The script writes the file every few seconds (`StatusBoard`), and `python -m areal_sc status` reads
it. Nothing else depends on it. All times are Unix times of the script's machine.

A person may want that it pauses, or has other workers.

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
from typing import Final, TypeVar

import msgspec

from areal_sc.errors import RunFolderError
from areal_sc.run.run_files import RunFiles
from areal_sc.system.durable import os_errors_as, own_file, replace_file
from areal_sc.system.json_lines import UNDECODABLE, to_json

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


FORMAT: Final = 1
SCRIPT: Final = "the script"
"""Name of whoever waits, where that is the script's own call."""
PAUSE_END: Final = "the end of the run's pause"
"""What is waited for by a call that a pause holds."""


class Phase(msgspec.Struct):
    """A part of the run that goes on.

    Attributes:
        total: units to do; None where it is not known.
    """

    name: str
    since: float
    done: int = 0
    total: int | None = None
    unit: str = ""


class Wait(msgspec.Struct):
    """Somebody waits.

    Attributes:
        what: in words that follow "waits for".
    """

    who: str
    what: str
    since: float


class AgentStatus(msgspec.Struct):
    """The agent of a node; `heard` is its last sign of life."""

    host: str
    incarnation: str
    heard: float


class WorkerStatus(msgspec.Struct):
    """A worker.

    Attributes:
        state: `starting`, `ready`, `suspect` (it is silent), `restarting`, `leaving` or `given up`.
        heard: its last sign of life.
        restarts: since the controllers were started.
        held_bytes: in its tensor store, when it was asked last; None: it was not asked yet.
        store_bytes: limit of the store; 0: there is none.
        node_bytes: what all stores on its node may hold; 0: not known.
    """

    name: str
    state: str
    pid: int
    host: str
    incarnation: str
    heard: float
    restarts: int
    held_bytes: int | None = None
    store_bytes: int = 0
    node_bytes: int = 0


class Restart(msgspec.Struct):
    """Workers that were lost, and are started again.

    Attributes:
        cause: of the loss, in one line.
        ended: when they did their work again; None: they do not yet.
    """

    unit: str
    cause: str
    began: float
    ended: float | None = None


class RoleStatus(msgspec.Struct):
    """What a controller knows.

    Attributes:
        looked: when it said so.
        total_steps: of the run; None: it does not say.
        lineage: of the weights; None: it trains none.
        num_open, num_finished: groups that are queued or run; that gave rows. None: it has none.
        num_running: groups that run. None: it has none.
        is_held: the script waits in a call of this controller for the end of a pause.
        agents_url: where agents outside find the run; "": nowhere.
        waits_outside: its episodes wait for agents outside, as long as these take.
    """

    looked: float
    version: int
    total_steps: int | None = None
    lineage: int | None = None
    num_open: int | None = None
    num_finished: int | None = None
    num_running: int | None = None
    is_held: bool = False
    agents_url: str = ""
    waits_outside: bool = False
    waits: list[Wait] = []
    agents: list[AgentStatus] = []
    workers: list[WorkerStatus] = []
    restart: Restart | None = None


class TenantStatus(msgspec.Struct):
    """Whoever has a key of a run that serves clients.

    Attributes:
        num_models, num_resting: that go on; of these, those that have no place among the trained.
        num_waiting, num_answered: requests; the answered ones since the server was started.
        busy_s: time of the ranks that its requests took since then.
    """

    name: str
    num_models: int
    num_resting: int
    num_waiting: int
    num_answered: int
    busy_s: float


class ScaleAnswer(msgspec.Struct):
    """What has become of a `ScaleWish`.

    Attributes:
        refusal: why it was refused; "": it was not.
    """

    id: str
    num_workers: int
    refusal: str = ""


class HeardWishes(msgspec.Struct):
    """What the script has heard of `pause`, `resume` and `scale`.

    Attributes:
        pause: None: the run shall go on.
        scale: the newest answer.
    """

    pause: PauseWish | None = None
    scale: ScaleAnswer | None = None


class RunEnd(msgspec.Struct):
    """How the script ended.

    Attributes:
        cause: of an error, its first line.
    """

    at: float
    exit_code: int
    cause: str = ""


class RunStatus(msgspec.Struct):
    """The file.

    Attributes:
        machine: see `machine_id`; process ids mean something there only.
        written: when the file was.
        every_s: it is written at least so often.
        progressed: when a step, a phase or a group last ended, or a phase began.
        longest_quiet_s: the longest time that such progress has taken in the present phase.
        orphan_timeout_s: so long workers outlive the script.
        phases: the innermost last.
        roles: by name of the controller.
        tenants: of a run that serves clients.
    """

    host: str
    machine: str
    pid: int
    began: float
    orphan_timeout_s: float
    written: float
    progressed: float
    every_s: float = 2.0
    longest_quiet_s: float = 0.0
    term: int = 0
    phases: list[Phase] = []
    roles: dict[str, RoleStatus] = {}
    tenants: list[TenantStatus] = []
    wishes: HeardWishes = msgspec.field(default_factory=HeardWishes)
    end: RunEnd | None = None
    format: int = FORMAT


def read_status(path: Path) -> RunStatus | None:
    """What the file says; None without one.

    Raises: RunFolderError: it cannot be read, is damaged, or of another areal_sc.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror}") from error
    try:
        status = msgspec.json.decode(content, type=RunStatus)
    except UNDECODABLE as error:
        raise RunFolderError(f"{path} is damaged: {error}") from error
    if status.format != FORMAT:
        raise RunFolderError(
            f"{path}: expected format {FORMAT}, got {status.format}: another version of areal_sc "
            "writes it; look with that one"
        )
    return status
