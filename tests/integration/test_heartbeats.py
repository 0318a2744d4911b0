"""Who is alive, found out with real processes that block, stop and die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from integration.beating_worker import BLOCK, FAIL, WAIT
from integration.cutting_proxy import cutting_proxy

from areal_sc.config.schema import Device, SchedulerConfig, TransportConfig
from areal_sc.controller.fleet import Fleet, Member
from areal_sc.controller.runtime import Runtime
from areal_sc.errors import ModelError, WorkerLost
from areal_sc.run_folder import RunFolder
from areal_sc.schedulers.base import LaunchRequest, RunningWorker
from areal_sc.transport.keys import RunKeys
from areal_sc.workers.calls import PING
from areal_sc.workers.spec import WorkerReport, WorkerSpec

PROGRAM = Path(__file__).with_name("beating_worker.py")
INTERVAL_S = 0.5
BOUND_S = 5 * INTERVAL_S
"""What a silent worker is lost after."""
LIMIT_S = 60.0
"""Far above what anything here takes, for a machine that is busy with other work."""


class ProcessScheduler:
    """Starts `beating_worker.py`."""

    def __init__(self, run_dir: Path, **changes: Any) -> None:
        self.config = SchedulerConfig(
            run_dir=str(run_dir),
            transport=TransportConfig(),
            **{"heartbeat_interval_s": INTERVAL_S, "orphan_timeout_s": 100.0, **changes},
        )
        self.run_dir = run_dir
        self.keys = RunKeys.create()
        self.keys.write(RunFolder(run_dir).keys_path)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        (run_dir / "workers").mkdir()
        (run_dir / "logs").mkdir()

    async def launch(self, request: LaunchRequest) -> RunningWorker:
        spec = WorkerSpec(
            role=request.role,
            index=request.index,
            run_id="test",
            incarnation=f"i{request.index}",
            engine=request.engine,
            engine_config={},
            run_dir=str(self.run_dir),
            memory_root=str(self.run_dir),
            transport={},
            store_bytes=1,
            heartbeat_interval_s=self.config.heartbeat_interval_s,
            orphan_timeout_s=self.config.orphan_timeout_s,
        )
        self._start(spec)
        await until(lambda: WorkerReport.read(spec.report_path, spec.incarnation))
        report = WorkerReport.read(spec.report_path, spec.incarnation)
        assert report is not None
        return RunningWorker(spec, report)

    def _start(self, spec: WorkerSpec) -> None:
        with spec.log_path.open("wb") as log:
            self.processes[spec.name] = subprocess.Popen(
                [sys.executable, str(PROGRAM), json.dumps(asdict(spec))], stdout=log, stderr=log
            )

    async def exit_statuses(self, workers: Sequence[RunningWorker]) -> dict[str, str]:
        codes = {worker.name: self.processes[worker.name].poll() for worker in workers}
        return {name: f"exit code {code}" for name, code in codes.items() if code is not None}

    async def stop(self, workers: Sequence[RunningWorker]) -> None:
        self.close()

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def log(self, name: str) -> str:
        return (self.run_dir / "logs" / f"{name.replace('/', '-')}.log").read_text()


async def until(is_so: Callable[[], Any]) -> None:
    give_up = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.02)


@asynccontextmanager
async def fleet_of(
    num_workers: int, run_dir: Path, **changes: Any
) -> AsyncIterator[tuple[Fleet, ProcessScheduler]]:
    scheduler = ProcessScheduler(run_dir, **changes)
    runtime = Runtime.create(scheduler.keys)
    fleet = Fleet(scheduler, runtime, on_lost=lambda error: None)
    try:
        await fleet.launch(
            [
                LaunchRequest("rollout", index, "none", {}, Device.cpu, 1)
                for index in range(num_workers)
            ]
        )
        yield fleet, scheduler
    finally:
        await fleet.close()
        await runtime.transport.close()
        scheduler.close()


def lost(fleet: Fleet) -> list[Member]:
    return [member for member in fleet.members if member.failure]


async def test_a_worker_that_blocks_its_event_loop_is_not_lost(tmp_path: Path) -> None:
    async with fleet_of(2, tmp_path) as (fleet, _):
        member = fleet.members[0]
        reply = await fleet.call(member, BLOCK, BOUND_S + 1.0, timeout_s=LIMIT_S)
        assert reply == "done"
        assert lost(fleet) == []


async def test_a_worker_that_blocks_its_event_loop_for_too_long_is_lost(tmp_path: Path) -> None:
    async with fleet_of(2, tmp_path, hung_after_s=2.0) as (fleet, _):
        member = fleet.members[1]
        with pytest.raises(WorkerLost, match="rollout/1 hangs: its event loop has not turned"):
            await fleet.call(member, BLOCK, 1000.0, timeout_s=LIMIT_S)
        assert lost(fleet) == [member]


async def test_a_stopped_worker_is_lost_and_its_neighbours_are_heard(tmp_path: Path) -> None:
    """Whoever speaks for the node: all but one are stopped in turn."""
    async with fleet_of(3, tmp_path, orphan_timeout_s=4.0) as (fleet, scheduler):
        for num_lost, member in enumerate(fleet.members[:2], start=1):
            scheduler.processes[member.name].send_signal(signal.SIGSTOP)
            with pytest.raises(WorkerLost) as caught:
                await fleet.call(member, PING, None, timeout_s=LIMIT_S)
            assert f"{member.name} missed 5 heartbeats of 0.5 s (other rollout workers on " in str(
                caught.value
            )
            assert caught.value.log_path == str(member.worker.spec.log_path)
            assert len(lost(fleet)) == num_lost
        last = fleet.members[2]
        await asyncio.sleep(5.0)  # longer than an orphan would live
        await fleet.call(last, PING, None, timeout_s=LIMIT_S)
        assert last.failure is None


async def test_a_killed_worker_is_lost_at_once_and_its_neighbour_is_heard(tmp_path: Path) -> None:
    async with fleet_of(2, tmp_path) as (fleet, scheduler):
        speaker, neighbour = fleet.members
        waiting = asyncio.create_task(fleet.call(speaker, BLOCK, 1000.0, timeout_s=LIMIT_S))
        await asyncio.sleep(2 * INTERVAL_S)
        scheduler.processes[speaker.name].kill()
        with pytest.raises(WorkerLost, match="rollout/0 ended with exit code -9"):
            await waiting
        await asyncio.sleep(BOUND_S + 1.0)
        await fleet.call(neighbour, PING, None, timeout_s=LIMIT_S)
        assert lost(fleet) == [speaker]


async def test_a_reset_connection_to_a_living_worker_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cutting_proxy() as proxy:

        class Proxied(ProcessScheduler):
            async def launch(self, request: LaunchRequest) -> RunningWorker:
                worker = await super().launch(request)
                proxy.stand_before(worker.report.address)
                return replace(worker, report=replace(worker.report, address=proxy.address))

        monkeypatch.setitem(globals(), "ProcessScheduler", Proxied)
        async with fleet_of(1, tmp_path) as (fleet, scheduler):
            (member,) = fleet.members
            alone = asyncio.create_task(fleet.call(member, WAIT, 2.0, timeout_s=LIMIT_S))
            of_all = asyncio.create_task(fleet.call_all(WAIT, 2.0, timeout_s=LIMIT_S))
            await until(lambda: scheduler.log(member.name).count("the wait began") == 2)
            proxy.cut()
            await asyncio.gather(alone, of_all)
            assert scheduler.log(member.name).count("the wait began") == 2
            assert lost(fleet) == []


async def test_the_first_error_ends_a_call_of_all_at_once(tmp_path: Path) -> None:
    async with fleet_of(3, tmp_path) as (fleet, scheduler):
        failing = asyncio.create_task(
            fleet.call_each(FAIL, [1000.0, 0.0, 1000.0], timeout_s=LIMIT_S)
        )
        for name in ("rollout/0", "rollout/2"):
            await until(lambda name=name: "the wait began" in scheduler.log(name))
        (tmp_path / "fail_now").touch()
        with pytest.raises(ModelError, match="no weights"):
            await failing
        for name in ("rollout/0", "rollout/2"):
            await until(lambda name=name: "the wait was cancelled" in scheduler.log(name))
        assert lost(fleet) == []
        waiting = asyncio.create_task(fleet.call_all(WAIT, 1000.0, timeout_s=LIMIT_S))
        await asyncio.sleep(2 * INTERVAL_S)
        scheduler.processes["rollout/1"].kill()
        with pytest.raises(WorkerLost, match="rollout/1 ended with exit code -9"):
            await waiting
        # what is lost stays lost, also for calls of all
        with pytest.raises(WorkerLost, match="rollout/1 ended with exit code -9"):
            await fleet.call_all(PING, None)


CONTROLLER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from integration.beating_worker import BLOCK
from integration.test_heartbeats import fleet_of

async def main():
    async with fleet_of(2, Path(sys.argv[2]), orphan_timeout_s=3.0) as (fleet, scheduler):
        await asyncio.sleep(4.0)
        Path(sys.argv[2], "pids").write_text(
            " ".join(str(process.pid) for process in scheduler.processes.values())
        )
        await fleet.call(fleet.members[0], BLOCK, 1000.0, timeout_s=1000.0)

asyncio.run(main())
"""


