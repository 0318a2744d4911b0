"""A real fork server: start, exit codes, signals, and that nothing outlives it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import pytest

from areal_sc.errors import WorkerLost, WorkerStartError
from areal_sc.workers.fork_client import (
    ForkServerClient,
    connect_fork_server,
    fork_server_child,
    start_fork_server,
)

ENTRIES = {
    "behave": "fork_entries:behave",
    "broken": "fork_entries:no_such_function",
    "exit": "sys:exit",
}

BEHAVE = """
import os, signal, subprocess, sys, time
from areal_sc.errors import ConfigError

def behave(spec):
    match spec["do"]:
        case "return":
            print("printed", spec["value"])
            return spec["value"]
        case "raise":
            raise ValueError("from the child")
        case "raise_ours":
            raise ConfigError("from the child")
        case "report":
            fds = sorted(int(fd) for fd in os.listdir("/proc/self/fd"))
            sockets = [fd for fd in fds if _link(fd).startswith(("socket:", "anon_inode", "pipe:"))]
            os.write(spec["fds"][0], repr((
                os.getsid(0) == os.getpid(), os.readlink("/proc/self/fd/0"), len(sockets),
                signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "colorsys" in sys.modules,
            )).encode())
        case "ignore_sigterm":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(spec["fds"][0], b"ready")
            time.sleep(600)
        case "with_grandchild":
            grandchild = subprocess.Popen(["sleep", "600"])
            os.write(spec["fds"][0], str(grandchild.pid).encode())
            time.sleep(600)
        case "sleep":
            time.sleep(600)

