"""How a fleet finds out who is alive, with simulated workers in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from simulation.agent import SimulatedAgent
from simulation.behavior import Behavior
from simulation.cluster import SimulatedCluster, SimulatedTransport
from simulation.process import Steps
from simulation.virtual_loop import in_virtual_time
from simulation.workers import SimulatedWorker

from areal_sc.config.schema import Device
from areal_sc.errors import NodeLost, WorkerLost, WorkerStartError
from areal_sc.fleet.fleet import Fleet
from areal_sc.fleet.member import Member
from areal_sc.fleet.node_workers import NodeWorkers
from areal_sc.fleet.runtime import Runtime
from areal_sc.fleet.worker_life import Died, LifeEvent, Wished
from areal_sc.nodes.spec import WATCH, News, Watch, WorkerOrder
from areal_sc.workers.calls import PING, STATS

INTERVAL_S = 2.0
LIMIT_S = 5 * INTERVAL_S + 2 * INTERVAL_S
"""Five missed heartbeats, the interval that they began in, and that of the question."""


class WatchedFleet:
    """A fleet of idle workers, two a node."""

    def __init__(self, run_dir: Path, num_workers: int) -> None:
        self.cluster = SimulatedCluster(run_dir, Behavior())
        self.cluster.num_nodes = -(-num_workers // 2)
        self.lost: dict[str, tuple[float, WorkerLost]] = {}
        runtime = Runtime(transport=SimulatedTransport(self.cluster))
        self.fleet = Fleet(self.cluster, runtime, self._note_lost)
        self._num_workers = num_workers

    def _note_lost(self, event: LifeEvent | Wished) -> None:
        if isinstance(event, Died):
            name, error = event.unit, event.cause
            assert isinstance(error, WorkerLost)
            (member,) = (it for it in self._members if it.name == name)
            assert member.failure is error
            assert name not in self.lost, "told twice"
            self.lost[name] = (self.cluster.now_s, error)

    @property
    def _members(self) -> list[Member]:
        """Also of workers that are still being launched."""
        return [member for node in self.fleet.nodes for member in node.members]

    @asynccontextmanager
    async def started(self) -> AsyncIterator[WatchedFleet]:
        orders = [
            WorkerOrder("rollout", index, "LocalGenerator", {}, Device.cpu, 1)
            for index in range(self._num_workers)
        ]
        await self.fleet.launch(orders)
        try:
            yield self
        finally:
            await self.fleet.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        # those of simulated processes stand still when these die
        left = [task for task in others if not isinstance(task.get_coro(), Steps)]
        await asyncio.sleep(1.0)
        assert all(task.done() for task in left), f"tasks are left: {left}"


@in_virtual_time
async def test_agents_are_asked_once_an_interval_at_an_even_pace(tmp_path: Path) -> None:
    async with WatchedFleet(tmp_path, 16).started() as watched:
        asked: list[float] = []
        for agent in watched.cluster.agents.values():
            note_calls(agent, asked)
        await asyncio.sleep(10.0)
        asked.clear()
        await asyncio.sleep(100 * INTERVAL_S)
        assert len(asked) == pytest.approx(8 * 100, rel=0.02)
        gaps = [after - before for before, after in itertools.pairwise(asked)]
        assert max(gaps) < INTERVAL_S / 8 + 0.1
        assert not watched.lost


def note_calls(agent: SimulatedAgent, asked: list[float]) -> None:
    async def noted(watch: Watch) -> News:
        asked.append(agent.cluster.now_s)
        return await agent.watch(watch)

    agent.served[WATCH.name] = WATCH.served_by(noted)


@in_virtual_time
async def test_what_an_agent_warns_of_later_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with WatchedFleet(tmp_path, 2).started() as watched:
        watched.cluster.agents["node-0"].warnings = ("its disk is full",)
        await asyncio.sleep(10.0)
    assert "node node-0: its disk is full" in caplog.messages


@in_virtual_time
@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_worker_that_is_killed_is_lost_at_once_and_one_that_hangs_after_a_while(
    tmp_path: Path, is_killed: bool
) -> None:
    async with WatchedFleet(tmp_path, 4).started() as watched:
        await asyncio.sleep(10.0)
        began = watched.cluster.now_s
        if is_killed:
            watched.cluster.workers["rollout/1"].end("signal 9 (SIGKILL)")
        else:
            watched.cluster.workers["rollout/1"].is_hung = True
        await asyncio.sleep(100.0)
        assert watched.lost.keys() == {"rollout/1"}
        time_s, error = watched.lost["rollout/1"]
        assert time_s - began <= (0.1 if is_killed else LIMIT_S)
        if is_killed:
            assert "rollout/1 ended with signal 9" in str(error)
        else:
            said = "missed 5 heartbeats of 2 s (other rollout workers on node-0 can be heard)"
            assert said in str(error)
            assert error.log_tail == ("the log of rollout/1",)


@in_virtual_time
async def test_a_worker_that_dies_while_its_launch_is_answered_is_lost(tmp_path: Path) -> None:
    class DiesAtOnce(SimulatedCluster):
        async def start(self, order: WorkerOrder, node: str) -> SimulatedWorker:
            worker = await super().start(order, node)
            if order.index == 0:
                worker.end("exit code 1")
            return worker

    watched = WatchedFleet(tmp_path, 2)
    watched.fleet._scheduler = watched.cluster = cluster = DiesAtOnce(tmp_path, Behavior())
    watched.fleet._runtime = Runtime(transport=SimulatedTransport(cluster))
    async with watched.started():
        await asyncio.sleep(1.0)
        assert watched.lost.keys() == {"rollout/0"}
        assert "rollout/0 ended with exit code 1" in str(watched.lost["rollout/0"][1])


@in_virtual_time
async def test_the_workers_of_a_node_whose_agent_ended_are_lost(tmp_path: Path) -> None:
    async with WatchedFleet(tmp_path, 4).started() as watched:
        (watched.cluster.run_dir / "agent.log").write_text("out of memory\n")
        watched.cluster.agents["node-1"].end("exit code 5")
        await asyncio.sleep(1.0)
        assert watched.lost.keys() == {"rollout/2", "rollout/3"}
        for _, error in watched.lost.values():
            assert "went down with node node-1: its agent ended with exit code 5" in str(error)
            assert error.log_tail == ("out of memory",)


@in_virtual_time
async def test_a_scheduler_that_does_not_answer_loses_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with WatchedFleet(tmp_path, 2).started() as watched:

        async def silent() -> Any:
            raise WorkerStartError("no answer within 60 s")

        watched.cluster.ended_nodes = silent  # type: ignore[method-assign]
        agent = watched.cluster.agents["node-0"]
        agent.is_hung = True
        await asyncio.sleep(4 * INTERVAL_S)
        agent.is_hung = False
        await asyncio.sleep(100.0)
        assert not watched.lost
        assert "its state is unknown: no answer within 60 s" in caplog.text


@in_virtual_time
@pytest.mark.parametrize("moment_s", [0.0, 0.5, 1.0, 1.5])
async def test_a_node_that_falls_silent_is_lost_with_all_its_workers_in_12_s(
    tmp_path: Path, moment_s: float
) -> None:
    """Also while the cluster's own scheduler keeps its answer back."""
    async with WatchedFleet(tmp_path, 6).started() as watched:

        async def slow() -> Any:
            await asyncio.sleep(1000.0)

        watched.cluster.ended_nodes = slow  # type: ignore[method-assign]
        await asyncio.sleep(10.0 + moment_s)
        began = watched.cluster.now_s
        watched.cluster.agents["node-1"].is_hung = True
        await asyncio.sleep(100.0)
        assert watched.lost.keys() == {"rollout/2", "rollout/3"}
        for time_s, error in watched.lost.values():
            assert time_s - began <= 11.0
            expected = "missed 5 heartbeats of 2 s (no rollout worker on node-1 can be heard)"
            assert expected in str(error)


