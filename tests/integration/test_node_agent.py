"""Real agents: what they start, whom they end, and who shares a node."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from areal_sc.config.schema import Device, SchedulerConfig, TransportConfig
from areal_sc.errors import ConfigError, WorkerStartError
from areal_sc.schedulers.base import Node
from areal_sc.schedulers.local import LocalScheduler
from areal_sc.transport.rpc.transport import Connection, ZmqTransport
from areal_sc.transport.security.curve import CurveAuthenticator
from areal_sc.workers.spec import (
    LAUNCH,
    STOP,
    WATCH,
    Launch,
    Launched,
    News,
    Stop,
    Watch,
    WorkerOrder,
)

PROGRAM = Path(__file__).with_name("beating_agent.py")
LIMIT_S = 60.0
"""Far above what anything here takes, for a machine that is busy with other work."""


def scheduler_in(run_dir: Path, memory: Path) -> LocalScheduler:
    config = SchedulerConfig(
        run_dir=str(run_dir),
        transport=TransportConfig(shared_memory=str(memory)),
        heartbeat_interval_s=0.2,
        orphan_timeout_s=100.0,
    )
    return LocalScheduler(config, command=(sys.executable, str(PROGRAM)))


@asynccontextmanager
async def agent_of(run_dir: Path) -> AsyncIterator[Connection]:
    scheduler = scheduler_in(run_dir, run_dir / "memory")
    transport = ZmqTransport(authenticator=CurveAuthenticator(scheduler.keys, "controller"))
    try:
        (node,) = await scheduler.nodes()
        yield transport.connect(node.facts.address, "agent", node.facts.incarnation)
    finally:
        await transport.close()
        scheduler.close()


def order(index: int, engine: str = "none", life: int = 0) -> WorkerOrder:
    return WorkerOrder("rollout", index, engine, {}, Device.cpu, 1, incarnation=f"i{index}-{life}")


async def launch(agent: Connection, *orders: WorkerOrder, timeout_s: float = LIMIT_S) -> Launched:
    return await agent.call(LAUNCH, Launch(list(orders), timeout_s), timeout_s=2 * LIMIT_S)


async def news(agent: Connection, num_ended: int = 0, hold_s: float = LIMIT_S) -> News:
    return await agent.call(WATCH, Watch("rollout", num_ended, hold_s), timeout_s=2 * LIMIT_S)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def workers_of(run_dir: Path) -> list[int]:
    """Processes that write to a worker's log."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/1").startswith(str(run_dir / "logs" / "rollout-")):
                found.append(int(pid))
    return found


async def until(is_so: Callable[[], Any]) -> None:
    give_up = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.02)


async def test_an_end_is_told_when_it_happens_and_others_beat_on(tmp_path: Path) -> None:
    async with agent_of(tmp_path) as agent:
        workers = (await launch(agent, order(0), order(1))).workers
        assert [worker.name for worker in workers] == ["rollout/0", "rollout/1"]
        waiting = asyncio.create_task(news(agent))
        quiet = await agent.call(WATCH, Watch("train", 0, 0.0), timeout_s=LIMIT_S)
        assert quiet == News([], [], 0), "other roles are not its concern"
        assert not waiting.done()
        os.kill(workers[0].pid, signal.SIGKILL)
        told = await waiting  # long before it would be answered without an end
        (end,) = told.ended
        assert (end.name, end.incarnation, end.how) == (
            *("rollout/0", "i0-0", "signal 9 (SIGKILL)"),
        )
        assert end.log_path == str(tmp_path / "logs" / "rollout-0.log")
        assert told.num_ended == 1
        later = await news(agent, told.num_ended, hold_s=0.5)
        assert later.ended == []
        (beat,) = later.beats
        assert beat.name == "rollout/1"
        assert 0 <= beat.beat_age_s < LIMIT_S
        assert (await news(agent, 0)).ended == [end], "also to whoever asks anew"


async def test_a_launch_that_fails_says_why_and_leaves_nobody(tmp_path: Path) -> None:
    async with agent_of(tmp_path) as agent:
        failed = await launch(agent, order(0), order(1, "broken"), order(2, "mute"))
        assert "worker rollout/1 ended with exit code 6 before it served" in failed.failure
        assert failed.log_path == str(tmp_path / "logs" / "rollout-1.log")
        assert "ModelError: no weights" in failed.log_tail[-1]
        ended = (await news(agent)).ended
        assert {end.name for end in ended} >= {"rollout/1"}
        assert (await news(agent, hold_s=0.0)).beats == []
        late = await launch(agent, order(3, "mute"), timeout_s=1.0)
        assert "worker rollout/3 did not report within 1 s" in late.failure
        assert (await launch(agent, order(4))).failure == "", "it still starts others"


async def test_a_launch_that_is_given_up_leaves_nobody(tmp_path: Path) -> None:
    async with agent_of(tmp_path) as agent:
        launching = asyncio.create_task(launch(agent, order(0, "mute")))
        log = tmp_path / "logs" / "rollout-0.log"
        await until(log.exists)  # it is being forked, or has been
        launching.cancel()
        await asyncio.gather(launching, return_exceptions=True)
        await until(lambda: not workers_of(tmp_path))


async def test_a_worker_is_started_again_in_the_place_of_its_earlier_life(tmp_path: Path) -> None:
    async with agent_of(tmp_path) as agent:
        (first,) = (await launch(agent, order(0))).workers
        (second,) = (await launch(agent, order(0, life=1))).workers
        assert first.pid != second.pid
        assert not is_alive(first.pid)
        (end,) = (await news(agent)).ended
        assert end.incarnation == "i0-0"
        os.kill(second.pid, signal.SIGSTOP)  # it neither ends by itself nor hears SIGTERM
        await agent.call(STOP, Stop(["i0-1", "unknown"], 0.1), timeout_s=LIMIT_S)
        assert not is_alive(second.pid)


async def test_who_shares_a_node_sees_the_same_token_in_shared_memory(tmp_path: Path) -> None:
    """Two containers of one machine have host name and boot id in common, and no memory."""
    tokens: dict[str, list[str]] = {}
    with ExitStack() as stack:
        for run, memory in (("a", "first"), ("b", "second")):
            scheduler = scheduler_in(tmp_path / run, tmp_path / memory)
            stack.callback(scheduler.close)
            (node,) = await scheduler.nodes()
            tokens[run] = [node.facts.token]
            assert (await scheduler.nodes()) == [node], "always the same object"
            assert node.facts.memory_root == str(tmp_path / memory)
    assert tokens["a"] != tokens["b"]


async def test_memory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    scheduler = scheduler_in(tmp_path / "run", tmp_path / "file")
    try:
        with pytest.raises(ConfigError, match=r"shared memory cannot be kept in .*/file"):
            await scheduler.nodes()
    finally:
        scheduler.close()


async def test_an_agent_that_does_not_start_is_named_with_its_log(tmp_path: Path) -> None:
    config = SchedulerConfig(run_dir=str(tmp_path), transport=TransportConfig())
    command = (sys.executable, "-c", "raise SystemExit('no such interpreter')")
    scheduler = LocalScheduler(config, command=command)
    try:
        with pytest.raises(WorkerStartError, match=r"agent-0\.log") as caught:
            await scheduler.nodes()
        assert "no such interpreter" in caught.value.log_tail[-1]
        assert await ended(scheduler) == {}, "it has never been a node"
    finally:
        scheduler.close()


async def ended(scheduler: LocalScheduler) -> dict[Node, str]:
    return await scheduler.ended_nodes()
