"""A small process that has imported what workers need, and forks them on demand.

Importing torch and transformers takes seconds, a fork of a process that has them a fraction of
one, so workers start and restart fast. The server outlives the script that started it, bounded.

    consumes     requests on a Unix socket: spawn, kill, poll, ping, shutdown (msgpack, no pickle)
    waits for    a request, the exit of a child, SIGTERM, or `orphan_timeout_s` without any client
    unblocked by the script's `ForkServerClient`, its children, or the clock

It is single-threaded, since a fork copies only the forking thread: whatever lock another thread
held would stay locked in the child. What a child may run is an allow-list of names; a peer cannot
name code. Each child is the leader of a session of its own and dies with the server, unless asked
otherwise; `kill` reaches its whole process group.
"""

from __future__ import annotations

import argparse
import collections
import gc
import importlib
import logging
import os
import select
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgpack

from areal_sc.errors import ArealError
from areal_sc.log import setup_logging
from areal_sc.run_folder import RunFolder
from areal_sc.transport.arena.folder import clean_leftovers
from areal_sc.workers.forked_child import die_with_parent, run_child

log = logging.getLogger(__name__)

ENTRIES: Mapping[str, str] = {
    "worker": "areal_sc.workers.entry:run_worker",
    "reward": "areal_sc.workflows.reward_process:run_reward_process",
}
"""What a child may run: name -> module:function(spec: dict) -> exit code."""

MAX_MESSAGE_BYTES = 16 << 20
MAX_FDS_A_MESSAGE = 16
TERMINATE_GRACE_S = 3.0
"""Between SIGTERM and SIGKILL of the children when the server ends."""

_MAX_REMEMBERED_EXITS = 4096


@dataclass(eq=False)
class _Client:
    connection: socket.socket
    unpacker: Any = field(
        default_factory=lambda: msgpack.Unpacker(
            max_buffer_size=MAX_MESSAGE_BYTES, strict_map_key=False
        )
    )
    fds: list[int] = field(default_factory=list)


