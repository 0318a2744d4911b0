"""The process that becomes a program: it gives up what it may not have, then runs the source.

Standard library alone.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import linecache
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType, TracebackType
from typing import Any, Final, NoReturn

from areal_sc.system.sandbox import kernel
from areal_sc.system.sandbox.layers import StartedLayer

_OPEN_FILES: Final = 256
_NAME: Final = "program.py"


def start_program(
    layer: StartedLayer,
    header: dict[str, Any],
    files: Sequence[tuple[str, bytes]],
    ends: tuple[int, int, int],
    telling: int,
) -> NoReturn:
    """Becomes the program; never comes back.

    Args:
        files: relative path and content of what lies in its folder.
        ends: standard input, output and error.
        telling: a pipe that gets the reason where it cannot begin, and ends when it begins.
    """
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, fd in enumerate(ends):
            os.dup2(fd, number)
        telling = os.dup2(telling, 3)
        layer.enter(header, files)
        os.chdir(layer.folder)
        layer.confine()
        for path, content in files:
            if folder := os.path.dirname(path):
                os.makedirs(folder, exist_ok=True)
            with open(path, "wb") as file:
                file.write(content)
        _limit(header["limits"], layer.num_processes_beside())
        os.environ.update(HOME=layer.folder, TMPDIR=layer.folder)
        kernel.close_from(4)
        if header["command"]:
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            os.set_inheritable(telling, False)
            os.execvpe(header["command"][0], header["command"], os.environ)
        os.close(telling)
    except BaseException as error:
        with suppress(OSError):
            os.write(telling, f"{type(error).__name__}: {error}".encode(errors="replace"))
        os._exit(1)
    code = 1
    try:
        code = _run(header["source"], layer.folder)
    finally:
        os._exit(code)


def _limit(limits: dict[str, Any], num_beside: int) -> None:
    for what, limit in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_CPU, int(limits["time_s"]) + 1),
        (resource.RLIMIT_NPROC, limits["num_processes"] + num_beside),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        _, highest = resource.getrlimit(what)
        if highest != resource.RLIM_INFINITY:
            limit = min(limit, highest)
        resource.setrlimit(what, (limit, limit))


def _run(source: str, folder: str) -> int:
    """Runs it as Python runs a script; returns its exit code."""
    main = ModuleType("__main__")
    path = os.path.join(folder, _NAME)
    main.__dict__.update(__builtins__=builtins, __file__=path)
    sys.modules["__main__"] = main
    sys.argv = [path]
    sys.path.insert(0, folder)
    sys.stdin, sys.stdout, sys.stderr = (
        open(fd, mode, closefd=False, encoding="utf-8", errors=errors)  # noqa: SIM115
        for fd, mode, errors in (
            (0, "r", "surrogateescape"),
            (1, "w", "surrogateescape"),
            (2, "w", "backslashreplace"),
        )
    )
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))
    linecache.cache[path] = len(source), None, source.splitlines(keepends=True), path
    gc.enable()
    code = 0
    try:
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)
    except BaseException as error:
        code = _told(error)
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # as Python's own end does
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:
        code = code or _told(error)
    return code & 0xFF


def _told(error: BaseException) -> int:
    """Writes what a script would of an error that ends it; returns its exit code."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    try:
        shown: TracebackType | None = error.__traceback__
        traceback.print_exception(type(error), error, shown and shown.tb_next)
        sys.stderr.flush()
    except MemoryError:
        os.write(2, b"MemoryError\n")
    return 1
