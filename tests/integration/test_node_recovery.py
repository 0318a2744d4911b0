"""Real workers, agents and fork servers are killed, stopped and started again."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from integration.run_process import tiny_run
from waiting import until

from areal_sc.config.schema import Device, SchedulerConfig, TransportConfig
from areal_sc.errors import RunFolderError, WorkerError, WorkerStartError
from areal_sc.fleet.recovery import Recovery
from areal_sc.fleet.runtime import Runtime
from areal_sc.fleet.worker_life import Died, FleetEvent, RunFailed, UnitSilent
from areal_sc.nodes.spec import WorkerOrder
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.local import LocalScheduler
from areal_sc.transport.shards.memory_folder import user_folder
from areal_sc.transport.sockets.interface import port_of
from areal_sc.workers.calls import PING

PROGRAM = Path(__file__).with_name("beating_agent.py")
LIMIT_S = 60.0
"""Far above what anything here takes, for a machine that is busy with other work."""


def processes(run_dir: Path) -> dict[int, str]:
    """Process id -> name, such as `areal:agent`, of those that an agent of the run has begun."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f'"run_dir":"{run_dir}"'.encode() in (folder / "cmdline").read_bytes():
                found[int(folder.name)] = (folder / "comm").read_text().strip()
        except OSError:
            continue
    return found


def pid_of(run_dir: Path, name: str) -> int | None:
    """Of the agent, or of its own fork server; None while there is none."""
    named = [pid for pid, its_name in processes(run_dir).items() if its_name == f"areal:{name}"]
    if name == "forks":  # a rollout worker has one, too
        agent = pid_of(run_dir, "agent")
        named = [pid for pid in named if parent_of(pid) == agent]
    return named[0] if named else None


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill(pid: int | None) -> None:
    assert pid
    os.kill(pid, signal.SIGKILL)


def scheduler_in(run_dir: Path) -> LocalScheduler:
    config = SchedulerConfig(
        run_dir=str(run_dir),
        transport=TransportConfig(shared_memory=str(run_dir / "memory")),
        heartbeat_interval_s=1.0,  # five are missed before a worker is lost: a busy machine stalls
        orphan_timeout_s=100.0,
    )
    return LocalScheduler(config, command=(sys.executable, str(PROGRAM)))


def assert_nothing_is_left(run_dir: Path) -> None:
    assert not processes(run_dir)
    assert list((run_dir / "memory").iterdir()) == []
    assert not RunFolder(run_dir).keys_path.exists()


