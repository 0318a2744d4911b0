"""Real agents: what they start, whom they end, and who shares a node."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Collection
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import PIPE

import pytest
from integration.agents import connect_agent, launch_of
from msgspec import json
from waiting import is_running, until

from areal_sc.config.schema import Device, SchedulerConfig, TransportConfig
from areal_sc.errors import ConfigError, StaleTerm, WorkerStartError
from areal_sc.nodes.spec import (
    DESCRIBE,
    LAUNCH,
    STOP,
    WATCH,
    Joining,
    Launched,
    News,
    NodeFacts,
    Stop,
    Watch,
    WorkerOrder,
)
from areal_sc.run.named_paths import Contents, name_path
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.base import Node
from areal_sc.schedulers.join_server import JoinServer
from areal_sc.schedulers.local import LocalScheduler
from areal_sc.transport.rpc.transport import Connection, ZmqTransport
from areal_sc.transport.security.curve import CurveClient
from areal_sc.transport.security.keys import RunKeys
from areal_sc.transport.security.passes import Passes
from areal_sc.transport.sockets.interface import Interface, host_of

PROGRAM = Path(__file__).with_name("beating_agent.py")
LIMIT_S = 60.0
"""Far above what anything here takes, for a machine that is busy with other work."""


def scheduler_in(run_dir: Path, memory: Path) -> LocalScheduler:
    config = SchedulerConfig(
        run_dir=str(run_dir),
        transport=TransportConfig(shared_memory=str(memory)),
        heartbeat_interval_s=0.2,
        orphan_timeout_s=100.0,
        max_log_bytes=100_000,
    )
    return LocalScheduler(config, command=(sys.executable, str(PROGRAM)))


@dataclass
class Agent:
    """A connection to one, and what its workers get passes from."""

    connection: Connection
    passes: Passes


@asynccontextmanager
async def agent_of(run_dir: Path) -> AsyncIterator[Agent]:
    scheduler = scheduler_in(run_dir, run_dir / "memory")
    transport = ZmqTransport(client=CurveClient.of_controller(scheduler.keys))
    try:
        (node,) = await scheduler.nodes()
        yield Agent(connect_agent(transport, node.facts), scheduler.passes)
    finally:
        await transport.close()
        scheduler.close()


def order(index: int, engine: str = "none", life: int = 0) -> WorkerOrder:
    return WorkerOrder("rollout", index, engine, {}, Device.cpu, 1, incarnation=f"i{index}-{life}")


async def launch(agent: Agent, *orders: WorkerOrder, timeout_s: float = LIMIT_S) -> Launched:
    return await agent.connection.call(
        LAUNCH, launch_of(agent.passes, orders, timeout_s), timeout_s=2 * LIMIT_S
    )


async def news(agent: Agent, num_ended: int = 0, hold_s: float = LIMIT_S) -> News:
    return await agent.connection.call(
        WATCH, Watch("rollout", num_ended, hold_s), timeout_s=2 * LIMIT_S
    )


def workers_of(run_dir: Path) -> list[int]:
    """Processes that write to a worker's log."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/1").startswith(str(run_dir / "logs" / "rollout-")):
                found.append(int(pid))
    return found


def files_processes(run_dir: Path) -> list[int]:
    """Those that serve files of this run: one, when it has been asked for."""
    words, found = b"areal_sc.shipping.server\0%s\0" % os.fsencode(run_dir), []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if words in path.read_bytes():
                found.append(int(path.parent.name))
    return found