class ForkServer:
    """Serves requests until it is told to end, or nobody is there any more.

    Args:
        listening: socket whose connections are clients, or None.
        connections: clients that are already connected.
        orphan_timeout_s: so long the server and its children live without any client.
        entries: names that `spawn` accepts, as in `ENTRIES`.
    """

    def __init__(
        self,
        *,
        listening: socket.socket | None,
        connections: Sequence[socket.socket] = (),
        orphan_timeout_s: float,
        entries: Mapping[str, str] = ENTRIES,
    ) -> None:
        self._listening = listening
        self._orphan_timeout_s = orphan_timeout_s
        self._entries = dict(entries)
        self._selector = selectors.DefaultSelector()
        self._clients: set[_Client] = set()
        self._children: set[int] = set()
        self._returncodes: collections.OrderedDict[int, int] = collections.OrderedDict()
        self._alone_since = time.monotonic()
        self._is_ending = False
        self._wakeup_read, self._wakeup_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wakeup_read, selectors.EVENT_READ, self._on_signals)
        if listening is not None:
            listening.setblocking(False)
            self._selector.register(listening, selectors.EVENT_READ, self._on_connection)
        for connection in connections:
            self._add_client(connection)

    def serve(self) -> None:
        """Runs until the end; its children are dead then."""
        self._install_signals()
        num_threads = len(os.listdir("/proc/self/task"))
        if num_threads > 1:
            log.warning(
                "threads=%d forking beside other threads can deadlock children", num_threads
            )
        self._reap()
        try:
            while not self._is_ending:
                timeout_s = None
                if not self._clients:
                    timeout_s = self._alone_since + self._orphan_timeout_s - time.monotonic()
                    if timeout_s <= 0:
                        log.info("no_client_for_s=%g ending", self._orphan_timeout_s)
                        break
                for key, _ in self._selector.select(timeout_s):
                    key.data()
        finally:
            self._end_children()
            log.info("ended children_ever_exited=%d", len(self._returncodes))

    def _install_signals(self) -> None:
        def note_end(signum: int, frame: object) -> None:
            self._is_ending = True

        signal.signal(signal.SIGTERM, note_end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # a handler that does nothing, so that the wake-up pipe is written to
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)

    def _on_signals(self) -> None:
        try:
            while os.read(self._wakeup_read, 4096):
                pass
        except BlockingIOError:
            pass
        self._reap()

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid in self._children:
                self._children.discard(pid)
                self._returncodes[pid] = os.waitstatus_to_exitcode(status)
                if len(self._returncodes) > _MAX_REMEMBERED_EXITS:
                    self._returncodes.popitem(last=False)

    def _on_connection(self) -> None:
        assert self._listening is not None
        try:
            connection, _ = self._listening.accept()
        except OSError as error:
            log.warning("accept failed: %s", error)
            return
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        uid = struct.unpack("3i", credentials)[1]
        if uid != os.getuid():
            log.warning("refused a client of uid=%d", uid)
            connection.close()
            return
        self._add_client(connection)

    def _add_client(self, connection: socket.socket) -> None:
        client = _Client(connection)
        # blocking writes with a bound: replies are small, and a client reads its replies
        connection.settimeout(5.0)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._on_readable(client))

    def _drop_client(self, client: _Client, reason: str) -> None:
        log.info("client_left reason=%s", reason)
        self._selector.unregister(client.connection)
        client.connection.close()
        for fd in client.fds:
            os.close(fd)
        self._clients.discard(client)
        self._alone_since = time.monotonic()

    def _on_readable(self, client: _Client) -> None:
        try:
            received, fds, _, _ = socket.recv_fds(client.connection, 1 << 16, MAX_FDS_A_MESSAGE)
            client.fds.extend(fds)
            if not received:
                self._drop_client(client, "closed")
                return
            client.unpacker.feed(received)
            for request in client.unpacker:
                reply = self._answer(client, request)
                client.connection.sendall(msgpack.packb(reply))
        except OSError as error:
            self._drop_client(client, str(error))
        except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
            self._drop_client(client, f"malformed request: {type(error).__name__}: {error}")

    def _answer(self, client: _Client, request: dict[str, Any]) -> dict[str, Any]:
        reply: dict[str, Any] = {"id": request["id"]}
        match request["op"]:
            case "ping":
                reply["pid"] = os.getpid()
            case "poll":
                self._reap()
                reply["returncodes"] = dict(self._returncodes)
            case "spawn":
                num_fds = int(request["num_fds"])
                fds, client.fds = client.fds[:num_fds], client.fds[num_fds:]
                try:
                    reply["pid"] = self._spawn(request, fds)
                except OSError as error:
                    reply["error"] = str(error)
                finally:
                    for fd in fds:
                        os.close(fd)
            case "kill":
                reply["sent"] = self._kill(int(request["pid"]), int(request["signal"]))
            case "shutdown":
                self._is_ending = True
            case op:
                raise ValueError(f"unknown operation {op!r}")
        if "error" in reply:
            log.warning("op=%s failed: %s", request["op"], reply["error"])
        return reply

    def _kill(self, pid: int, signum: int) -> bool:
        """Signals the child's process group; False when it is no living child of this server."""
        if pid not in self._children:
            return False
        try:
            os.killpg(pid, signum)
        except ProcessLookupError:
            os.kill(pid, signum)  # not yet a group leader: it was forked a moment ago
        return True

    def _spawn(self, request: dict[str, Any], fds: list[int]) -> int:
        name = request["entry"]
        if name not in self._entries:
            raise OSError(f"unknown entry {name!r}: expected one of {sorted(self._entries)}")
        # all of the request is read before the fork: a child must not fail into the server's loop
        spec = {**request["spec"], "fds": fds} if fds else request["spec"]
        parent_pid = os.getpid() if request["die_with_server"] else None
        output = os.open(
            request["log_path"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
            if pid == 0:
                run_child(
                    self._entries[name],
                    spec,
                    output,
                    parent_pid=parent_pid,
                    close_sockets=self._close_sockets,
                )
        finally:
            os.close(output)
        self._children.add(pid)
        self._returncodes.pop(pid, None)
        log.info("spawned entry=%s pid=%d", name, pid)
        return pid

    def _close_sockets(self) -> None:
        """A client must see the end of its connection when the server dies: no child keeps it."""
        self._selector.close()
        os.close(self._wakeup_read)
        os.close(self._wakeup_write)
        for client in self._clients:
            client.connection.close()
            for fd in client.fds:
                os.close(fd)
        if self._listening is not None:
            self._listening.close()

    def _end_children(self) -> None:
        for signum, grace_s in ((signal.SIGTERM, TERMINATE_GRACE_S), (signal.SIGKILL, 5.0)):
            for pid in self._children:
                self._kill(pid, signum)
            deadline = time.monotonic() + grace_s
            self._reap()
            while self._children and (left_s := deadline - time.monotonic()) > 0:
                select.select([self._wakeup_read], [], [], left_s)
                self._on_signals()
        if self._children:
            log.error("pids=%s did not die of SIGKILL", sorted(self._children))


def serve_connection(
    connection: socket.socket, parent_pid: int, entries: Mapping[str, str] = ENTRIES
) -> NoReturn:
    """Body of a process forked to serve its parent; ends when the parent or its connection does."""
    returncode = 1
    try:
        # not in the parent's process group: a SIGTERM to that is the parent's to answer
        os.setpgid(0, 0)
        die_with_parent(parent_pid)
        ForkServer(
            listening=None, connections=[connection], orphan_timeout_s=0.0, entries=entries
        ).serve()
        returncode = 0
    except BaseException:  # the process's main: what ends it is in its log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(returncode)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="areal_sc.workers.fork_server")
    parser.add_argument("--listen-fd", type=int, required=True, help="inherited listening socket")
    parser.add_argument("--orphan-timeout", type=float, required=True, metavar="SECONDS")
    parser.add_argument("--preload", nargs="*", default=[], metavar="MODULE")
    parser.add_argument("--entry", nargs="*", default=[], metavar="NAME=MODULE:FUNCTION")
    parser.add_argument("--leftovers-of", nargs=2, type=Path, metavar=("RUN_DIR", "MEMORY_ROOT"))
    arguments = parser.parse_args(argv)
    setup_logging("fork-server")
    listening = socket.socket(fileno=arguments.listen_fd)
    listening.set_inheritable(False)
    started = time.monotonic()
    # numpy would start a thread of OpenBLAS when it is imported
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for module_name in arguments.preload:
        importlib.import_module(module_name)
    # the preloaded objects live as long as the process: without them, a child's garbage
    # collections do not write to, and so copy, the pages that hold them
    gc.collect()
    gc.freeze()
    log.info("ready preload_s=%.2f modules=%d", time.monotonic() - started, len(sys.modules))
    entries = dict(entry.split("=", 1) for entry in arguments.entry) or ENTRIES
    ForkServer(
        listening=listening, orphan_timeout_s=arguments.orphan_timeout, entries=entries
    ).serve()
    if arguments.leftovers_of:
        _remove_leftovers(*arguments.leftovers_of)
    return 0


def _remove_leftovers(run_dir: Path, memory_root: Path) -> None:
    """Deletes what a killed script left, unless a script still has the folder."""
    try:
        RunFolder(run_dir).remove_traces()
        clean_leftovers(memory_root)
    except (OSError, ArealError) as error:
        log.warning("not all was deleted that the run left: %s", error)


if __name__ == "__main__":
    sys.exit(main())
