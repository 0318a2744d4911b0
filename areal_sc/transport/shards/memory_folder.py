"""Where the shared memory of a run lies on a node, who lives in it, and who deletes it. No torch.

    <root>/areal-sc-<uid>-<node>/     the root is /dev/shm where that is large enough
        <run id>/
            lock                      shared by every process of the run
            node                      a random token: who reads the same one shares the memory
            <worker>.<incarnation>/   an arena
                lock                  exclusively the living writer's (or its successor's)
                readers               byte n is locked as long as a puller reads shard n
                block-<n>             holds a shard, and later another one
                <sequence>            ticket of a sealed shard: a link to its block

Locks are the kernel's (`flock`), so they end with their process, however that ends. A run folder
whose lock is free belongs to nobody: a later run deletes it. All is open to its owner alone. The
node is in the name because the root may be on a file system that other nodes mount, too.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from areal_sc.config.transport_settings import AUTO, MIN_ROOM_BYTES
from areal_sc.errors import ConfigError, TransportError
from areal_sc.ids import random_id
from areal_sc.system.file_lock import HeldLock, take_lock
from areal_sc.system.mounts import network_file_system
from areal_sc.transport.shards.arena import Arena, delete_folder

OFF: Final = "off"
"""`transport.shared_memory` that keeps tensors out of it."""

SHARED_MEMORY: Final = Path("/dev/shm")
LOCK_WAIT_S: Final = 30.0
"""Time that a run waits for whoever cleans up the folder that it wants to use."""

_LOCK: Final = "lock"
_NODE: Final = "node"
_DELETED: Final = ".deleted-"
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OWNER_ONLY_FOLDER: Final = 0o700

logger = logging.getLogger(__name__)


def memory_root(
    wanted: str,
    run_dir: Path,
    node_folder: Path,
    *,
    needed_bytes: int = MIN_ROOM_BYTES,
    shared_memory: Path = SHARED_MEMORY,
) -> Path:
    """The folder that arenas are made under; says so where it is not the machine's memory.

    Args:
        wanted: `transport.shared_memory`: `auto`, `off` or a folder.
        run_dir: a folder in it is used instead of `shared_memory` where that has no room.
        node_folder: of this user on this node, used instead of `run_dir` where that is on a
            network file system, which no memory is kept on.
        needed_bytes: what the stores of this node may hold together.
    Raises: ConfigError: all of these are on network file systems.
    """
    if wanted == OFF:
        wanted, needed_bytes = AUTO, 0
    if wanted != AUTO:
        return _of_this_node(Path(wanted).expanduser().absolute(), "transport.shared_memory")
    try:
        space = os.statvfs(shared_memory)
    except OSError as error:
        why = f"{shared_memory} cannot be used ({error.strerror})"
    else:
        free_bytes = space.f_bavail * space.f_frsize
        if free_bytes >= needed_bytes and os.access(shared_memory, os.W_OK | os.X_OK):
            return shared_memory
        size_bytes = space.f_blocks * space.f_frsize
        why = f"{shared_memory} has {_gib(free_bytes)} free of {_gib(size_bytes)}"
    fallback = (run_dir / "shared_memory").absolute()
    if network_file_system(fallback):
        fallback = _of_this_node(node_folder / "shared_memory", "scheduler.node_folder")
    logger.warning(
        "%s, the tensor stores of this node may need %s: shared memory is in files under %s, "
        "which is slower; enlarge it (docker run --shm-size=%dg), or set smaller batches",
        why,
        _gib(needed_bytes),
        fallback,
        -(-needed_bytes // (1 << 30)) + 1,
    )
    return fallback


def _of_this_node(path: Path, setting: str) -> Path:
    """Raises: ConfigError: other nodes have it in common with this one."""
    kind = network_file_system(path)
    if kind:
        raise ConfigError(
            f"{path}: shared memory would be on a network file system ({kind}), where it is not "
            f"safe: set {setting} to a folder on a disk of each node, or enlarge /dev/shm"
        )
    return path


def folder_on_node(node_folder: str) -> Path:
    """The folder of this user below `scheduler.node_folder`."""
    return Path(node_folder).expanduser().absolute() / f"areal_sc-{os.geteuid()}"


def user_folder(root: Path) -> Path:
    """Where the runs of this user on this node are.

    Each boot of a node has a folder of its own: files that two nodes map are not the same memory.
    """
    boot = "unknown"
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    node = hashlib.sha256(f"{socket.gethostname()}/{boot}".encode()).hexdigest()[:12]
    return root / f"areal-sc-{os.geteuid()}-{node}"


def clean_leftovers(root: Path) -> int:
    """Deletes the folders of runs of this user that have no living process; returns how many.

    Raises: ConfigError: the folder of this user is not this user's.
    """
    base = user_folder(root)
    if not _has_own_folder(base):
        return 0
    num_deleted = 0
    for name in _folders_in(base):
        if name.startswith(_DELETED):  # whoever began died over it, or is at it
            delete_folder(base / name)
        elif _NAME.fullmatch(name):
            lock = take_lock(base / name / _LOCK, fcntl.LOCK_EX)
            if lock is not None:
                _delete_run(base / name)
                lock.close()
                num_deleted += 1
                logger.info("deleted the shared memory that run %s left in %s", name, base)
    with suppress(OSError):
        base.rmdir()  # only when it is empty
    return num_deleted


class ArenaFolder:
    """The arenas of one run on this node. While it is open, no other run deletes them.

    Args:
        root: what `memory_root` chose.
        run_id: letters, digits, `_` and `-`.

    Attributes:
        path: the run's folder.
    Raises: ConfigError: `run_id` is not a valid name, or the folder does not belong to this user.
    """

    def __init__(self, root: Path, run_id: str) -> None:
        base = user_folder(root)
        self.path = base / _checked_name("run id", run_id)
        try:
            root.mkdir(parents=True, exist_ok=True, mode=_OWNER_ONLY_FOLDER)
            mode = root.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                why = "everybody may rename files in it, for want of a sticky bit (chmod +t)"
                raise _unusable(root, why)
            self._lock = self._join(base)
        except OSError as error:
            raise _unusable(self.path, error.strerror) from error

    def node_token(self) -> str:
        """Names the node: processes that read the same token share this memory, and so a clock.

        Host names and boot ids do not tell: two containers of a machine have both in common.
        """
        own = self.path / f".{_NODE}.{random_id()}"
        own.write_text(random_id())
        with suppress(FileExistsError):
            os.link(own, self.path / _NODE)  # whole from the first moment; the first one stays
        own.unlink()
        return (self.path / _NODE).read_text()

    @property
    def begun_s(self) -> float:
        """Unix time at which the run came to this node."""
        return (self.path / _NODE).stat().st_mtime

    def create(self, worker: str, incarnation: str) -> Arena:
        """A new arena, owned by this process.

        Raises: TransportError: the folder cannot be made, or this incarnation has had one.
        """
        name = f"{_folder_name(worker)}.{_checked_name('incarnation', incarnation)}"
        partial_path = self.path / f".{name}.partial"
        try:
            # under its name it is locked from the first moment, so nobody takes it for a dead one's
            partial_path.mkdir(mode=_OWNER_ONLY_FOLDER)
            lock = take_lock(partial_path / _LOCK, fcntl.LOCK_EX)
            assert lock is not None
            partial_path.rename(self.path / name)
            return Arena(self.path / name, incarnation, lock)
        except OSError as error:
            raise TransportError(
                f"the arena {self.path / name} cannot be made: {error.strerror}"
            ) from error

    def take_over(self, worker: str) -> list[Arena]:
        """The arenas of dead incarnations of a worker, owned by this process from now on."""
        taken = []
        for name, incarnation, path in _arenas(self.path):
            if name == _folder_name(worker):
                lock = take_lock(path / _LOCK, fcntl.LOCK_EX)
                if lock is not None:
                    taken.append(Arena(path, incarnation, lock))
        return taken

    def by_incarnation(self) -> dict[str, str]:
        """Paths of all arenas; no two lives of workers have one name."""
        return {incarnation: str(path) for _, incarnation, path in _arenas(self.path)}

    def held_bytes(self, role: str) -> int:
        """Bytes of memory in the arenas of all workers of a role, the dead ones included."""
        num_bytes = 0
        for name, _, path in _arenas(self.path):
            if name.rpartition("-")[0] == role:
                with suppress(OSError), os.scandir(path) as entries:
                    files = {s.st_ino: s for s in (e.stat(follow_symlinks=False) for e in entries)}
                    num_bytes += sum(512 * file.st_blocks for file in files.values())
        return num_bytes

    def remove(self) -> None:
        """Deletes everything of the run, when it ends. Memory that is mapped stays readable."""
        if self._lock.is_held:
            _delete_run(self.path)
            with suppress(OSError):
                self.path.parent.rmdir()  # only when no other run is in it
        self.close()

    def close(self) -> None:
        """Leaves the run."""
        self._lock.close()

    def _join(self, base: Path) -> HeldLock:
        give_up = time.monotonic() + LOCK_WAIT_S
        while True:
            # whoever cleans up may delete any of this until the lock is there
            with suppress(FileNotFoundError):
                if _make_own_folder(base) and _make_own_folder(self.path):
                    lock = take_lock(self.path / _LOCK, fcntl.LOCK_SH)
                    if lock is not None:
                        return lock
            if time.monotonic() > give_up:
                why = f"another process has been deleting it for {LOCK_WAIT_S:g} s"
                raise _unusable(self.path, why)
            time.sleep(0.01)


def _make_own_folder(path: Path) -> bool:
    """Makes a folder if needed; False when somebody has just deleted it."""
    with suppress(FileExistsError):
        os.mkdir(path, _OWNER_ONLY_FOLDER)
    return _has_own_folder(path)


def _unusable(path: Path, why: str | None) -> ConfigError:
    return ConfigError(f"shared memory cannot be kept in {path}: {why}; choose another folder")


def _has_own_folder(path: Path) -> bool:
    """Whether the folder exists.

    In a folder with a sticky bit nobody can replace what this user owns, and nobody can enter it:
    so what holds now holds later, too.

    Raises: ConfigError: there is something under this name that is not a folder of this user.
    """
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _unusable(path, error.strerror) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        what = "owned by" if stat.S_ISDIR(found.st_mode) else "not a folder but a file or link of"
        why = f"expected a folder of user {os.geteuid()}, it is {what} user {found.st_uid}"
        raise _unusable(path, why)
    if stat.S_IMODE(found.st_mode) & ~_OWNER_ONLY_FOLDER & 0o777:
        os.chmod(path, _OWNER_ONLY_FOLDER)
    return True


def _delete_run(path: Path) -> None:
    """Deletes a run's folder, renamed before, so that nobody joins it meanwhile."""
    deleted = path.with_name(f"{_DELETED}{random_id()}")
    with suppress(FileNotFoundError):
        path.rename(deleted)
    delete_folder(deleted)


def _arenas(run_folder: Path) -> Iterator[tuple[str, str, Path]]:
    """(folder name of the worker, incarnation, path) of every arena."""
    for name in _folders_in(run_folder):
        worker, _, incarnation = name.rpartition(".")
        if _NAME.fullmatch(worker) and _NAME.fullmatch(incarnation):
            yield worker, incarnation, run_folder / name


def _folders_in(path: Path) -> list[str]:
    with suppress(FileNotFoundError), os.scandir(path) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []


def _folder_name(worker: str) -> str:
    return _checked_name("worker name", worker.replace("/", "-"))


def _checked_name(what: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{what}: expected 1 to 64 of A-Z a-z 0-9 _ -, got {name!r}")
    return name


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
