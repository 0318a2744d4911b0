"""Programs kept by `bwrap`, which may be allowed user namespaces where this package is not.

    keeper ── bwrap ── bwrap (first process of the namespace) ── python: `start_program` ── program

A fresh interpreter starts for each program. It searches for no modules, as `site` would, and gets
`start_program` as code: so it begins in half the time. The standard library alone.
"""

from __future__ import annotations

import marshal
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any, Final

from areal_sc.system.sandbox import kernel, start_program
from areal_sc.system.sandbox.layers import BOX, DEVICES, STREAMS, any_user, readable_paths
from areal_sc.system.sandbox.system_calls import SystemCallFilter
from areal_sc.system.sandbox.trees import descendants, end_descendants

_BOOT: Final = """
import marshal, sys
with open(int(sys.argv[1]), "rb") as request:
    code, arguments = marshal.load(request)
exec(code)
run_in_bubblewrap(*arguments)
"""
_NEEDED_BY_ROOT: Final = ("CAP_SETUID", "CAP_SETGID", "CAP_CHOWN")


class Bubblewrap:
    """`bwrap` makes the namespaces; a `ProgramLayer` of the warm server."""

    def __init__(self, read: Sequence[str]) -> None:
        self.folder = BOX
        program = shutil.which("bwrap", path=os.environ.get("PATH", os.defpath))
        if program is None:
            raise OSError("no program bwrap in PATH; it is Debian's and Fedora's bubblewrap")
        self._program = program
        self._is_root = os.geteuid() == 0
        self._options = _options(readable_paths(read), is_root=self._is_root)
        loader = start_program.__spec__ and start_program.__spec__.loader
        self._code = loader.get_code(start_program.__name__)  # type: ignore[union-attr]
        self._filter = SystemCallFilter(hides_files=False).program
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

    def enter(self, request: dict[str, Any]) -> None:
        """Executes bwrap, and in it Python, which reads its code from a descriptor."""
        kernel.close_from(4)
        rules = kernel.sealed_file(self._filter)
        user = any_user() if self._is_root else 0
        content: Any = self._code, (sys.path, user, request)
        given = kernel.sealed_file(marshal.dumps(content))
        options = ["--seccomp", str(rules), "--size", str(self._file_bytes)]
        options += ["--tmpfs", BOX, "--remount-ro", "/", "--chdir", BOX, "--", sys.executable]
        options += ["-I", "-S", "-B", "-X", "utf8", "-c", _BOOT, str(given)]
        # the program of an ordinary user can write to the memory of bwrap's own first process
        start_program.limit(request["limits"])
        os.execv(self._program, [self._program, *self._options, *options])

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


def _options(readable: Sequence[str], *, is_root: bool) -> list[str]:
    """What is the same for all programs."""
    options = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    options += ["--die-with-parent"]
    if is_root:  # it becomes another user inside: process limits do not bind root
        options += [part for name in _NEEDED_BY_ROOT for part in ("--cap-add", name)]
    else:
        options += ["--unshare-user"]
    above = {str(folder) for path in (*readable, *DEVICES) for folder in PurePath(path).parents}
    for folder in sorted(above - {"/"}):  # bwrap's own would be closed to another user
        options += ["--perms", "0755", "--dir", folder]
    for path in readable:
        is_link = os.path.islink(path)
        options += ["--symlink", os.readlink(path), path] if is_link else ["--ro-bind", path, path]
    for path in DEVICES:
        options += ["--dev-bind", path, path]
    options += ["--proc", "/proc", "--remount-ro", "/proc", "--symlink", BOX, "/dev/shm"]
    for path, leads_to in STREAMS.items():
        options += ["--symlink", leads_to, path]
    if not any(path.startswith("/tmp/") for path in readable):
        options += ["--symlink", BOX, "/tmp"]
    return options