def _link(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""
"""


ANOTHER_USER = """
import os, socket, sys
os.setuid(65534)
client = socket.socket(socket.AF_UNIX)
client.settimeout(20)
client.connect("\\0" + sys.argv[1])
try:
    client.sendall(b"\\x81\\xa2id\\x01")
    print(client.recv(100), end="")
except (ConnectionResetError, BrokenPipeError):
    print(b"", end="")
"""


def address_in(folder: Path) -> str:
    """Of the one server of a test."""
    return f"\0areal-sc-test-{folder}"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ForkServerClient]]:
    """Starts servers that know `BEHAVE`, and ends them afterwards."""
    (tmp_path / "fork_entries.py").write_text(BEHAVE)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    clients: list[ForkServerClient] = []

    def start_one(
        orphan_timeout_s: float = 30.0, preload: tuple[str, ...] = ()
    ) -> ForkServerClient:
        client = start_fork_server(
            address_in(tmp_path),
            preload,
            orphan_timeout_s,
            tmp_path / "server.log",
            environment,
            entries=ENTRIES,
        )
        clients.append(client)
        return client

    yield start_one
    for client in clients:
        client.shutdown()


def is_running(pid: int) -> bool:
    """A zombie that nobody reaps, as in a container without init, has ended too."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_ended(pid: int, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs after {timeout_s} s"
        time.sleep(0.01)


def spawn_with_pipe(client: ForkServerClient, what: str, log: Path) -> tuple[int, bytes]:
    """The process's pid and the first thing that it writes."""
    read_end, write_end = os.pipe()
    pid = client.spawn("behave", {"do": what}, log, fds=[write_end])
    os.close(write_end)
    written = os.read(read_end, 4096)
    os.close(read_end)
    return pid, written


def test_exit_codes_and_output_come_back(
    start: Callable[..., ForkServerClient], tmp_path: Path
) -> None:
    client = start()
    log = tmp_path / "child.log"
    expected = {
        client.spawn("behave", {"do": "return", "value": 0}, log): 0,
        client.spawn("behave", {"do": "return", "value": 7}, log): 7,
        client.spawn("behave", {"do": "raise"}, log): 1,
        client.spawn("behave", {"do": "raise_ours"}, log): 2,
        client.spawn("broken", {}, log): 1,
        client.spawn("exit", {"any": "spec"}, log): 1,
    }
    assert {pid: client.wait(pid, 20.0) for pid in expected} == expected
    assert client.poll() == expected
    assert client.poll() == {}
    text = log.read_text()
    assert "printed 0" in text
    assert "printed 7" in text
    assert "ValueError: from the child" in text
    assert "no_such_function" in text


def test_a_child_starts_clean_in_a_process_that_has_preloaded(
    start: Callable[..., ForkServerClient], tmp_path: Path
) -> None:
    client = start(preload=("colorsys",))
    pid, report = spawn_with_pipe(client, "report", tmp_path / "child.log")
    assert report == b"(True, '/dev/null', 1, True, True)"  # one pipe: the one that it was given
    assert client.wait(pid, 20.0) == 0


def test_a_signal_reaches_the_child_and_its_children(
    start: Callable[..., ForkServerClient], tmp_path: Path
) -> None:
    client = start()
    pid, reply = spawn_with_pipe(client, "with_grandchild", tmp_path / "child.log")
    grandchild = int(reply)
    assert is_running(grandchild)
    assert client.kill(pid, signal.SIGTERM)
    assert client.wait(pid, 20.0) == -signal.SIGTERM
    wait_until_ended(grandchild)
    assert not client.kill(pid, signal.SIGTERM)
    assert not client.kill(os.getpid(), signal.SIGTERM)  # no child of the server


def test_what_is_not_on_the_list_is_refused(
    start: Callable[..., ForkServerClient], tmp_path: Path
) -> None:
    client = start()
    with pytest.raises(WorkerStartError, match=r"unknown entry 'os:system': expected one of"):
        client.spawn("os:system", {}, tmp_path / "child.log")
    with pytest.raises(WorkerStartError, match="No such file"):
        client.spawn("behave", {"do": "sleep"}, tmp_path / "no" / "folder" / "child.log")
    assert client.wait_ready(20.0) > 0  # it still serves


def test_garbage_ends_the_connection_not_the_server(
    start: Callable[..., ForkServerClient], tmp_path: Path
) -> None:
    client = start()
    server_pid = client.wait_ready(20.0)
    incomplete = {"id": 1, "op": "spawn", "entry": "behave", "num_fds": 0, "log_path": "/dev/null"}
    for garbage in (
        b"\xc1\xc1\xc1",
        b"\x93\x01\x02\x03",
        b"\x81\xa2id\x01",
        msgpack.packb(incomplete),
        msgpack.packb({**incomplete, "spec": {}}),
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            other.settimeout(20.0)
            other.connect(address_in(tmp_path))
            other.sendall(garbage)
            assert other.recv(100) == b""
    assert client.wait_ready(20.0) == server_pid


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_not_served(start: Callable[..., ForkServerClient], tmp_path: Path) -> None:
    client = start()
    client.wait_ready(20.0)
    finished = subprocess.run(
        [sys.executable, "-c", ANOTHER_USER, address_in(tmp_path)[1:]],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert finished.stdout == "b''"
    assert "refused a client of uid=65534" in (tmp_path / "server.log").read_text()
    assert client.wait_ready(20.0) > 0


def test_shutdown_ends_children_that_ignore_sigterm(
    start: Callable[..., ForkServerClient], tmp_path: Path
) -> None:
    client = start()
    server_pid = client.wait_ready(20.0)
    gentle = client.spawn("behave", {"do": "sleep"}, tmp_path / "child.log")
    stubborn, reply = spawn_with_pipe(client, "ignore_sigterm", tmp_path / "child.log")
    assert reply == b"ready"
    client.shutdown(timeout_s=20.0)
    assert not any(is_running(pid) for pid in (gentle, stubborn, server_pid))
    with pytest.raises(WorkerLost, match=r"server\.log"):
        client.poll()


def test_children_die_with_a_killed_server_unless_asked_otherwise(
    start: Callable[..., ForkServerClient], tmp_path: Path
) -> None:
    client = start()
    server_pid = client.wait_ready(20.0)
    log = tmp_path / "child.log"
    child = client.spawn("behave", {"do": "sleep"}, log)
    survivor = client.spawn("behave", {"do": "sleep"}, log, die_with_server=False)
    os.kill(server_pid, signal.SIGKILL)
    wait_until_ended(child)
    assert is_running(survivor)
    os.kill(survivor, signal.SIGKILL)
    with pytest.raises(WorkerLost, match="the fork server is gone"):
        client.wait(child, 5.0)


def test_a_failed_preload_is_told(start: Callable[..., ForkServerClient]) -> None:
    client = start(preload=("no_such_module_anywhere",))
    with pytest.raises(WorkerStartError, match=r"did not start: .* see .*server\.log"):
        client.wait_ready(20.0)


def test_a_client_that_comes_later_gets_what_it_missed(
    start: Callable[..., ForkServerClient], tmp_path: Path
) -> None:
    assert connect_fork_server(address_in(tmp_path)) is None
    first = start()
    pid = first.spawn("behave", {"do": "return", "value": 5}, tmp_path / "child.log")
    assert first.wait(pid, 20.0) == 5
    second = connect_fork_server(address_in(tmp_path))
    assert second is not None
    assert second.poll() == {pid: 5}
    second.close()


LAUNCH = """
import os, pathlib, signal, sys
from areal_sc.workers.fork_client import random_address, start_fork_server
folder = pathlib.Path(sys.argv[1])
client = start_fork_server(
    random_address(), (), 0.3, folder / "server.log", entries={"behave": "fork_entries:behave"}
)
child = client.spawn("behave", {"do": "sleep"}, folder / "child.log")
print(client.wait_ready(20.0), child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_when_the_script_is_killed(tmp_path: Path) -> None:
    (tmp_path / "fork_entries.py").write_text(BEHAVE)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])]),
    }
    finished = subprocess.run(
        [sys.executable, "-c", LAUNCH, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert finished.returncode == -signal.SIGKILL, finished.stderr
    for pid in map(int, finished.stdout.split()):
        wait_until_ended(pid)


OWNER = """
import os, signal, sys
from areal_sc.workers.fork_client import fork_server_child
client = fork_server_child({"behave": "fork_entries:behave"})
child = client.spawn("behave", {"do": "sleep"}, sys.argv[1] + "/child.log")
print(client.wait_ready(20.0), child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_own_fork_server_and_its_children_end_with_their_owner(tmp_path: Path) -> None:
    (tmp_path / "fork_entries.py").write_text(BEHAVE)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])]),
    }
    finished = subprocess.run(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert finished.returncode == -signal.SIGKILL, finished.stderr
    for pid in map(int, finished.stdout.split()):
        wait_until_ended(pid)


def test_an_own_fork_server_is_reaped(tmp_path: Path) -> None:
    client = fork_server_child({"exit": "sys:exit"})
    server_pid = client.wait_ready(20.0)
    child = client.spawn("exit", {}, tmp_path / "child.log")
    assert client.wait(child, 20.0) == 1
    client.shutdown()
    assert not Path(f"/proc/{server_pid}").exists()
