"""A real fork server: start, exit codes, signals, and that nothing outlives it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from waiting import is_running, until

from areal_sc.errors import WorkerLost, WorkerStartError
from areal_sc.system.fork_server import Child, ForkServer
from areal_sc.system.process import FOR_SCRIPT, children_of

LIMIT_S = 120.0

BEHAVE = """
import os, signal, subprocess, sys, time
from areal_sc.errors import ConfigError
from areal_sc.system.process import FOR_SCRIPT

def prepare():
    import colorsys

def behave(spec):
    match spec["do"]:
        case "return":
            print("printed", spec["value"])
            return spec["value"]
        case "raise":
            raise ValueError("from the child")
        case "raise_ours":
            raise ConfigError("from the child")
        case "exit":
            sys.exit("any text")
        case "close_output":
            sys.stdout = sys.stderr = None
            return 6
        case "report":
            fds = [int(fd) for fd in os.listdir("/proc/self/fd")]
            files = [fd for fd in fds if _link(fd).startswith(("socket:", "anon_inode", "pipe:"))]
            os.write(spec["fd"], repr((
                os.getsid(0) == os.getpid(), os.readlink("/proc/self/fd/0"),
                sorted(set(files) - {1, 2, spec["fd"]}),
                {signal.getsignal(number).__name__ for number in FOR_SCRIPT},
                {"wave", "colorsys"} <= set(sys.modules),
            )).encode())
        case "tell_proxies":
            import urllib.request
            spared = [urllib.request.proxy_bypass(host) for host in spec["hosts"]]
            os.write(spec["fd"], repr(list(map(bool, spared))).encode())
        case "fork":
            fork = os.fork()
            if fork == 0:
                time.sleep(600)
            os.kill(fork, signal.SIGTERM)
            return os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) + 100
        case "fork_with_little_cpu_time":
            import resource
            fork = os.fork()
            if fork == 0:
                resource.setrlimit(resource.RLIMIT_CPU, (1, resource.RLIM_INFINITY))
                while True:
                    pass
            return os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) + 100
        case "ignore_sigterm":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(spec["fd"], b"ready")
            time.sleep(600)
        case "with_grandchild" | "leave_grandchild" as what:
            grandchild = subprocess.Popen(["sleep", "600"])
            os.write(spec["fd"], str(grandchild.pid).encode())
            time.sleep(600 if what == "with_grandchild" else 0)
        case "with_daemon" | "leave_daemon" as what:
            if (first := os.fork()) == 0:
                os.setsid()
                if os.fork() == 0:  # an orphan of a session that has no leader
                    shell = ["sh", "-c", "sleep 600; true"]
                    below = subprocess.Popen(shell, start_new_session=True)
                    os.write(spec["fd"], f"{os.getpid()} {below.pid}".encode())
                    time.sleep(600)
                os._exit(0)
            os.waitpid(first, 0)
            time.sleep(600 if what == "with_daemon" else 0)
        case "sleep":
            time.sleep(600)

