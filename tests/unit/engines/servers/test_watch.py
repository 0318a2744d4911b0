"""Busy, paused, hung and dead, told apart by what real processes do."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from waiting import wait_until

from areal_sc.config.server_settings import ServersConfig
from areal_sc.engines.servers.process import (
    find_by_title,
    kill_session,
    mapped_files,
    read_process,
    session_members,
)
from areal_sc.engines.servers.watch import Activity, ServerWatch, why_lost
from areal_sc.errors import PeerLost, RpcTimeout

LIMITS = ServersConfig(hung_after_s=5.0, busy_limit_s=60.0)
LOADS = "loads_*.shm"
COMPUTE = "while True: pass"
SLEEP = "import time; time.sleep(600)"


@pytest.fixture
def start() -> Iterator[Callable[[str], int]]:
    started: list[subprocess.Popen[bytes]] = []

    def run(program: str) -> int:
        command = [sys.executable, "-c", program, "scheduler"]
        process = subprocess.Popen(command, start_new_session=True)
        started.append(process)
        return process.pid

    yield run
    for process in started:
        process.kill()
        process.wait()


def ticks(pid: int) -> int:
    state = read_process(pid)
    assert state
    return state.cpu_ticks


def settle(pid: int) -> None:
    """Waits until a process that sleeps has started up, which also a busy machine lets it do."""
    while True:
        before = ticks(pid)
        time.sleep(0.2)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "S" and ticks(pid) == before:
            return


def verdict(silent_s: float, activity: Activity, *, is_updating: bool = False) -> str | None:
    """`dead` or `hung`, or None for one that is left alone."""
    reason = why_lost(silent_s, activity, LIMITS, is_updating=is_updating)
    return reason and reason.split(":")[0]


def test_one_that_computes_is_busy_for_a_while(start: Callable[[str], int]) -> None:
    pid = start(COMPUTE)
    activity = Activity(pid, [pid])
    activity.note_answer()
    wait_until(lambda: not activity.idle())
    assert verdict(1.0, activity) is None
    assert verdict(6.0, activity) is None
    assert verdict(61.0, activity) == "hung"


def test_one_that_does_nothing_is_hung(start: Callable[[str], int]) -> None:
    pid = start(SLEEP)
    settle(pid)
    activity = Activity(pid, [pid])
    activity.note_answer()
    assert verdict(4.0, activity) is None
    assert verdict(6.0, activity) == "hung"
    assert verdict(6.0, activity, is_updating=True) is None


def test_one_that_waits_for_a_compiler_is_not_hung(start: Callable[[str], int]) -> None:
    """Its schedulers compute nothing; it has the time of a start."""
    pid = start(
        "import signal, subprocess, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        "signal.sigwait([signal.SIGUSR1])\n"
        f"subprocess.run([sys.executable, '-c', {COMPUTE!r}])"
    )
    settle(pid)
    activity = Activity(pid, [pid])
    activity.note_answer()
    assert verdict(6.0, activity) == "hung"
    os.kill(pid, signal.SIGUSR1)
    try:
        wait_until(lambda: len(session_members(pid)) == 2)
        settle(pid)
        wait_until(lambda: activity.is_building(0.5))
        activity.note_answer()
        assert activity.idle() == [pid]
        assert verdict(61.0, activity) is None
        assert verdict(LIMITS.start_timeout_s, activity) == "hung"
    finally:
        kill_session(pid)
    wait_until(lambda: not activity.is_building(0.5))


def test_one_idle_rank_among_busy_ones_is_hung(start: Callable[[str], int]) -> None:
    """The other ranks wait for it, and waiting looks like computing."""
    busy, idle = start(COMPUTE), start(SLEEP)
    settle(idle)
    activity = Activity(busy, [busy, idle])
    activity.note_answer()
    wait_until(lambda: activity.idle() == [idle])
    assert verdict(6.0, activity) == "hung"


def test_one_that_is_stopped_is_hung_even_in_an_update(start: Callable[[str], int]) -> None:
    pid = start(COMPUTE)
    activity = Activity(pid, [pid])
    activity.note_answer()
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: pid in activity.stopped())
    assert verdict(6.0, activity, is_updating=True) == "hung"
    assert verdict(1.0, activity) is None


def test_one_whose_process_ended_is_dead(start: Callable[[str], int]) -> None:
    pid = start(SLEEP)
    activity = Activity(pid, [pid])
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: read_process(pid) is None)  # also before it is reaped
    assert verdict(0.0, activity) == "dead"


def test_a_server_elsewhere_is_judged_by_its_silence() -> None:
    """It has the time of a start, as somebody may start it again."""
    assert verdict(LIMITS.start_timeout_s - 1.0, Activity()) is None
    assert verdict(LIMITS.start_timeout_s, Activity()) == "hung"


def test_a_session_is_found_and_killed_whole(start: Callable[[str], int]) -> None:
    leader = start(f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{SLEEP}'])")
    wait_until(lambda: len(session_members(leader)) == 2)
    members = session_members(leader)
    commands = [Path(f"/proc/{pid}/cmdline") for pid in members]
    # between its fork and the program that it becomes the child has the leader's arguments
    wait_until(lambda: len({command.read_bytes() for command in commands}) == 2)
    assert find_by_title(leader, "scheduler") == [leader]  # by its argument
    kill_session(leader)
    wait_until(lambda: not any(read_process(pid) for pid in members))


class Server:
    """Answers as it is told to."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.is_silent = False
        self.num_questions = 0

    async def probe(self, *, timeout_s: float) -> None:
        self.num_questions += 1
        if self.is_silent:
            await asyncio.sleep(timeout_s)
            raise RpcTimeout("no answer")
        if self.error:
            raise self.error


