"""The process that becomes a program: it gives up what it may not have, then runs the source."""

from __future__ import annotations

import atexit
import builtins
import gc
import os
import resource
import signal
import sys
from typing import Any, Final, NoReturn

from areal_sc.system.sandbox import kernel
from areal_sc.system.sandbox.layers import ProgramLayer

_OPEN_FILES: Final = 128
"""More than programs need; each may be a socket with 0.2 MB in it, which no limit counts."""
_NAME: Final = "__main__.py"
_TELLING: Final = 3
BEGUN: Final = b"+"
"""What the keeper gets last before the program begins."""


def start_program(
    layer: ProgramLayer, request: dict[str, Any], ends: tuple[int, int, int], telling: int
) -> NoReturn:
    """Becomes the program; never comes back.

    Args:
        request: `source` or `command`, `files` by relative path, and `limits`.
        ends: standard input, output and error.
        telling: a pipe that gets `BEGUN` and ends when the program begins; where it cannot begin,
            the pipe gets the reason.
    """
    folder = layer.folder
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, fd in enumerate(ends):
            os.dup2(fd, number)
        telling = os.dup2(telling, _TELLING)
        kernel.close_from(_TELLING + 1)
        os.chdir(folder)
        layer.confine()
        for path, content in request["files"].items():
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with open(path, "wb") as file:
                file.write(content)
        _limit(request["limits"], layer.num_processes_beside())
        # whoever prints a long number has not failed; the time that it takes is limited
        sys.set_int_max_str_digits(0)
        os.environ.update(HOME=folder, TMPDIR=folder, PYTHONINTMAXSTRDIGITS="0")
        if command := request["command"]:
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            os.set_inheritable(telling, False)
            os.write(telling, BEGUN)
            os.execvpe(command[0], command, os.environ)
        os.write(telling, BEGUN)
        os.close(telling)
    except BaseException as error:
        _fail(error, telling)
    code = 1
    try:
        code = _run(request["source"], folder)
    finally:
        os._exit(code)


def _fail(error: BaseException, telling: int) -> NoReturn:
    try:
        os.write(telling, f"{type(error).__name__}: {error}".encode(errors="replace"))
    finally:
        os._exit(1)


def _limit(limits: dict[str, Any], num_beside: int) -> None:
    """Limits this process for good. Args: num_beside: as of a layer."""
    for what, most in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_CPU, int(limits["time_s"]) + 1),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 1),  # with 0 programs that collect dumps would get one
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_NPROC, limits["num_processes"] + num_beside),
    ):
        _, highest = resource.getrlimit(what)
        most = min(most, highest) if highest != resource.RLIM_INFINITY else most
        resource.setrlimit(what, (most, most))


def _run(source: str, folder: str) -> int:
    """Runs it as Python runs a script; returns its exit code."""
    main = type(sys)("__main__")
    path = os.path.join(folder, _NAME)
    try:
        with open(path, "xb") as file:
            file.write(source.encode(errors="replace"))
    except OSError:  # its limit is that low, or it has such a file: then tracebacks show no lines
        pass
    vars(main).update(__builtins__=builtins, __file__=path)
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
    gc.enable()
    code = 0
    try:
        # without the mark with which some files begin
        exec(compile(source.removeprefix("\ufeff"), path, "exec", dont_inherit=True), vars(main))
    except BaseException as error:
        code = _told(error)
    try:  # as Python's own end does
        if threading := sys.modules.get("threading"):
            threading._shutdown()
        atexit._run_exitfuncs()
        streams: tuple[Any, ...] = sys.stdout, sys.stderr, sys.__stdout__
        for stream in streams:
            if not getattr(stream, "closed", stream is None):
                stream.flush()
        for name in reversed(list(vars(main))):  # what it has not closed is written
            vars(main).pop(name, None)  # the newest first: `__del__` may use what was there before
        if (stdout := sys.__stdout__) and not stdout.closed:
            stdout.flush()
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
    shown = error.__traceback__ and error.__traceback__.tb_next
    try:
        sys.excepthook(type(error), error.with_traceback(shown), shown)
        sys.stderr.flush()
    except BaseException:  # of the program's own hook
        pass
    if isinstance(error, MemoryError):  # there may have been no memory to show it
        os.write(2, b"MemoryError\n")
    return 1
