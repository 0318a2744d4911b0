"""Who is alive, found out with real processes that block, stop and die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from integration.agents import connect_agent, launch_of
from integration.beating_agent import BLOCK, WAIT
from integration.cutting_proxy import cutting_proxy
from waiting import is_running, until

from areal_sc.config.schema import Device, SchedulerConfig, TransportConfig
from areal_sc.errors import WorkerLost
from areal_sc.fleet.fleet import Fleet
from areal_sc.fleet.member import Member
from areal_sc.fleet.runtime import Runtime
from areal_sc.nodes.spec import LAUNCH, WorkerOrder
from areal_sc.schedulers.local import LocalScheduler
from areal_sc.system.process import children_of
from areal_sc.transport.rpc.client import RpcClient
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.transport.security.curve import CurveClient

PROGRAM = Path(__file__).with_name("beating_agent.py")
INTERVAL_S = 1.0
BOUND_S = 5 * INTERVAL_S
"""What a silent worker is lost after: a busy machine stalls for less."""
ORPHAN_S = 6.0
"""A controller that is silent for so long is gone."""
LIMIT_S = 60.0
"""Far above what anything here takes, for a machine that is busy with other work."""


def scheduler_in(run_dir: Path, **changes: Any) -> LocalScheduler:
    """One whose workers are those of `beating_agent.py`."""
    config = SchedulerConfig(
        run_dir=str(run_dir),
        transport=TransportConfig(shared_memory=str(run_dir / "memory")),
        **{"heartbeat_interval_s": INTERVAL_S, "orphan_timeout_s": 100.0, **changes},
    )
    return LocalScheduler(config, command=(sys.executable, str(PROGRAM)))


def path_of_log(run_dir: Path, name: str) -> Path:
    return run_dir / "logs" / f"{name.replace('/', '-')}.log"


def log_of(run_dir: Path, name: str) -> str:
    return path_of_log(run_dir, name).read_text()


def orders(num_workers: int) -> list[WorkerOrder]:
    return [
        WorkerOrder("rollout", index, "none", {}, Device.cpu, 1) for index in range(num_workers)
    ]


@asynccontextmanager
async def fleet_of(num_workers: int, run_dir: Path, **changes: Any) -> AsyncIterator[Fleet]:
    scheduler = scheduler_in(run_dir, **changes)
    runtime = Runtime.create(scheduler.keys)
    fleet = Fleet(scheduler, runtime, lambda event: None)
    try:
        await fleet.launch(orders(num_workers))
        yield fleet
    finally:
        await fleet.close()
        await runtime.transport.close()
        scheduler.close()


def lost(fleet: Fleet) -> list[Member]:
    return [member for member in fleet.members if member.failure]


async def test_a_worker_that_blocks_its_event_loop_for_too_long_is_lost(tmp_path: Path) -> None:
    async with fleet_of(2, tmp_path, hung_after_s=BOUND_S) as fleet:
        member = fleet.members[1]
        with pytest.raises(WorkerLost, match="rollout/1 hangs: its event loop has not turned"):
            await fleet.call(member, BLOCK, 1000.0, timeout_s=LIMIT_S)
        assert lost(fleet) == [member]


async def test_a_reset_connection_to_a_living_worker_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cutting_proxy() as proxy:
        connect = ZmqTransport.connect

        def connect_by_proxy(
            transport: ZmqTransport, address: str, node_id: str, *args: Any, **options: Any
        ) -> RpcClient:
            if node_id == "rollout/0":
                proxy.stand_before(address)
                address = proxy.address
            return connect(transport, address, node_id, *args, **options)

        monkeypatch.setattr(ZmqTransport, "connect", connect_by_proxy)
        async with fleet_of(1, tmp_path) as fleet:
            (member,) = fleet.members
            alone = asyncio.create_task(fleet.call(member, WAIT, 2.0, timeout_s=LIMIT_S))
            of_all = asyncio.create_task(fleet.call_all(WAIT, 2.0, timeout_s=LIMIT_S))
            await until(lambda: log_of(tmp_path, member.name).count("the wait began") == 2)
            proxy.cut()
            await asyncio.gather(alone, of_all)
            assert log_of(tmp_path, member.name).count("the wait began") == 2
            assert lost(fleet) == []


CONTROLLER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from integration.beating_agent import BLOCK
from integration.test_heartbeats import ORPHAN_S, fleet_of

async def main():
    async with fleet_of(2, Path(sys.argv[2]), orphan_timeout_s=ORPHAN_S) as fleet:
        await asyncio.sleep(ORPHAN_S + 1.0)
        Path(sys.argv[2], "pids").write_text(
            " ".join(str(member.worker.pid) for member in fleet.members)
        )
        await fleet.call(fleet.members[0], BLOCK, 1000.0, timeout_s=1000.0)

asyncio.run(main())
"""


def start_controller(run_dir: Path) -> subprocess.Popen[bytes]:
    arguments = [str(PROGRAM.parents[1]), str(run_dir)]
    return subprocess.Popen([sys.executable, "-c", CONTROLLER, *arguments])


async def test_workers_of_a_killed_controller_end_also_while_their_agent_is_stopped(
    tmp_path: Path,
) -> None:
    """The fork server misses its agent, and wakes it so that it cleans up; a worker is blocked."""
    controller = start_controller(tmp_path)
    pids_file = tmp_path / "pids"
    agent = 0
    try:
        await until(lambda: pids_file.exists() and pids_file.read_text())
        pids = list(map(int, pids_file.read_text().split()))
        (agent,) = children_of(controller.pid)
        assert list((tmp_path / "memory").iterdir())
        os.kill(agent, signal.SIGSTOP)
        controller.kill()
        controller.wait()
        await until(lambda: not any(map(is_running, [*pids, agent])))
        assert not list((tmp_path / "memory").iterdir())
        assert not (tmp_path / "keys.json").exists()
        assert "silent for 6 s; the fork server ends" in log_of(tmp_path, "agent/0")
    finally:
        controller.kill()
        controller.wait()
        if agent and is_running(agent):
            os.kill(agent, signal.SIGKILL)


async def test_workers_that_no_controller_asks_for_end_and_the_agent_too(tmp_path: Path) -> None:
    scheduler = scheduler_in(tmp_path, orphan_timeout_s=ORPHAN_S)
    try:
        (node,) = await scheduler.nodes()
        await asyncio.sleep(ORPHAN_S + 1.0)
        assert await scheduler.ended_nodes() == {}, "no worker runs, and the script is there"
        transport = ZmqTransport(client=CurveClient.of_controller(scheduler.keys))
        agent = connect_agent(transport, node.facts)
        order = WorkerOrder("rollout", 0, "none", {}, Device.cpu, 1, incarnation="i0")
        launched = await agent.call(
            LAUNCH, launch_of(scheduler.passes, [order], LIMIT_S), timeout_s=LIMIT_S
        )
        await transport.close()
        (worker,) = launched.workers
        give_up = time.monotonic() + LIMIT_S
        while not await scheduler.ended_nodes():
            assert time.monotonic() < give_up
            await asyncio.sleep(0.05)
        assert await scheduler.ended_nodes() == {node: "exit code 0"}
        assert not is_running(worker.pid)
        assert "no controller was heard for 6 s; ending" in log_of(tmp_path, "agent/0")
        assert not list((tmp_path / "memory").iterdir())
    finally:
        scheduler.close()
