"""Programs kept by `bwrap`, which may be allowed user namespaces where this package is not.

    keeper ── bwrap ── bwrap (first process of the namespace) ── python: `run_inside` ── the program

A fresh interpreter starts for each program. The standard library alone.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from areal_sc.system.sandbox import kernel
from areal_sc.system.sandbox.frames import LENGTH, packed, unpacked
from areal_sc.system.sandbox.layers import BOX, DEVICES, any_user, readable_paths
from areal_sc.system.sandbox.start_program import start_program
from areal_sc.system.sandbox.system_calls import SystemCallFilter
from areal_sc.system.sandbox.trees import descendants, end_descendants

_PACKAGE: Final = str(Path(__file__).parents[2])
_SHOWN_AS: Final = "/sandbox/areal_sc"
_BOOT: Final = (
    "import sys; sys.path.insert(0, '/sandbox'); "
    "from areal_sc.system.sandbox.bubblewrap import run_inside; del sys.path[0]; run_inside()"
)
_REQUEST: Final = 4
_NEEDED_BY_ROOT: Final = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_CHOWN")


class Bubblewrap:
    """`bwrap` makes the namespaces; a `ProgramLayer` of the warm server."""

    def __init__(self, read: Sequence[str]) -> None:
        self.folder = BOX
        program = shutil.which("bwrap", path=os.environ.get("PATH", os.defpath))
        if program is None:
            raise OSError("no program bwrap in PATH; it is Debian's and Fedora's bubblewrap")
        self._program = program
        self._readable = readable_paths(read)
        self._file_bytes = 0

    def prepare(self) -> None:
        pass

    def begin(self, file_bytes: int) -> None:
        kernel.become_subreaper()
        self._file_bytes = file_bytes

    def start(self, become: Callable[[], None]) -> int:
        pid = os.fork()
        if pid == 0:
            become()
        return pid

    def enter(self, header: dict[str, Any], files: Sequence[tuple[str, bytes]]) -> None:
        """Executes bwrap, and in it Python, which reads the request from a descriptor."""
        with tempfile.TemporaryFile() as request:
            content = packed(
                {**header, "files": [path for path, _ in files]}, [content for _, content in files]
            )
            request.write(content)
            request.seek(0)
            os.dup2(request.fileno(), _REQUEST)
        kernel.close_from(_REQUEST + 1)
        python = [sys.executable, "-I", "-B", "-X", "utf8", "-c", _BOOT]
        os.execv(self._program, [self._program, *self._options(), "--", *python])

    def _options(self) -> list[str]:
        options = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
        options += ["--die-with-parent"]
        if os.geteuid() == 0:  # `confine` becomes another user: process limits do not bind root
            options += [part for name in _NEEDED_BY_ROOT for part in ("--cap-add", name)]
        else:
            options += ["--unshare-user"]
        above = {
            str(folder) for path in (*self._readable, *DEVICES) for folder in Path(path).parents
        }
        for folder in sorted(above - {"/"}):  # bwrap's own would be closed to another user
            options += ["--perms", "0755", "--dir", folder]
        for path in self._readable:
            is_link = os.path.islink(path)
            options += ["--symlink", os.readlink(path), path] if is_link else []
            options += [] if is_link else ["--ro-bind", path, path]
        for path in DEVICES:
            options += ["--dev-bind", path, path]
        options += ["--proc", "/proc", "--size", str(self._file_bytes), "--tmpfs", BOX]
        options += ["--symlink", BOX, "/dev/shm", "--ro-bind", _PACKAGE, _SHOWN_AS]
        if not any(path.startswith("/tmp/") for path in self._readable):
            options += ["--symlink", BOX, "/tmp"]
        return [*options, "--remount-ro", "/", "--chdir", BOX]

    def confine(self) -> None:
        raise AssertionError("the process has become another program")

    def num_processes_beside(self) -> int:
        return 0

    def pids(self) -> list[int]:
        return [os.getpid(), *descendants(os.getpid())]

    def has_written_more(self, limit: int) -> bool:
        """The kernel holds the bytes; of files there may be as many as blocks."""
        for pid in descendants(os.getpid()):
            try:
                found = os.statvfs(f"/proc/{pid}/root{BOX}")
            except OSError:
                continue
            if found.f_blocks * found.f_frsize <= limit:  # else it is not there yet
                return found.f_files - found.f_ffree > limit // 4096 + 16
        return False

    def exit_code(self, status: int) -> int:
        """A signal's number comes from bwrap as in shells, above 128."""
        code = os.waitstatus_to_exitcode(status)
        return 128 - code if 128 < code <= 128 + 64 else code

    def end(self) -> None:
        end_descendants()


class _Inside:
    """The layer as the Python in bwrap sees it."""

    folder = BOX

    def __init__(self) -> None:
        self._filter = SystemCallFilter(hides_files=False)
        self._is_root = os.geteuid() == 0

    def enter(self, header: dict[str, Any], files: Sequence[tuple[str, bytes]]) -> None:
        pass

    def confine(self) -> None:
        if self._is_root:
            user = any_user()
            os.chown(BOX, user, user)
            kernel.become_user(user, user)
        kernel.drop_capabilities()
        kernel.show_memory()
        self._filter.install()

    def num_processes_beside(self) -> int:
        return 0 if self._is_root else 2


def run_inside() -> None:
    """The program that bwrap executes; standard input, output and error are the program's."""
    with open(_REQUEST, "rb") as request:
        header, parts = unpacked(request.read()[LENGTH.size :])
    files = list(zip(header["files"], parts, strict=True))
    start_program(_Inside(), header, files, (0, 1, 2), 3)