def _link(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""
"""


@pytest.fixture(autouse=True)
def targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children of this process find `BEHAVE`."""
    (tmp_path / "fork_targets.py").write_text(BEHAVE)
    monkeypatch.syspath_prepend(str(tmp_path))


@asynccontextmanager
async def started(
    preload: tuple[str, ...] = (), target: str = "fork_targets:behave"
) -> AsyncIterator[ForkServer]:
    server = ForkServer(target, preload)
    try:
        yield server
    finally:
        await server.close()
        assert not os.path.exists(f"/proc/{server.pid}"), "it is reaped"  # noqa: ASYNC240


async def wait_until_ended(*pids: int) -> None:
    await until(lambda: not any(map(is_running, pids)))


def has_pending_signals(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return re.search(r"^(Sig|Shd)Pnd:\t0*[1-9a-f]", status, re.MULTILINE) is not None


async def wait_until_taken(pid: int) -> None:
    """No signal is left that the process has not answered."""
    await until(lambda: not has_pending_signals(pid))


async def test_what_a_child_forks_can_be_ended_by_sigterm(tmp_path: Path) -> None:
    """As `multiprocessing` does it; the fork server and the child itself go on."""
    async with started() as server:
        child = await server.spawn({"do": "fork"}, tmp_path / "child.log")
        for number in FOR_SCRIPT:
            os.kill(server.pid, number)
            # the stack that faulthandler gives to handlers does not hold seven of them at once
            await wait_until_taken(server.pid)
        assert await code_of(child) == 100 - signal.SIGTERM
        child.connection.close()
        child = await server.spawn({"do": "return", "value": 3}, tmp_path / "child.log")
        assert await code_of(child) == 3
        child.connection.close()


async def test_what_a_child_forks_ends_by_its_own_limit_of_cpu_time(tmp_path: Path) -> None:
    async with started() as server:
        child = await spawn(server, {"do": "fork_with_little_cpu_time"}, tmp_path / "child.log")
        assert await code_of(child) == 100 - signal.SIGXCPU


async def code_of(child: Child) -> int:
    return await asyncio.wait_for(asyncio.shield(child.ended), LIMIT_S)


async def spawn_and_hear(server: ForkServer, what: str, log: Path) -> tuple[Child, bytes]:
    """The process and the first thing that it writes."""
    child = await server.spawn({"do": what}, log)
    with child.connection:
        return child, await asyncio.get_running_loop().sock_recv(child.connection, 4096)


async def spawn(server: ForkServer, spec: dict[str, Any], log: Path) -> Child:
    """A process that writes nothing."""
    child = await server.spawn(spec, log)
    child.connection.close()
    return child


async def test_exit_codes_and_output_come_back(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    async with started() as server:
        spawned = [
            (await spawn(server, {"do": "return", "value": 0}, log), 0),
            (await spawn(server, {"do": "return", "value": 7}, log), 7),
            (await spawn(server, {"do": "raise"}, log), 1),
            (await spawn(server, {"do": "raise_ours"}, log), 2),
            (await spawn(server, {"do": "exit"}, log), 1),
            (await spawn(server, {"do": "close_output"}, log), 6),
        ]
        for child, code in spawned:
            assert await code_of(child) == code
            assert child.how == f"exit code {code}"
    async with started(target="fork_targets:no_such_function") as server:
        assert await code_of(await spawn(server, {}, log)) == 1
    text = log.read_text()
    assert "printed 0" in text
    assert "printed 7" in text
    assert "ValueError: from the child" in text
    assert "no_such_function" in text


async def test_children_reach_own_addresses_without_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    hosts = ["127.0.0.1:80", "localhost:80", "judge.example:80"]
    async with started() as server:
        child = await server.spawn({"do": "tell_proxies", "hosts": hosts}, tmp_path / "child.log")
        with child.connection:
            told = await asyncio.get_running_loop().sock_recv(child.connection, 4096)
    assert told == b"[True, True, False]"


async def test_many_are_started_at_a_time(tmp_path: Path) -> None:
    """Their requests are larger together than what the socket holds."""
    async with started() as server:
        spec = {"do": "return", "value": 3, "padding": "x" * 50_000}
        spawning = [spawn(server, spec, tmp_path / "child.log") for _ in range(20)]
        children = await asyncio.gather(*spawning)
        assert len({child.pid for child in children}) == 20
        assert [await code_of(child) for child in children] == [3] * 20


ASK_FOR_A_REPORT = """
import asyncio
from areal_sc.system.fork_server import ForkServer

server = ForkServer("fork_targets:behave", ("wave", "fork_targets:prepare"))

async def main():
    child = await server.spawn({"do": "report"}, "child.log")
    print((await asyncio.get_running_loop().sock_recv(child.connection, 4096)).decode())
    child.connection.close()
    print(await child.ended)
    await server.close()

asyncio.run(main())
"""


def test_a_child_starts_clean_in_a_process_that_has_preloaded(tmp_path: Path) -> None:
    """Its owner is a process of its own: what pytest and other tests have open is inherited.

    The child leaves to the script what is sent to all processes.
    """
    owner = subprocess.run(
        [sys.executable, "-c", ASK_FOR_A_REPORT],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert owner.stdout == "(True, '/dev/null', [], {'be_deaf'}, True)\n0\n", owner.stderr


async def test_a_child_is_killed_with_its_own_children(tmp_path: Path) -> None:
    async with started() as server:
        child, reply = await spawn_and_hear(server, "with_grandchild", tmp_path / "rollout-12.log")
        assert is_running(int(reply))
        shown = Path(f"/proc/{child.pid}/comm").read_text()  # noqa: ASYNC240
        assert shown == "real:rollout/12\n", "15 characters at most, and the number among them"
        server.kill(child)
        assert await code_of(child) == -signal.SIGKILL
        assert child.how == "signal 9 (SIGKILL)"
        await wait_until_ended(int(reply))
        server.kill(child)  # nothing happens


async def test_what_a_child_leaves_ends_with_it(tmp_path: Path) -> None:
    async with started() as server:
        child, reply = await spawn_and_hear(server, "leave_grandchild", tmp_path / "child.log")
        assert await code_of(child) == 0
        await wait_until_ended(int(reply))


async def test_daemons_and_sessions_of_a_child_end_with_it(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    async with started() as server:
        lasting, daemons = await spawn_and_hear(server, "with_daemon", log)
        killed, reply = await spawn_and_hear(server, "with_daemon", log)
        server.kill(killed)
        await wait_until_ended(killed.pid, *map(int, reply.split()))
        left, reply = await spawn_and_hear(server, "leave_daemon", log)
        await wait_until_ended(left.pid, *map(int, reply.split()))
        pids = [lasting.pid, *map(int, daemons.split())]
        assert all(map(is_running, pids)), "those of another child stay"
    assert not any(map(is_running, pids)), "they are gone when the server is"


async def test_what_cannot_be_started_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    async with started() as server:
        with pytest.raises(WorkerStartError, match="No such file"):
            await spawn(server, {"do": "sleep"}, tmp_path / "no" / "folder" / "child.log")
        with pytest.raises(WorkerStartError, match="a request of 10000"):
            await spawn(server, {"do": "sleep", "padding": "x" * 10_000_000}, log)
        child = await spawn(server, {"do": "return", "value": 0}, log)
        assert await code_of(child) == 0, "it still serves"


async def test_a_child_that_nobody_waits_for_any_more_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    async with started() as server:
        spawning = asyncio.create_task(spawn(server, {"do": "sleep"}, log))
        await asyncio.sleep(0)
        spawning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await spawning
        child = await spawn(server, {"do": "return", "value": 0}, log)
        assert await code_of(child) == 0
        await wait_until_ended(*children_of(server.pid))


async def test_the_end_of_the_server_ends_children_that_ignore_sigterm(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    async with started() as server:
        stubborn, reply = await spawn_and_hear(server, "ignore_sigterm", log)
        assert reply == b"ready"
        await server.close()
        assert not any(is_running(pid) for pid in (stubborn.pid, server.pid))
        with pytest.raises(WorkerLost, match="the fork server is gone"):
            await spawn(server, {"do": "sleep"}, log)


async def test_children_die_with_a_killed_server(tmp_path: Path) -> None:
    async with started() as server:
        child = await spawn(server, {"do": "sleep"}, tmp_path / "child.log")
        os.kill(server.pid, signal.SIGKILL)
        assert await code_of(child) == -signal.SIGKILL
        assert server.is_gone.is_set()
        await wait_until_ended(child.pid)


async def test_a_failed_preload_ends_the_server(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with started(preload=("no_such_module_anywhere",)) as server:
        with pytest.raises(WorkerLost, match="the fork server is gone"):
            await spawn(server, {}, tmp_path / "child.log")
    assert "No module named 'no_such_module_anywhere'" in capfd.readouterr().err


async def test_a_server_whose_owner_is_silent_ends_with_its_children(tmp_path: Path) -> None:
    async with started() as server:
        child = await spawn(server, {"do": "sleep"}, tmp_path / "child.log")
        server.go_on(0.2)
        assert await code_of(child) == -signal.SIGKILL
        await asyncio.wait_for(server.is_gone.wait(), LIMIT_S)


OWNER = """
import asyncio, os, signal, sys
from areal_sc.system.fork_server import ForkServer

async def main():
    server = ForkServer("fork_targets:behave")
    child = await server.spawn({"do": "with_daemon"}, sys.argv[1] + "/child.log")
    daemons = await asyncio.get_running_loop().sock_recv(child.connection, 4096)
    print(server.pid, child.pid, daemons.decode(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_server_children_and_their_daemons_end_with_their_owner(tmp_path: Path) -> None:
    paths = [str(tmp_path), str(Path(__file__).parents[3])]
    finished = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", OWNER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert finished.returncode == -signal.SIGKILL, finished.stderr
    await wait_until_ended(*map(int, finished.stdout.split()))