async def test_an_end_is_told_when_it_happens_and_others_beat_on(tmp_path: Path) -> None:
    async with agent_of(tmp_path) as agent:
        workers = (await launch(agent, order(0), order(1))).workers
        assert [worker.name for worker in workers] == ["rollout/0", "rollout/1"]
        waiting = asyncio.create_task(news(agent))
        quiet = await agent.connection.call(WATCH, Watch("train", 0, 0.0), timeout_s=LIMIT_S)
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
        assert not is_running(first.pid)
        (end,) = (await news(agent)).ended
        assert end.incarnation == "i0-0"
        os.kill(second.pid, signal.SIGSTOP)  # it neither ends by itself nor hears SIGTERM
        await agent.connection.call(STOP, Stop(["i0-1", "unknown"], 0.1), timeout_s=LIMIT_S)
        assert not is_running(second.pid)


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


async def test_shared_memory_without_room_for_the_run_is_passed_over(tmp_path: Path) -> None:
    transport = TransportConfig(shared_memory_bytes=1 << 60)
    config = SchedulerConfig(run_dir=str(tmp_path), transport=transport)
    scheduler = LocalScheduler(config, command=(sys.executable, str(PROGRAM)))
    try:
        (node,) = await scheduler.nodes()
        assert node.facts.memory_root == str(tmp_path / "shared_memory")
        assert any("may need 1073741824.0 GiB" in warning for warning in node.facts.warnings)
    finally:
        scheduler.close()


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


@asynccontextmanager
async def agent_elsewhere(
    run_dir: Path,
    script: str,
    bind: str = "auto",
    orphan_timeout_s: float = 6.0,
    *,
    sees_folder: bool = True,
    passes: Passes | None = None,
) -> AsyncIterator[tuple[JoinServer, Process]]:
    """Where an agent joins that was only told where the script is, and its process."""
    keys = RunKeys.create() if passes is None else RunKeys.read(RunFolder(run_dir).keys_path)
    keys.write(RunFolder(run_dir).keys_path)
    (run_dir / "logs").mkdir()
    settings = TransportConfig(bind=bind, shared_memory=str(run_dir / "memory"))
    config = SchedulerConfig(
        run_dir=str(run_dir if sees_folder else run_dir / "unseen"),
        node_folder=str(run_dir / "node"),
        transport=settings,
        heartbeat_interval_s=0.2,
        orphan_timeout_s=orphan_timeout_s,
    )
    joins = JoinServer(keys, passes or Passes(keys), Interface.of(script), RunFolder(run_dir))
    joins.open()
    words = (str(PROGRAM), "run", json.encode(config).decode(), joins.address)
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdin=PIPE)
    assert process.stdin is not None
    process.stdin.write(f"{joins.invite('job', 1)}\n".encode())
    process.stdin.close()
    try:
        yield joins, process
    finally:
        joins.close()
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.parametrize(
    ("bind", "script", "host"),
    [("auto", "::1", "::1"), ("auto", "127.0.0.3", "127.0.0.1"), ("127.0.0.5", "::1", "127.0.0.5")],
)
async def test_an_agent_joins_a_script_elsewhere_and_listens_where_that_reaches_it(
    tmp_path: Path, bind: str, script: str, host: str
) -> None:
    """When it was replaced, it ends as soon as it can ask, with the workers that it has."""
    async with agent_elsewhere(tmp_path, script, bind, 1000.0) as (joins, process):
        await until(lambda: joins.joined(""))
        [joining] = joins.joined("").values()
        facts = joining.facts
        assert isinstance(facts, NodeFacts)
        assert joining.pid == process.pid
        keys = RunKeys.read(RunFolder(tmp_path).keys_path)
        transport = ZmqTransport(client=CurveClient.of_controller(keys))
        agent = Agent(connect_agent(transport, facts), Passes(keys))
        (worker,) = (await launch(agent, order(0))).workers
        assert {host_of(facts.address), host_of(worker.address)} == {host}
        await transport.close()
        joins.refuse(facts.incarnation)
        assert await asyncio.wait_for(process.wait(), LIMIT_S) == 0
        assert not is_running(worker.pid)


