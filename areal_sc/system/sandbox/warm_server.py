"""The warm process that programs are forked from. It is executed, never forked from the run.

    owner ══ packets: one connection each ══ server ── fork ──► keeper ── fork ──► program
          ◄══════════════ one connection a program ══════════════►

It has imported no part of the run, and has held no prompt, no answer and no key; its environment is
what the owner named. The standard library alone: the fewer pages it has, the faster it forks.

    consumes     connections of its owner, one for each program
    waits for    the next one, or the end of a keeper
    unblocked by its owner, whose end is its own
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Final

from areal_sc.system.sandbox import kernel
from areal_sc.system.sandbox.isolation import BIND_NOW
from areal_sc.system.sandbox.keeper import keep
from areal_sc.system.sandbox.layers import Landlock, Namespaces, ProgramLayer, readable_paths
from areal_sc.system.sandbox.trees import children, end_descendants

LAYERS: Final[dict[str, type[Namespaces | Landlock]]] = {
    "namespaces": Namespaces,
    "landlock": Landlock,
}

_WARM: Final = (
    *("bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions"),
    *("functools", "heapq", "io", "itertools", "json", "math", "operator", "random", "re"),
    *("linecache", "statistics", "string", "textwrap", "threading", "traceback", "typing"),
)
"""What programs import most; each would cost its import again."""

_LONGEST_WAIT_S: Final = 1.0


def main() -> None:
    """The process. Its arguments: descriptor of the connection, layer, paths to read as JSON."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        roots = tuple(readable_paths(()))
        layer: ProgramLayer = LAYERS[sys.argv[2]](json.loads(sys.argv[3]))
        kernel.become_subreaper()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        layer.prepare()
    except OSError as error:
        connection.send(json.dumps({"failed": str(error)}).encode())
        return
    for name in _WARM:
        importlib.import_module(name)
    sys.path[:] = [path for path in sys.path if os.path.realpath(path).startswith(roots)]
    del os.environ[BIND_NOW]
    gc.collect()
    gc.freeze()
    gc.disable()  # keepers are short, and would write to pages that they share; programs enable it
    # where memory is short, the kernel kills programs before the run
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("900")
    folder = layer.base if isinstance(layer, Landlock) else ""
    connection.send(json.dumps({"folder": folder}).encode())
    try:
        _serve(connection, layer)
    finally:
        if isinstance(layer, Landlock):
            layer.close()


def _serve(connection: socket.socket, layer: ProgramLayer) -> None:
    keepers: set[int] = set()
    ready = select.poll()
    ready.register(connection, select.POLLIN)
    while True:
        if is_asked := bool(ready.poll(_LONGEST_WAIT_S * 1000)):
            _, fds, _, _ = socket.recv_fds(connection, 1, 1)
            if not fds:
                break
            # where no process can be had, who asked sees the end of its connection, and asks again
            with socket.socket(fileno=fds[0]) as asker, suppress(OSError):
                keepers.add(_fork(connection, asker, layer))
        _reap(keepers, looks=not is_asked)
    end_descendants()


def _fork(connection: socket.socket, asker: socket.socket, layer: ProgramLayer) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            connection.close()
            keep(asker, layer)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def _reap(keepers: set[int], *, looks: bool) -> None:
    """Buries keepers, and kills what those have left that were killed themselves.

    Args:
        looks: also where none was, for what has come of it since.
    """
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            keepers.discard(pid)
            looks |= os.WIFSIGNALED(status)
        for pid in set(children(os.getpid())) - keepers if looks else ():
            os.kill(pid, signal.SIGKILL)
