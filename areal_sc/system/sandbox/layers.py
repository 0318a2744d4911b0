"""What keeps a program apart, one class a layer; all of it in the warm server.

The standard library alone.

    prepare     once, in the server
    begin       in the keeper of a program, before it forks; `folder` is the program's own from then
    start       forks the process that becomes the program
    confine     in that process, last of all: afterwards it can do only what the program may
    num_processes_beside    count as the program's for the kernel, and are not
    pids        those of the program, for its keeper to measure
    has_written_more        bytes of files than a limit; False where the kernel holds the limit
    exit_code   that of the program, from the wait status of what `start` has started
    end         nothing of the program is left, neither processes nor files
"""

from __future__ import annotations

import os
import random
import signal
import stat
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import Final

from areal_sc.system.sandbox import kernel
from areal_sc.system.sandbox.system_calls import SystemCallFilter
from areal_sc.system.sandbox.trees import (
    bytes_in,
    children,
    deleted_bytes,
    descendants,
    end_descendants,
    num_tasks_of_user,
    remove,
)

STREAMS: Final = {
    "/dev/fd": "/proc/self/fd",
    **{f"/dev/std{name}": f"/proc/self/fd/{fd}" for fd, name in enumerate(("in", "out", "err"))},
}
"""Links -> where they lead."""

DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_SYSTEM: Final = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"),
    *("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d"),
    "/etc/localtime",
)
BOX: Final = "/box"
_OLD: Final = "/.old"
_ROOM_OF_USER: Final = 256
"""Tasks that a user's other processes may begin while a program runs: the kernel counts them, too,
and would refuse the program's own. A look at it finds the program that uses this room itself."""
_STATUS: Final = struct.Struct("i")


def readable_paths(more: Sequence[str]) -> list[str]:
    """What every program may read: the system's programs, this Python, and what else is named."""
    found = [*_SYSTEM, *(os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, *more))]
    return [path for path in dict.fromkeys(found) if os.path.exists(path)]


class Namespaces:
    """Namespaces of processes, mounts, network, IPC and, but for root, users.

    The server moves into an almost empty tree of files, in which nothing can be written, and which
    has no network. A program gets processes, users and a folder of its own in it. When the first
    process of a namespace ends, the kernel kills the others.
    """

    def __init__(self, read: Sequence[str]) -> None:
        self.folder = BOX
        self._is_root = os.geteuid() == 0
        self._readable = readable_paths(read)
        self._user = (os.geteuid(), os.getegid())
        self._filter = SystemCallFilter(hides_files=False)
        self._first: int | None = None
        self._told, self._tells = -1, -1

    def prepare(self) -> None:
        spaces = kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC
        kernel.unshare(spaces | (0 if self._is_root else kernel.CLONE_NEWUSER))
        if not self._is_root:
            kernel.map_only(*self._user)
        kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.mount("sandbox", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755")
        os.mkdir(f"/tmp{_OLD}")
        kernel.change_root("/tmp", _OLD)
        for path in self._readable:
            self._show(path)
        for path in DEVICES:
            self._show(path, is_device=True)
        self._show("/proc", is_device=True)
        os.mkdir(BOX)
        if not os.path.lexists("/tmp"):
            os.symlink(BOX, "/tmp")
        os.symlink(BOX, "/dev/shm")
        for path, leads_to in STREAMS.items():
            os.symlink(leads_to, path)
        kernel.detach(_OLD)
        os.rmdir(_OLD)
        kernel.make_read_only("/", below_too=False)

    def _show(self, path: str, *, is_device: bool = False) -> None:
        """Makes a path of the old tree one of the new tree, at the same place."""
        old = f"{_OLD}{path}"
        if os.path.lexists(path):  # it lies in another one
            return
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.islink(old):
            os.symlink(os.readlink(old), path)
            return
        if os.path.isdir(old):
            os.makedirs(path, exist_ok=True)
        else:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
        kernel.mount(old, path, "", kernel.MS_BIND | kernel.MS_REC)
        if not is_device:
            kernel.make_read_only(path)

    def begin(self, file_bytes: int) -> None:
        spaces = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC
        kernel.unshare(spaces | (0 if self._is_root else kernel.CLONE_NEWUSER))
        if self._is_root:
            self._user = (any_user(),) * 2
        else:
            kernel.map_only(*self._user)
        uid, gid = self._user
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        options = f"size={file_bytes},nr_inodes={file_bytes // 4096 + 16},mode=0700"
        kernel.mount("box", BOX, "tmpfs", flags, f"{options},uid={uid},gid={gid}")
        self._told, self._tells = os.pipe()

    def start(self, become: Callable[[], None]) -> int:
        self._first = os.fork()
        if self._first == 0:
            self._be_first(become)
        os.close(self._tells)
        return self._first

    def _be_first(self, become: Callable[[], None]) -> None:
        """The first process of the namespace: it waits for the program, and ends all with it."""
        code = 1
        try:
            kernel.die_with_parent()
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # then nobody inside can send it
            self._mount_processes()
            pid = os.fork()
            if pid == 0:
                become()
            kernel.hide_memory()
            null = os.open(os.devnull, os.O_RDWR)
            for fd in range(3):
                os.dup2(null, fd)
            keeps = os.dup2(self._tells, 3)
            kernel.close_from(keeps + 1)
            while True:
                ended, status = os.wait()
                if ended == pid:
                    os.write(keeps, _STATUS.pack(os.waitstatus_to_exitcode(status)))
                    code = 0
                    break
        finally:
            os._exit(code)

    def _mount_processes(self) -> None:
        """To be read alone: a program could set its `oom_score_adj` back, to outlive the run.

        Raises: PermissionError: in a container whose own hides a part: nothing is measured.
        """
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC | kernel.MS_RDONLY
        kernel.mount("proc", "/proc", "proc", flags)

    def confine(self) -> None:
        if self._is_root:
            kernel.become_user(*self._user)
        kernel.drop_capabilities()
        kernel.show_memory()
        self._filter.install()

    def num_processes_beside(self) -> int:
        return 0 if self._is_root else 2

    def pids(self) -> list[int]:
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]

    def has_written_more(self, limit: int) -> bool:
        return False

    def exit_code(self, status: int) -> int:
        told = os.read(self._told, _STATUS.size)
        return int(_STATUS.unpack(told)[0]) if told else -int(signal.SIGKILL)

    def end(self) -> None:
        if self._first is not None:
            with suppress(ProcessLookupError):
                os.kill(self._first, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self._first, 0)