class OwnProcess:
    """The process of a server, which is this one."""

    pid, schedulers = os.getpid(), ()

    async def wait(self) -> int:
        return await asyncio.get_running_loop().create_future()


class Watched:
    """A watch over a server of somebody else's, or our own, with short times."""

    def __init__(self, process: Any = None) -> None:
        self.server: Any = Server()
        self.num_answers = self.num_refusals = 0
        servers = ServersConfig(start_timeout_s=0.2, busy_limit_s=5.0, probe_interval_s=0.02)
        self.watch = ServerWatch(self.server, process, servers, self.count_refusal, self.count)

    async def count(self) -> None:
        self.num_answers += 1

    def count_refusal(self) -> None:
        self.num_refusals += 1

    async def until_answered(self, number: int) -> None:
        while self.num_answers < number:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_watch_ends_when_the_server_is_silent() -> None:
    watched = Watched()
    running = asyncio.create_task(watched.watch.run())
    await watched.until_answered(1)
    watched.server.is_silent = True
    assert "hung: it has not answered for" in await running


async def test_a_watch_ends_when_the_own_server_cannot_be_reached() -> None:
    watched = Watched(OwnProcess())
    watched.server.error = PeerLost("refused")
    assert await watched.watch.run() == "it does not answer: refused"
    assert watched.num_refusals == 2  # one could have been an accident


async def test_a_server_of_others_that_cannot_be_reached_is_waited_for() -> None:
    watched = Watched()
    running = asyncio.create_task(watched.watch.run())
    await watched.until_answered(1)
    watched.server.error = PeerLost("refused")
    while watched.num_refusals < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert not running.done()
    watched.server.error = None
    watched.watch.suspect()
    await watched.until_answered(watched.num_answers + 1)
    watched.server.error = PeerLost("refused")
    assert "hung: it has not answered for" in await running


async def test_a_watch_ends_when_it_is_told_so() -> None:
    watched = Watched()
    running = asyncio.create_task(watched.watch.run())
    await asyncio.sleep(0)
    watched.watch.fail("first")
    watched.watch.fail("second")
    assert await running == "first"


async def test_a_suspected_server_is_asked_at_once() -> None:
    watched = Watched()
    watched.watch._servers.probe_interval_s = 600.0
    running = asyncio.create_task(watched.watch.run())
    await watched.until_answered(1)
    watched.watch.suspect()
    await watched.until_answered(2)
    watched.watch.fail("end")
    await running


async def test_time_in_which_nobody_listened_does_not_count() -> None:
    watched = Watched()
    running = asyncio.create_task(watched.watch.run())
    await watched.until_answered(2)
    time.sleep(0.5)  # noqa: ASYNC251 - the event loop stands still, and not the server
    await watched.until_answered(watched.num_answers + 3)
    assert not running.done()
    watched.watch.fail("end")
    await running


def test_only_what_the_own_processes_map_is_shared_by_them(start: Callable[[str], int]) -> None:
    names = [f"/dev/shm/loads_{uuid4().hex[:12]}_{i}.shm" for i in range(2)]
    program = (
        "import mmap, sys, time\n"
        "file = open({!r}, 'wb+'); file.truncate(4096)\n"
        "mapped = mmap.mmap(file.fileno(), 4096); file.close(); time.sleep(600)"
    )
    sessions = [start(program.format(name)) for name in names]
    try:
        for session, name in zip(sessions, names, strict=True):
            wait_until(lambda session=session: bool(mapped_files(session, LOADS)))
            assert mapped_files(session, LOADS) == {Path(name)}
        kill_session(sessions[0])
        wait_until(lambda: not session_members(sessions[0]))
        assert mapped_files(sessions[0], LOADS) == set()
    finally:
        for name in names:
            Path(name).unlink(missing_ok=True)
