"""What every `Scheduler` has to do, as controllers see it. `Conformance` is a base of test classes,
and `AskedConformance` one for those whose nodes come and go while a run scales.

A subclass has a fixture `lent`, of scope `class`, so that one start of the scheduler serves all
tests; the last one closes it. Its agents are on the path of `lent_agent`, so that workers are there
in an instant: `environment` says how.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from areal_sc.config.placement import Purpose
from areal_sc.config.schema import Device, SchedulerConfig
from areal_sc.errors import WorkerLost, WorkerStartError
from areal_sc.fleet.fleet import Fleet
from areal_sc.fleet.runtime import Runtime
from areal_sc.fleet.worker_life import Died, LifeEvent, Wished
from areal_sc.nodes.spec import WorkerOrder
from areal_sc.run.agent_files import living_agents
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.base import AsksForNodes, Node, Scheduler
from areal_sc.transport.sockets.interface import host_of
from areal_sc.workers.calls import PING

LIMIT_S = 90.0
"""Far above what anything here takes, for a machine that is busy with other work."""
NUM_WORKERS = 64

_AGENT = Path(__file__).with_name("lent_agent")


def environment() -> dict[str, str]:
    """Variables of the script with which its agents start workers that do nothing."""
    return {"PYTHONPATH": os.pathsep.join([str(_AGENT), os.environ.get("PYTHONPATH", "")])}


@dataclass
class Lent:
    """A scheduler that is open.

    Attributes:
        on: runs a command on the machine of that name.
        left_overs: processes of the run, and its shared memory, wherever they are.
        network: what the addresses of its nodes begin with.
    """

    scheduler: Scheduler
    config: SchedulerConfig
    on: Callable[..., Any]
    left_overs: Callable[[], list[str]]
    num_nodes: int
    network: str

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.config.run_dir)

    async def kill(self, name: str, pid: int) -> None:
        """Meanwhile workers hear of their script, which they would not outlive for long."""
        await asyncio.to_thread(self.on, name, "kill", "-9", str(pid))

    @asynccontextmanager
    async def fleet(self) -> AsyncIterator[tuple[Fleet, dict[str, WorkerLost]]]:
        """Of a controller, and what it hears of losses."""
        lost: dict[str, WorkerLost] = {}

        def note(event: LifeEvent | Wished) -> None:
            if isinstance(event, Died):
                assert isinstance(event.cause, WorkerLost)
                lost[event.unit] = event.cause

        runtime = Runtime.create(self.scheduler.keys)
        fleet = Fleet(self.scheduler, runtime, note)
        try:
            yield fleet, lost
        finally:
            await fleet.close()
            await runtime.transport.close()


def orders(*engines: str) -> list[WorkerOrder]:
    return [
        WorkerOrder("rollout", index, engine, {}, Device.cpu, 1)
        for index, engine in enumerate(engines)
    ]


class Conformance:
    """The checks, in the order in which they come."""

    async def test_nodes_are_machines_of_their_own_that_can_be_reached(self, lent: Lent) -> None:
        nodes = await lent.scheduler.nodes()
        assert await lent.scheduler.nodes() == nodes, "always the same objects"
        assert len({node.facts.token for node in nodes}) == lent.num_nodes
        assert len({node.name for node in nodes}) == lent.num_nodes
        for node in nodes:
            assert host_of(node.facts.address).startswith(lent.network)
            assert node.log_path.exists()
        assert await lent.scheduler.ended_nodes() == {}

    async def test_64_workers_serve_and_one_of_them_dies_and_serves_again(self, lent: Lent) -> None:
        async with lent.fleet() as (fleet, lost):
            await fleet.launch(orders(*["none"] * NUM_WORKERS))
            assert await fleet.call_all(PING, None, timeout_s=LIMIT_S) == [None] * NUM_WORKERS
            workers = [member.worker for member in fleet.members]
            assert len({worker.address for worker in workers}) == NUM_WORKERS
            at = Counter(host_of(worker.address) for worker in workers)
            nodes = {host_of(node.facts.address): node for node in await lent.scheduler.nodes()}
            assert at.keys() == nodes.keys()
            assert max(at.values()) == -(-NUM_WORKERS // lent.num_nodes)
            member, *others = fleet.members
            before = member.worker
            host = nodes[host_of(before.address)].name
            await lent.kill(host, before.pid)
            await until(lambda: lost)
            assert "rollout/0 ended with signal 9 (SIGKILL)" in str(lost.pop("rollout/0"))
            assert str(lent.folder.log_path("rollout/0")) == member.failure.log_path  # type: ignore[union-attr]
            await fleet.restart([member])
            assert member.worker.address == before.address
            assert member.worker.incarnation != before.incarnation
            assert await fleet.call_all(PING, None, timeout_s=LIMIT_S) == [None] * NUM_WORKERS
            assert [other.worker for other in others] == workers[1:]
            assert not lost

    async def test_a_worker_that_dies_at_once_is_named_and_the_others_end(self, lent: Lent) -> None:
        async with lent.fleet() as (fleet, _):
            with pytest.raises(WorkerStartError, match=r"rollout/1 ended with exit code 6") as told:
                await fleet.launch(orders("none", "broken", "none"))
            assert "ModelError: no weights" in told.value.log_tail[-1]
        await until(lambda: not any("rollout" in what for what in lent.left_overs()))

    async def test_a_worker_that_never_registers_is_named_in_time(
        self, lent: Lent, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lent.scheduler, "config", replace(lent.config, startup_timeout_s=2.0))
        async with lent.fleet() as (fleet, _):
            said = r"rollout/0 did not report within scheduler\.startup_timeout_s=2"
            with pytest.raises(WorkerStartError, match=said):
                await fleet.launch(orders("mute"))
        await until(lambda: not any("rollout" in what for what in lent.left_overs()))

    async def test_an_agent_that_died_is_started_again_for_all_who_ask(self, lent: Lent) -> None:
        async with lent.fleet() as (fleet, lost):
            await fleet.launch(orders(*["none"] * lent.num_nodes))
            node: Node = (await lent.scheduler.nodes())[-1]
            past = node.facts
            [agent] = [it for it in living_agents(lent.folder.path) if it.address == past.address]
            await lent.kill(node.name, agent.pid)
            await until(lambda: node.facts.incarnation != past.incarnation)
            await lent.scheduler.renew(node, past.incarnation)  # it was replaced already
            assert node.facts.host == past.host
            [gone] = lost
            await fleet.restart([member for member in fleet.members if member.name == gone])
            assert host_of(node.facts.address) == host_of(past.address)
            expected = [None] * lent.num_nodes
            assert await fleet.call_all(PING, None, timeout_s=LIMIT_S) == expected
            assert await lent.scheduler.ended_nodes() == {}

    async def test_nothing_is_left_when_it_is_closed(self, lent: Lent) -> None:
        async with lent.fleet() as (fleet, _):
            await fleet.launch(orders("none"))
            closing = asyncio.to_thread(lent.scheduler.close)
        await closing
        await until(lambda: lent.left_overs() == [])
        assert not lent.folder.keys_path.exists()
        await asyncio.to_thread(lent.scheduler.close)


class AskedConformance:
    """The checks of nodes that are asked for and given back, in the order in which they come.

    The scheduler begins with one node for rollout workers, and has room for another one.
    """

    async def test_a_node_that_is_asked_for_joins_and_is_given_back_with_its_last_worker(
        self, lent: Lent
    ) -> None:
        scheduler = lent.scheduler
        assert isinstance(scheduler, AsksForNodes)
        before = await scheduler.nodes()
        node = await scheduler.ask_node()
        assert await scheduler.nodes() == [*before, node]
        assert node.purpose is Purpose.rollout
        async with asyncio.timeout(LIMIT_S):
            await scheduler.renew(node, node.facts.incarnation)
        assert node.is_there
        async with lent.fleet() as (fleet, lost):
            await fleet.launch(orders("none", "none"))
            [there] = next(workers.members for workers in fleet.nodes if workers.node is node)
            await fleet.call_all(PING, None, timeout_s=LIMIT_S)
            agents = {agent.address for agent in living_agents(lent.folder.path)}
            await fleet.dismiss(there)
            assert await scheduler.nodes() == before
            left = {agent.address for agent in living_agents(lent.folder.path)}
            assert agents - left == {node.facts.address}
            assert await fleet.call_all(PING, None, timeout_s=LIMIT_S) == [None]
            assert not lost

    async def test_workers_are_expected_on_a_node_that_is_on_its_way(self, lent: Lent) -> None:
        async with lent.fleet() as (fleet, _):
            await fleet.launch(orders("none"))
            [member] = await fleet.expect(orders("none", "none")[1:])
            async with asyncio.timeout(LIMIT_S):
                await fleet.restart([member])
            assert await fleet.call_all(PING, None, timeout_s=LIMIT_S) == [None, None]
            assert len(fleet.nodes) == 2, "a node is for one worker here"
            await fleet.dismiss(member)

    async def test_one_that_is_on_its_way_is_withdrawn(self, lent: Lent) -> None:
        scheduler = lent.scheduler
        assert isinstance(scheduler, AsksForNodes)
        before, agents = await scheduler.nodes(), living_agents(lent.folder.path)
        await scheduler.give_back(await scheduler.ask_node())
        assert await scheduler.nodes() == before
        await until(lambda: living_agents(lent.folder.path) == agents)

    async def test_nothing_is_left_of_one_that_is_on_its_way_at_the_end(self, lent: Lent) -> None:
        assert isinstance(lent.scheduler, AsksForNodes)
        await lent.scheduler.ask_node()
        await asyncio.to_thread(lent.scheduler.close)
        await until(lambda: lent.left_overs() == [])