def start_controller(run_dir: Path) -> subprocess.Popen[bytes]:
    arguments = [str(PROGRAM.parents[1]), str(run_dir)]
    return subprocess.Popen([sys.executable, "-c", CONTROLLER, *arguments])


async def test_workers_of_a_killed_controller_end_also_while_they_are_blocked(
    tmp_path: Path,
) -> None:
    controller = start_controller(tmp_path)
    pids_file = tmp_path / "pids"
    try:
        await until(lambda: pids_file.exists() and pids_file.read_text())
        assert controller.poll() is None
        pids = list(map(int, pids_file.read_text().split()))
        assert len(pids) == 2
        await asyncio.sleep(2 * INTERVAL_S)  # one of them is blocked now
        assert all(map(is_alive, pids)), "they live as long as they are asked"
        controller.kill()
        controller.wait()
        await until(lambda: not any(map(is_alive, pids)))
    finally:
        controller.kill()
        controller.wait()
    blocked, idle = ((tmp_path / "logs" / f"rollout-{i}.log").read_text() for i in range(2))
    for log in (blocked, idle):
        assert "no controller was heard for 3 s; ending" in log
    assert "ended by force; it is at:" in blocked
    assert "time.sleep(seconds)" in blocked
    assert "ended by force" not in idle


def is_alive(pid: int) -> bool:
    """It has not ended, also not as a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_a_worker_without_any_controller_ends(tmp_path: Path) -> None:
    scheduler = ProcessScheduler(tmp_path, orphan_timeout_s=1.0)
    try:
        worker = await scheduler.launch(LaunchRequest("rollout", 0, "none", {}, Device.cpu, 1))
        process = scheduler.processes[worker.name]
        await until(lambda: process.poll() is not None)
        assert process.returncode == 0
        assert "no controller was heard for 1 s; ending" in scheduler.log(worker.name)
        assert not os.listdir(tmp_path / "beats")
    finally:
        scheduler.close()