@in_virtual_time
async def test_a_node_that_is_silent_for_a_moment_is_not_lost(tmp_path: Path) -> None:
    async with WatchedFleet(tmp_path, 4).started() as watched:
        for _ in range(5):
            for worker in watched.cluster.workers.values():
                worker.is_hung = True
            await asyncio.sleep(7.0)
            for worker in watched.cluster.workers.values():
                worker.is_hung = False
            await asyncio.sleep(5.0)
        assert not watched.lost


@in_virtual_time
async def test_a_blocked_event_loop_is_warned_of_and_then_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with WatchedFleet(tmp_path, 2).started() as watched:
        worker = watched.cluster.workers["rollout/1"]
        for _ in range(3):
            worker.is_blocked = True
            await asyncio.sleep(30.0)
            worker.is_blocked = False
            await asyncio.sleep(10.0)
        assert not watched.lost
        warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert len(warnings) == 3, "one each time"
        assert "worker=rollout/1 event loop has not turned for 1" in warnings[0]
        assert "blocking call in a workflow (its log" in warnings[0]
        worker.is_blocked = True
        began = watched.cluster.now_s
        await asyncio.sleep(100.0)
        assert watched.lost.keys() == {"rollout/1"}
        time_s, error = watched.lost["rollout/1"]
        # a beat tells of the turn that the one before has asked for
        assert 60.0 < time_s - began <= 60.0 + 2 * INTERVAL_S + 0.1
        assert "rollout/1 hangs: its event loop has not turned for 6" in str(error)
        assert "blocking call in a workflow" in str(error)