class Landlock:
    """Landlock for files, seccomp for all else; a program of root's becomes another user, too.

    Its keeper is the parent of whatever the program leaves.

    Attributes:
        base: the folder of all programs' folders, once it is prepared.
    """

    def __init__(self, read: Sequence[str]) -> None:
        self.folder = ""
        self._is_root = os.geteuid() == 0
        self._readable = _outermost(readable_paths(read))
        self.base = ""
        self._user = (os.geteuid(), os.getegid())
        self._num_beside = 0
        self._program = -1
        # Landlock says what is read; a Python in root's own folder is closed to all other users
        hidden = not all(map(_is_for_all, self._readable))
        self._kept = kernel.CAP_DAC_READ_SEARCH if self._is_root and hidden else 0
        version = kernel.landlock_version()
        if version == 0:
            raise OSError("this kernel has no Landlock, or it is off")
        self._filter = SystemCallFilter(
            hides_files=not self._is_root,
            own_signals_alone=version < 6 and not self._is_root,
            truncates=version >= 3,
        )

    def prepare(self) -> None:
        self.base = tempfile.mkdtemp(prefix="areal-sandbox-")
        os.chmod(self.base, 0o711)

    def close(self) -> None:
        """In the server: removes what keepers that were killed have left."""
        remove(self.base)

    def begin(self, file_bytes: int) -> None:
        kernel.become_subreaper()
        self.folder = f"{self.base}/{os.urandom(12).hex()}"
        os.mkdir(self.folder, 0o700)
        tempfile.tempdir = self.folder  # that of the server is known by now
        if self._is_root:
            self._user = (any_user(),) * 2
            os.chown(self.folder, *self._user)
        else:
            self._num_beside = num_tasks_of_user() + _ROOM_OF_USER

    def start(self, become: Callable[[], None]) -> int:
        self._program = os.fork()
        if self._program == 0:
            become()
        return self._program

    def confine(self) -> None:
        if self._is_root:
            kernel.become_user(*self._user)
        kernel.drop_capabilities(self._kept)
        kernel.show_memory()
        kernel.allow_only(
            [
                *((path, kernel.READS) for path in self._readable),
                *((path, kernel.DEVICE) for path in DEVICES),
                (self.folder, kernel.ALL),
            ]
        )
        self._filter.install()

    def num_processes_beside(self) -> int:
        return self._num_beside

    def pids(self) -> list[int]:
        for pid in children(os.getpid()):  # else those that it has left fill its room as zombies
            if pid != self._program:
                os.waitpid(pid, os.WNOHANG)
        return [os.getpid(), *descendants(os.getpid())]

    def has_written_more(self, limit: int) -> bool:
        return bytes_in(self.folder, limit) + deleted_bytes(self.pids()) > limit

    def exit_code(self, status: int) -> int:
        return os.waitstatus_to_exitcode(status)

    def end(self) -> None:
        end_descendants()
        if self.folder:
            remove(self.folder)


ProgramLayer = Namespaces | Landlock
"""One way to keep programs apart."""


def _outermost(paths: Sequence[str]) -> list[str]:
    """The real paths without those that lie in another one: each costs a program a rule."""
    real = dict.fromkeys(map(os.path.realpath, paths))
    return [it for it in real if not any(str(above) in real for above in PurePath(it).parents)]


def _is_for_all(path: str) -> bool:
    """Whether everybody may go through the folders above it."""
    above = os.path.dirname(path)
    is_for_all = bool(os.stat(above).st_mode & stat.S_IXOTH)
    return is_for_all and (above == path or _is_for_all(above))


def any_user() -> int:
    """A number that is nobody's on this machine, as far as chance goes: none of the run's files.

    It is from the upper half of those that this user namespace has.
    """
    with open("/proc/self/uid_map") as file:
        first, _, length = max(
            (list(map(int, line.split())) for line in file), key=lambda row: row[2]
        )
    return random.SystemRandom().randrange(first + length // 2, first + length - 1)
