"""Keeps a process of the user's own code apart from the run, once, at its start. No torch.

What the user wrote is trusted more than what a model wrote: network, environment and all files but
the run's stay. Hidden are the run's folder and shared memory, and all other processes; all that it
started ends with it.

    namespaces    fork server ── child (waits) ─┬─ first process of a namespace (buries)
                                                └─ the process that goes on
    landlock      the process itself; other processes are seen, and not reached
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NoReturn

from areal_sc.system.process import be_deaf
from areal_sc.system.replies import signed
from areal_sc.system.sandbox import kernel
from areal_sc.system.sandbox.isolation import LAYERS
from areal_sc.system.sandbox.layers import DEVICES, readable_paths
from areal_sc.system.sandbox.system_calls import refuse_network
from areal_sc.system.stacks import STACKS_SIGNAL

_SHARED_MEMORY: Final = "/dev/shm"
_LOOPBACK: Final = "127.0.0.1"
_BACKLOG: Final = 1024
_OF_ROOT: Final = (0, 1, 3, 4, 5, 6, 7, 8, 10, 12, 13)
"""CAP_CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE,
NET_ADMIN, NET_RAW: none of them opens what a mount hides."""


def begin_apart(spec: Mapping[str, Any]) -> socket.socket | None:
    """Keeps this process apart as `OwnProcesses` asks for it, and says that it is ready.

    Args:
        spec: `fd`, the socket; `sources`, `isolation`, `hides`, see `OwnProcesses`; `network`
            and `read`, see `narrow`; `is_tried`: a process like this one has found that the layer
            works, which takes forks to try; `port`: unless it is 0, the process is in a network of
            its own, where nothing but this port of 127.0.0.1 answers. The owner gets the socket
            that listens there.
    Returns: the socket, for `Replies`; or None: it cannot be as narrow as that, which was told.
    """
    shows, port = [spec["sources"]], spec.get("port", 0)
    layer, why_not, pid = _keep_apart(spec, shows, has_own_network=port > 0)
    connection = socket.socket(fileno=3 if layer else spec["fd"])
    connection.setblocking(True)
    connection.set_inheritable(False)
    try:
        narrow(network=spec["network"], read=spec["read"], shows=shows)
        if port and layer != "namespaces":
            raise OSError(f"a network of its own needs namespaces, which there are not: {why_not}")
        listeners = [socket.create_server((_LOOPBACK, port), backlog=_BACKLOG)] if port else []
    except OSError as error:
        connection.sendall(signed(["unfit", str(error)]))
        return None
    ready = signed(["ready", pid, layer, why_not])
    socket.send_fds(connection, [ready], [listener.fileno() for listener in listeners])
    for listener in listeners:
        listener.close()
    return connection


def _keep_apart(
    spec: Mapping[str, Any], shows: Sequence[str], *, has_own_network: bool
) -> tuple[str, str, int]:
    """Keeps this process apart, which has one thread; it may go on as another process.

    Args:
        spec: see `begin_apart`; its socket is the only descriptor that is kept.
        shows: folders within those that are hidden, which can be read all the same.
        has_own_network: in namespaces it reaches nobody, and itself by 127.0.0.1.
    Returns: a name of `LAYERS`, or "" where none works; of each layer that does not work, why; and
        the process id of what goes on, as others see it.
    """
    isolation, why_not = spec["isolation"], list[str]()
    hides = [os.path.realpath(path) for path in spec["hides"]]
    shows = [os.path.realpath(path) for path in shows]
    for layer in {"auto": LAYERS, "none": ()}.get(isolation, (isolation,)):
        enter = partial(_enter_landlock, hides, shows)
        if layer == "namespaces":
            enter = partial(_enter_namespaces, hides, shows, has_own_network=has_own_network)
        if not spec["is_tried"] and (fault := _fault_of(enter)):
            why_not.append(f"{layer}: {fault}")
            continue
        os.dup2(spec["fd"], 3)
        kernel.close_from(4)
        return layer, "; ".join(why_not), enter()
    return "", "; ".join(why_not), os.getpid()


def narrow(*, network: bool, read: Sequence[str] | None, shows: Sequence[str]) -> None:
    """Takes more from this process, for good.

    Args:
        network: it keeps it.
        read: all that it can read, beside Python, its modules and `shows`, and nothing can be
            written; None: whatever it could before.
    Raises: OSError: the kernel has no Landlock, or no seccomp.
    """
    if network and read is None:
        return
    kernel.forbid_gains()
    if read is not None:
        if not kernel.landlock_version():
            raise OSError("a reward that declares read= needs Landlock, which this kernel has not")
        modules = [path or os.getcwd() for path in sys.path]
        readable = [*readable_paths([*read, *modules, *shows]), "/etc", "/proc", "/sys"]
        kernel.allow_only(
            [
                *((path, kernel.READS) for path in readable),
                *((path, kernel.DEVICE) for path in DEVICES),
            ],
            is_offline=not network,
        )
    if not network:
        refuse_network()


def _fault_of(enter: Callable[[], object]) -> str:
    """Why a layer cannot be entered; a child tries it. Empty: it can."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            enter()
            os.write(writes, b"\0")
        except Exception as error:
            os.write(writes, str(error).encode())
        finally:
            os._exit(0)
    os.close(writes)
    said = os.read(reads, 1 << 12)
    os.close(reads)
    os.waitpid(pid, 0)
    return "" if said == b"\0" else said.decode() or "it ends the process"