@in_virtual_time
async def test_a_call_in_flight_to_a_blocked_worker_ends_with_its_loss(tmp_path: Path) -> None:
    async with WatchedFleet(tmp_path, 2).started() as watched:
        member = watched.fleet.members[1]
        watched.cluster.workers[member.name].is_blocked = True
        with pytest.raises(WorkerLost, match="rollout/1 hangs"):
            await watched.fleet.call(member, STATS, None, timeout_s=1000.0)
        assert watched.cluster.now_s < 70.0


@in_virtual_time
async def test_the_loss_of_one_ends_a_call_of_all_at_once(tmp_path: Path) -> None:
    async with WatchedFleet(tmp_path, 4).started() as watched:
        for worker in watched.cluster.workers.values():
            worker.is_blocked = True
        loop = asyncio.get_running_loop()
        loop.call_later(5.0, watched.cluster.workers["rollout/2"].end, "exit code 1")
        with pytest.raises(WorkerLost, match="rollout/2 ended with exit code 1"):
            await watched.fleet.call_all(STATS, None, timeout_s=1000.0)
        assert watched.cluster.now_s < 10.0


@in_virtual_time
async def test_the_beat_of_an_earlier_life_is_none(tmp_path: Path) -> None:
    async with WatchedFleet(tmp_path, 2).started() as watched:
        watched.cluster.workers["rollout/1"].incarnation = "another"
        await asyncio.sleep(50.0)
        assert watched.lost.keys() == {"rollout/1"}


@in_virtual_time
@pytest.mark.parametrize("when", ["launching", "watching"])
async def test_a_watch_that_fails_loses_the_workers_with_its_cause(
    tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody would hear of a worker's end any more."""

    async def fail(*_: Any) -> Any:
        raise LookupError("a defect of the watch")

    watched = WatchedFleet(tmp_path, 2)
    if when == "launching":
        monkeypatch.setattr(NodeWorkers, "_note", fail)
    async with watched.started():
        monkeypatch.setattr(NodeWorkers, "_note", fail)
        watched.cluster.workers["rollout/0"].is_blocked = True
        with pytest.raises(WorkerLost, match="cannot be watched any more: LookupError") as lost:
            await watched.fleet.call(watched.fleet.members[0], PING, None, timeout_s=1000.0)
        assert isinstance(lost.value.__cause__, LookupError)
        assert watched.lost.keys() == {"rollout/0", "rollout/1"}
        with pytest.raises(NodeLost, match="cannot be watched any more"):
            await watched.fleet.restart(watched.fleet.members)
        assert watched.cluster.now_s < 10.0


@in_virtual_time
async def test_heartbeats_cost_few_bytes(tmp_path: Path) -> None:
    async with WatchedFleet(tmp_path, 16).started() as watched:
        before = watched.fleet.num_bytes
        await asyncio.sleep(100.0)
        num_bytes = (watched.fleet.num_bytes - before) / (100.0 / INTERVAL_S) / 16
        assert 0 < num_bytes < 200, "a worker and interval"