class Guarded:
    """Two workers, each a unit of its own."""

    def __init__(self, scheduler: LocalScheduler, runtime: Runtime) -> None:
        self.heard: list[FleetEvent] = []
        self.recovery = Recovery(scheduler, runtime, self.heard.append)
        self.fleet = self.recovery.fleet

    @property
    def given_up(self) -> list[WorkerError | RunFolderError]:
        return [event.cause for event in self.heard if isinstance(event, RunFailed)]

    async def start(self) -> None:
        await self.fleet.launch(
            [WorkerOrder("rollout", index, "none", {}, Device.cpu, 1) for index in range(2)]
        )
        self.recovery.begin(self._bring_up)

    async def _bring_up(self, unit: str) -> None:
        (member,) = (member for member in self.fleet.members if member.name == unit)
        await self.fleet.call(member, PING, None, timeout_s=LIMIT_S)

    async def wait_until_ready(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            for member in self.fleet.members:
                await self.recovery.wait_until_ready(member)
                await self.fleet.call(member, PING, None, timeout_s=LIMIT_S)

    async def close(self) -> None:
        await self.recovery.close()
        await self.fleet.close()


@asynccontextmanager
async def guarded_in(run_dir: Path, max_deaths: int = 5) -> AsyncIterator[Guarded]:
    scheduler = scheduler_in(run_dir)
    scheduler.config.max_deaths = max_deaths
    runtime = Runtime.create(scheduler.keys)
    guarded = Guarded(scheduler, runtime)
    try:
        await guarded.start()
        yield guarded
    finally:
        await guarded.close()
        await runtime.transport.close()
        scheduler.close()
    assert_nothing_is_left(run_dir)


@pytest.mark.parametrize("killed", [["forks"], ["agent"], ["agent", "memory"]], ids="-".join)
async def test_a_node_that_is_lost_is_lent_anew(tmp_path: Path, killed: list[str]) -> None:
    async with guarded_in(tmp_path) as guarded:
        before = [member.worker for member in guarded.fleet.members]
        token = (next(user_folder(tmp_path / "memory").iterdir()) / "node").read_text()
        old = processes(tmp_path)
        for name in killed:
            if name == "memory":  # another run has cleaned up at a bad moment
                shutil.rmtree(user_folder(tmp_path / "memory"))
            else:
                kill(pid_of(tmp_path, name))
        await until(lambda: not guarded.fleet.members[0].life.is_ready)
        await guarded.wait_until_ready()
        after = [member.worker for member in guarded.fleet.members]
        assert [w.address for w in after] == [w.address for w in before]
        assert all(a.incarnation != b.incarnation for a, b in zip(after, before, strict=True))
        assert not old.keys() & processes(tmp_path).keys()
        (run_memory,) = user_folder(tmp_path / "memory").iterdir()
        assert ((run_memory / "node").read_text() == token) is ("memory" not in killed)
        assert not guarded.given_up


async def test_a_stopped_worker_that_comes_back_is_dead_and_its_successor_has_its_port(
    tmp_path: Path,
) -> None:
    async with guarded_in(tmp_path) as guarded:
        stopped, neighbour = (member.worker for member in guarded.fleet.members)
        member = guarded.fleet.members[0]
        os.kill(stopped.pid, signal.SIGSTOP)
        await until(lambda: guarded.recovery.num_restarts)  # a loss may last for milliseconds
        assert UnitSilent(member.name) in guarded.heard, "it was silent before it was lost"
        await until(lambda: stopped.pid not in processes(tmp_path))
        await guarded.wait_until_ready()
        assert member.worker.address == stopped.address
        assert member.worker.pid != stopped.pid
        assert guarded.fleet.members[1].worker == neighbour


@pytest.mark.parametrize("is_freed", [True, False])
async def test_a_worker_whose_port_is_taken_waits_for_it(tmp_path: Path, is_freed: bool) -> None:
    """Another port would not do: that one is in the addresses of the shards that it adopts."""
    async with guarded_in(tmp_path, max_deaths=20 if is_freed else 1) as guarded:
        member = guarded.fleet.members[0]
        await guarded.fleet.kill([member])
        with socket.create_server(("127.0.0.1", port_of(member.worker.address))):
            assert member.failure
            life = member.life.unit, member.worker.incarnation
            guarded.recovery.tell(Died(*life, member.failure))
            await until(lambda: guarded.recovery.num_restarts > 1 or guarded.given_up)
        if is_freed:
            await guarded.wait_until_ready()
            return
        await until(lambda: guarded.given_up)
        (cause,) = guarded.given_up
        assert "rollout/0 died 2 times in a row" in str(cause)
        address = member.worker.address
        assert f"cannot listen on {address}: Address already in use" in cause.log_tail[-1]


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_scheduler_that_is_closed_while_it_lends_anew_leaves_nothing(
    tmp_path: Path, has_begun: bool
) -> None:
    scheduler = scheduler_in(tmp_path)
    try:
        (node,) = await scheduler.nodes()
        agent = pid_of(tmp_path, "agent")
        renewing = asyncio.create_task(scheduler.renew(node, node.facts.incarnation))
        again = asyncio.create_task(scheduler.renew(node, node.facts.incarnation))
        if has_begun:
            await until(lambda: any(pid != agent for pid in processes(tmp_path)))
        else:
            await asyncio.sleep(0)
    finally:
        await asyncio.to_thread(scheduler.close)
    outcomes = await asyncio.gather(renewing, again, return_exceptions=True)
    assert all(outcome is None or isinstance(outcome, WorkerStartError) for outcome in outcomes)
    assert_nothing_is_left(tmp_path)


def test_a_run_that_is_killed_while_its_node_is_lent_anew_leaves_nothing(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    memory = tmp_path / "memory"
    settings = ("total_steps=100000", f"transport.shared_memory={memory}")
    with tiny_run(tmp_path / "run", tiny_model_folder, *settings) as run:
        run.wait_for_step(1)
        agent = pid_of(run.run_dir, "agent")
        kill(agent)
        run.wait_until(lambda: pid_of(run.run_dir, "agent") not in (agent, None), "a new agent")
        run.send(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL, run.story()
        run.wait_until_gone()
        assert list(memory.iterdir()) == []
        assert not RunFolder(run.run_dir).keys_path.exists()