def _enter_namespaces(
    hides: Sequence[str], shows: Sequence[str], *, has_own_network: bool = False
) -> int:
    is_root, user = os.geteuid() == 0, (os.geteuid(), os.getegid())
    spaces = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC
    spaces |= kernel.CLONE_NEWNET if has_own_network else 0
    kernel.unshare(spaces | (0 if is_root else kernel.CLONE_NEWUSER))
    if not is_root:
        kernel.map_only(*user)
    if has_own_network:
        kernel.raise_loopback()
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    for path in hides:
        _hide(path, [show for show in shows if show.startswith(f"{path}/")])
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    if os.path.isdir(_SHARED_MEMORY):
        kernel.mount("none", _SHARED_MEMORY, "tmpfs", flags, "mode=1777")
    with suppress(OSError):  # it may lie in what is hidden
        os.chdir(os.getcwd())
    first = os.fork()
    if first == 0:
        _bury_all()
    goes_on = os.fork()
    if goes_on:
        _end_as(goes_on, first)
    kernel.die_with_parent()
    signal.signal(signal.SIGTERM, be_deaf)  # a fork of user code would obey it
    pid = int(os.readlink("/proc/self"))  # the old /proc knows it by the number of others
    kernel.mount("proc", "/proc", "proc", flags | kernel.MS_NOEXEC)
    kernel.keep_capabilities(_OF_ROOT if is_root else ())
    return pid


def _hide(path: str, shows: Sequence[str]) -> None:
    """Puts an empty folder over another one, in which only `shows` are left, to be read."""
    if not os.path.isdir(path):
        return
    kept = [(show, os.open(show, os.O_PATH)) for show in shows if os.path.isdir(show)]
    kernel.mount("hidden", path, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755")
    for show, fd in kept:
        os.makedirs(show)
        kernel.mount(f"/proc/self/fd/{fd}", show, "", kernel.MS_BIND | kernel.MS_REC)
        os.close(fd)
    kernel.make_read_only(path)


def _bury_all() -> NoReturn:
    """The first process of a namespace: it buries what others leave. With it all the others end."""
    try:
        kernel.die_with_parent()
        kernel.close_from(0)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        while True:
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            signal.sigwait([signal.SIGCHLD])
    finally:
        os._exit(1)


def _end_as(pid: int, first: int) -> NoReturn:
    """Waits for the process that goes on, and ends as it does, with all that it has left."""
    code = 1
    try:
        signal.signal(STACKS_SIGNAL, lambda *_: os.kill(pid, STACKS_SIGNAL))
        kernel.close_from(3)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        if code < 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with suppress(OSError):  # of SIGKILL
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
    finally:
        os._exit(code & 0xFF)


def _enter_landlock(hides: Sequence[str], shows: Sequence[str]) -> int:
    if not kernel.landlock_version():
        raise OSError("this kernel has no Landlock, or it is off")
    if os.geteuid() == 0:
        kernel.keep_capabilities(_OF_ROOT)
    kernel.forbid_gains()
    kernel.allow_only(
        [*_all_but(hides), *((show, kernel.READS) for show in shows)], is_offline=False
    )
    return os.getpid()


def _all_but(hides: Sequence[str]) -> list[tuple[str, int]]:
    """All paths that there are now, but these: Landlock has no word for what is forbidden.

    The folders above them can be listed, and get no new entries.
    """
    above = {
        "/".join(parts[:number]) or "/"
        for path in hides
        for parts in [path.split("/")]
        for number in range(1, len(parts))
    }
    allowed = []
    for folder in sorted(above):
        allowed.append((folder, kernel.LISTS))
        for found in os.scandir(folder):
            if found.path not in above and found.path not in hides and not found.is_symlink():
                allowed.append((found.path, kernel.ALL))
    return allowed
