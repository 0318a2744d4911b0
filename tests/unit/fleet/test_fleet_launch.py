"""A fleet of which one worker does not come up, in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from simulation.behavior import Behavior
from simulation.cluster import SimulatedCluster, SimulatedTransport
from simulation.virtual_loop import in_virtual_time
from simulation.workers import SimulatedWorker

from areal_sc.config.schema import Device
from areal_sc.errors import WorkerLost, WorkerStartError
from areal_sc.fleet.fleet import Fleet
from areal_sc.fleet.runtime import Runtime
from areal_sc.nodes.spec import LAUNCH, STOP, Launch, Launched, Stop, WorkerOrder
from areal_sc.run.run_owner import RunTerm
from areal_sc.transport.sockets.interface import port_of
from areal_sc.workers.calls import PING


class BrokenCluster(SimulatedCluster):
    """Worker 0 comes up, worker 1 fails after a while, worker 2 takes for ever."""

    is_given_up = False

    async def start(self, order: WorkerOrder, node: str) -> SimulatedWorker:
        if order.index == 1:
            await asyncio.sleep(10.0)
            raise WorkerStartError("rollout/1 did not come up", log_tail=["no memory"])
        if order.index == 2:
            try:
                await asyncio.sleep(1e6)
            finally:
                self.is_given_up = True
        return await super().start(order, node)


@in_virtual_time
@pytest.mark.parametrize("num_nodes", [1, 3])
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_nothing_is_left_of_a_launch_that_fails(
    tmp_path: Path, is_cancelled: bool, num_nodes: int
) -> None:
    cluster = BrokenCluster(tmp_path, Behavior())
    cluster.num_nodes = num_nodes
    runtime = Runtime(transport=SimulatedTransport(cluster))
    fleet = Fleet(cluster, runtime, lambda event: None)
    orders = [
        WorkerOrder("rollout", index, "LocalGenerator", {}, Device.cpu, 1) for index in range(3)
    ]
    launching = asyncio.create_task(fleet.launch(orders))
    if is_cancelled:
        await asyncio.sleep(5.0)
        launching.cancel()
    with pytest.raises((WorkerStartError, asyncio.CancelledError)) as caught:
        await launching
    assert caught.type is (asyncio.CancelledError if is_cancelled else WorkerStartError)
    if not is_cancelled:
        assert isinstance(caught.value, WorkerStartError)
        assert caught.value.log_tail == ("no memory",)
    assert cluster.workers["rollout/0"].exit_status is not None
    await asyncio.sleep(1.0)  # the news of it travels
    assert cluster.is_given_up
    assert fleet.members == []
    assert asyncio.all_tasks() == {asyncio.current_task()}


@in_virtual_time
async def test_a_worker_that_nobody_could_ask_to_end_is_not_waited_for(tmp_path: Path) -> None:
    """The reply to its launch is on its way when another one fails."""
    cluster = SimulatedCluster(tmp_path, Behavior())
    fleet = Fleet(cluster, Runtime(transport=SimulatedTransport(cluster)), lambda event: None)
    await cluster.nodes()
    agent, graces_s = cluster.agents["node-0"], list[float]()

    async def launched(launch: Launch) -> Launched:
        reply = await agent.launch(launch)
        await asyncio.sleep(100.0)
        return reply

    async def stop(stop: Stop) -> None:
        graces_s.append(stop.grace_s)
        await agent.stop(stop)

    agent.served[LAUNCH.name] = LAUNCH.served_by(launched)
    agent.served[STOP.name] = STOP.served_by(stop)
    order = WorkerOrder("rollout", 0, "LocalGenerator", {}, Device.cpu, 1)
    launching = asyncio.create_task(fleet.launch([order]))
    await asyncio.sleep(50.0)
    assert cluster.workers["rollout/0"].exit_status is None
    launching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await launching
    assert graces_s == [0.0]
    assert cluster.workers["rollout/0"].exit_status is not None


@in_virtual_time
@pytest.mark.parametrize("is_superseded", [False, True])
async def test_a_close_leaves_the_workers_of_a_later_start_alone(
    tmp_path: Path, is_superseded: bool
) -> None:
    cluster = SimulatedCluster(tmp_path, Behavior())
    cluster.terms[None] = RunTerm.begin(tmp_path)
    runtime = Runtime(transport=cluster.transport())
    fleet = Fleet(cluster, runtime, lambda event: None)
    await fleet.launch([WorkerOrder("rollout", 0, "LocalGenerator", {}, Device.cpu, 1)])
    if is_superseded:
        RunTerm.begin(tmp_path)  # it has told no worker of it yet
    await fleet.close()
    await asyncio.sleep(1.0)
    assert (cluster.workers["rollout/0"].exit_status is None) == is_superseded


@in_virtual_time
async def test_a_life_that_is_lost_before_a_call_to_it_is_sent_is_left_out(tmp_path: Path) -> None:
    """Calls to many begin in several turns; its next life gets this one, and refuses it."""
    cluster = SimulatedCluster(tmp_path, Behavior())
    runtime = Runtime(transport=cluster.transport(), new_id=cluster.new_id)
    fleet = Fleet(cluster, runtime, lambda event: None)
    orders = [WorkerOrder("rollout", i, "LocalGenerator", {}, Device.cpu, 1) for i in range(2)]
    await fleet.launch(orders)
    kept, lost = fleet.members
    living = asyncio.create_task(fleet.call_living(PING, None, fleet.members))
    each = asyncio.create_task(fleet.call_each(PING, [None, None]))
    await asyncio.sleep(0)
    cluster.workers[lost.name].end("signal 9 (SIGKILL)")
    fleet.lose(lost, lost.worker.incarnation, "has died")
    port = port_of(lost.worker.address)
    await cluster.start(replace(lost.order, incarnation="b", port=port), "node-0")
    assert await living == {kept: None}
    with pytest.raises(WorkerLost, match="has died"):
        await each
    await fleet.close()