async def test_an_agent_without_workers_stays_as_long_as_the_script_elsewhere_answers(
    tmp_path: Path,
) -> None:
    async with agent_elsewhere(tmp_path, "127.0.0.1") as (joins, process):
        await until(lambda: joins.joined(""))
        for _ in range(8):  # each second: within 5 heartbeats
            before = joins.joined("").values()
            await until(lambda before=before: not is_same(before, joins.joined("").values()))
        assert process.returncode is None
        await asyncio.to_thread(joins.close)
        assert await asyncio.wait_for(process.wait(), LIMIT_S) == 0


def is_same(before: Collection[Joining], now: Collection[Joining]) -> bool:
    """Whether nobody has joined since; whoever joins again says the same."""
    return all(one is other for one, other in zip(before, now, strict=True))


async def test_an_agent_tells_a_script_elsewhere_why_its_node_is_of_no_use(tmp_path: Path) -> None:
    async with agent_elsewhere(tmp_path, "127.0.0.1", "203.0.113.0/24") as (joins, process):
        assert await process.wait() == ConfigError.exit_code
        [joining] = joins.joined("").values()
        assert "has no address in that network" in str(joining.facts)


def named_model(run_dir: Path) -> tuple[RunKeys, Path]:
    """A folder that nodes which do not see it get, of a run with these keys."""
    keys, model, folder = RunKeys.create(), run_dir / "model", RunFolder(run_dir)
    keys.write(folder.keys_path)
    model.mkdir()
    (model / "weights").write_text("w")
    name_path(folder.sources, model, Contents.all)
    return keys, model


async def test_what_an_earlier_script_asked_for_is_not_started_behind_the_back_of_the_next(
    tmp_path: Path,
) -> None:
    """The files for its workers have not come yet when the next script asks who lives there."""
    keys, model = named_model(tmp_path)
    passes = Passes(keys)
    before, after = (
        ZmqTransport(client=CurveClient.of_controller(keys), term=term) for term in (1, 2)
    )
    async with agent_elsewhere(
        tmp_path, "127.0.0.1", orphan_timeout_s=1000.0, sees_folder=False, passes=passes
    ) as (joins, _):
        await until(lambda: joins.joined(""))
        [joining] = joins.joined("").values()
        assert isinstance(joining.facts, NodeFacts)
        agent = Agent(connect_agent(before, joining.facts), passes)
        its_order = replace(order(0), engine_config={"path": str(model)})
        await until(lambda: files_processes(tmp_path))
        [files] = files_processes(tmp_path)
        os.kill(files, signal.SIGSTOP)
        try:
            starting = asyncio.create_task(launch(agent, its_order))
            await asyncio.sleep(0)  # it is on its way; and calls arrive in order:
            await news(agent, hold_s=0.0)
            successor = connect_agent(after, joining.facts)
            described = await successor.call(DESCRIBE, None, timeout_s=LIMIT_S)
        finally:
            os.kill(files, signal.SIGCONT)
        assert described.workers == []
        with pytest.raises(StaleTerm):
            await starting
        described = await successor.call(DESCRIBE, None, timeout_s=LIMIT_S)
        assert described.workers == []
        assert not list((tmp_path / "node").glob("*/runs/*/logs/rollout-*.log"))
        for transport in (before, after):
            await transport.close()


async def ended(scheduler: LocalScheduler) -> dict[Node, str]:
    return await scheduler.ended_nodes()


async def test_the_logs_of_workers_are_bounded_and_the_script_s_is_left_to_it(
    tmp_path: Path,
) -> None:
    async with agent_of(tmp_path):
        logs = tmp_path / "logs"
        (logs / "controller.log").write_bytes(bytes(200_000))
        with (logs / "rollout-0-sglang.log").open("ab") as log:
            log.write(bytes(200_000))
        await until(lambda: not (logs / "rollout-0-sglang.log").stat().st_size)
        assert (logs / "rollout-0-sglang.log.1").stat().st_size == 200_000
        assert (logs / "controller.log").stat().st_size == 200_000
