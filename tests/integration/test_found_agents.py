"""A script is killed; the next one finds its agent and its workers. Real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from integration.test_heartbeats import LIMIT_S, orders, scheduler_in
from waiting import is_running, until

from areal_sc.errors import RunFolderError, StaleTerm
from areal_sc.fleet.fleet import Fleet
from areal_sc.fleet.runtime import Runtime
from areal_sc.run.agent_files import living_agents
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers import agent_calls
from areal_sc.system.disk import Disk
from areal_sc.workers.calls import PING

SCRIPT = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from integration.test_heartbeats import fleet_of

async def main():
    async with fleet_of(3, Path(sys.argv[2])) as fleet:
        pids = [member.worker.pid for member in fleet.members]
        print(*pids, flush=True)
        await asyncio.sleep(1000.0)

asyncio.run(main())
"""


@dataclass
class Left:
    """What a killed script has left."""

    run_dir: Path
    agent: int
    workers: list[int]

    @property
    def living(self) -> list[int]:
        return [pid for pid in (self.agent, *self.workers) if is_running(pid)]


@contextmanager
def script_in(run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A script whose three workers are about to serve; its output are their process ids."""
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(Path(__file__).parents[1]), str(run_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert script.stdout
    try:
        yield script
    finally:
        script.kill()
        script.wait()
        script.stdout.close()


@contextmanager
def killed_script(run_dir: Path) -> Iterator[Left]:
    with script_in(run_dir) as script:
        assert script.stdout
        workers = list(map(int, script.stdout.readline().split()))
    (agent,) = living_agents(run_dir)
    left = Left(run_dir, agent.pid, workers)
    try:
        assert len(left.living) == 4
        yield left
    finally:
        if is_running(agent.pid):
            os.kill(agent.pid, signal.SIGKILL)


@asynccontextmanager
async def next_start(run_dir: Path, **changes: Any) -> AsyncIterator[Fleet]:
    """A fleet that launches nothing yet, of a script that is started again."""
    scheduler = scheduler_in(run_dir, **changes)
    runtime = Runtime.create(scheduler.keys, scheduler.term)
    fleet = Fleet(scheduler, runtime, lambda event: None)
    try:
        yield fleet
    finally:
        await fleet.close()
        await runtime.transport.close()
        scheduler.close()


def assert_nothing_is_left(run_dir: Path) -> None:
    assert not list((run_dir / "memory").iterdir())
    assert not (run_dir / "keys.json").exists()
    assert not list((run_dir / "agents").iterdir())


async def test_living_workers_are_adopted_and_others_end(tmp_path: Path) -> None:
    with killed_script(tmp_path) as left:
        async with next_start(tmp_path) as fleet:
            same, other, _ = orders(3)
            await fleet.launch([same, replace(other, store_bytes=2)], adopts=True)
            first, second = fleet.members
            assert first.is_adopted
            assert not second.is_adopted
            assert first.worker.pid == left.workers[0]
            assert second.worker.pid not in left.workers
            assert left.living == [left.agent, left.workers[0]], "2 of another order, 3 of none"
            await fleet.call_all(PING, None, timeout_s=LIMIT_S)
            os.kill(first.worker.pid, signal.SIGKILL)
            await until(lambda: first.failure is not None)
            await fleet.restart([first])
            assert not first.is_adopted
            await fleet.call(first, PING, None, timeout_s=LIMIT_S)
        assert left.living == []
    assert_nothing_is_left(tmp_path)


async def test_who_adopts_nothing_starts_all_anew(tmp_path: Path) -> None:
    with killed_script(tmp_path) as left:
        async with next_start(tmp_path) as fleet:
            await fleet.launch(orders(3))
            assert not any(member.is_adopted for member in fleet.members)
            assert left.living == [left.agent]
    assert_nothing_is_left(tmp_path)


async def test_a_found_agent_that_dies_is_replaced(tmp_path: Path) -> None:
    with killed_script(tmp_path) as left:
        async with next_start(tmp_path) as fleet:
            await fleet.launch(orders(3), adopts=True)
            assert all(member.is_adopted for member in fleet.members)
            os.kill(left.agent, signal.SIGKILL)
            await until(lambda: all(member.failure for member in fleet.members))
            await fleet.restart(fleet.members)
            (agent,) = living_agents(tmp_path)
            assert agent.pid != left.agent
            await fleet.call_all(PING, None, timeout_s=LIMIT_S)
    assert_nothing_is_left(tmp_path)


async def test_an_agent_with_other_settings_ends_with_its_workers(tmp_path: Path) -> None:
    with killed_script(tmp_path) as left:
        async with next_start(tmp_path, max_deaths=7, hung_after_s=11.0) as fleet:
            assert left.living == []
            await fleet.launch(orders(1), adopts=True)
            assert not fleet.members[0].is_adopted
    assert_nothing_is_left(tmp_path)


async def test_an_agent_that_does_not_answer_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_calls, "REACH_LIMIT_S", 0.5)
    with killed_script(tmp_path) as left:
        os.kill(left.agent, signal.SIGSTOP)
        async with next_start(tmp_path) as fleet:
            assert not is_running(left.agent)
            await until(lambda: left.living == [])
            await fleet.launch(orders(1), adopts=True)
            assert not fleet.members[0].is_adopted
    assert_nothing_is_left(tmp_path)


async def test_a_controller_whose_term_is_over_changes_nothing(tmp_path: Path) -> None:
    """Its lock was deleted, say, while it was stopped, and another start has taken the run over."""
    async with next_start(tmp_path) as first:
        await first.launch(orders(2))
        (tmp_path / ".lock").unlink()
        async with next_start(tmp_path) as second:
            await second.launch(orders(2), adopts=True)
            assert all(member.is_adopted for member in second.members)
            await second.call_all(PING, None, timeout_s=LIMIT_S)
            await until(lambda: all(member.failure for member in first.members))
            causes = [member.failure and member.failure.__cause__ for member in first.members]
            assert all(isinstance(cause, StaleTerm) for cause in causes)
            for member in first.members:  # beside the fleet, which asks no lost worker
                with pytest.raises(StaleTerm, match="term 2, has taken the run over; this one, of"):
                    await member.connection.call(PING, None, timeout_s=LIMIT_S)
            term = first._scheduler.term
            assert term
            with pytest.raises(StaleTerm, match=rf"term 2: process {os.getpid()} on .* of term 1,"):
                term.check()
            (node,) = await first._scheduler.nodes()
            with pytest.raises(StaleTerm):
                await first._scheduler.renew(node, node.facts.incarnation)
            journal = Disk(term.check)
            with pytest.raises(StaleTerm):
                journal.create(tmp_path / "ledger" / "1", b"")
            await first.close()
            first._scheduler.close()
            assert (tmp_path / "keys.json").exists()
            assert len(living_agents(tmp_path)) == 1
            await second.call_all(PING, None, timeout_s=LIMIT_S)
    assert_nothing_is_left(tmp_path)


def stop_run(run_dir: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "areal_sc", "stop", str(run_dir), "--timeout", "50"]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_what_a_killed_script_has_left_is_stopped_from_outside(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.open(config_text="seed: 0\n")
    with killed_script(tmp_path / "run") as left:
        keys = tmp_path / "run" / "keys.json"
        keys.rename(tmp_path / "away")
        stopped = stop_run(tmp_path / "run")
        assert (stopped.returncode, len(left.living)) == (4, 4), stopped
        assert "keys cannot be read" in " ".join(stopped.stderr.split())
        (tmp_path / "away").rename(keys)
        stopped = stop_run(tmp_path / "run")
        assert stopped.returncode == 0, stopped
        assert "no script of the run is heard; its workers end" in stopped.stdout
        assert "nothing of the run is left" in stopped.stdout
        assert left.living == []
    assert_nothing_is_left(tmp_path / "run")


def test_a_script_that_a_signal_has_stopped_is_stopped_from_outside(tmp_path: Path) -> None:
    """It is heard again when it goes on, and then ends as it would by Ctrl-C."""
    with RunFolder(tmp_path) as folder:
        folder.open(config_text="seed: 0\n")
    with script_in(tmp_path) as script:
        assert script.stdout
        assert script.stdout.readline()
        script.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, script.pid, os.WSTOPPED | os.WNOWAIT)
        stopped = stop_run(tmp_path)
        assert stopped.returncode == 0, stopped
        assert f"process {script.pid} on" in stopped.stdout
        assert "was stopped by a signal, and goes on now" in stopped.stdout
        assert script.wait(LIMIT_S) == -signal.SIGINT
    assert_nothing_is_left(tmp_path)


def _of_others(keys: Path) -> None:
    keys.chmod(0o644)


def _damaged(keys: Path) -> None:
    keys.write_text("{}")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (Path.unlink, "cannot be read from"),
        (_of_others, "expected mode 0600, got 0644"),
        (_damaged, "does not hold the keys of a run"),
    ],
)
async def test_workers_without_keys_are_named_and_live_on(
    tmp_path: Path, spoil: Callable[[Path], None], why: str
) -> None:
    with killed_script(tmp_path) as left:
        keys = tmp_path / "keys.json"
        content = keys.read_bytes()
        spoil(keys)
        with pytest.raises(RunFolderError, match=f"process {left.agent} on .*{why}"):
            scheduler_in(tmp_path)
        assert len(left.living) == 4
        keys.write_bytes(content)
        keys.chmod(0o600)
        async with next_start(tmp_path) as fleet:
            await fleet.launch(orders(3), adopts=True)
            assert all(member.is_adopted for member in fleet.members)


@contextmanager
def stranger_process() -> Iterator[subprocess.Popen[bytes]]:
    """Some program that waits."""
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield stranger
    finally:
        assert stranger.stdin
        stranger.stdin.close()
        stranger.wait(LIMIT_S)


async def test_a_process_that_has_the_id_of_a_dead_agent_is_left_alone(tmp_path: Path) -> None:
    with killed_script(tmp_path) as left:
        (file,) = living_agents(tmp_path)
        os.kill(left.agent, signal.SIGKILL)
        await until(lambda: left.living == [])
    with stranger_process() as stranger:
        forged = replace(file, pid=stranger.pid)
        lock = forged.write(tmp_path)  # as if it lived
        assert forged.process() is None, "it began at another time"
        lock.close()
        async with next_start(tmp_path) as fleet:
            await fleet.launch(orders(1), adopts=True)
        assert stranger.poll() is None
    assert_nothing_is_left(tmp_path)
