"""A fleet of which one worker does not come up, in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from simulation.behavior import Behavior
from simulation.cluster import SimulatedCluster, SimulatedTransport
from simulation.virtual_loop import run_virtual
from simulation.workers import SimulatedWorker

from areal_sc.config.schema import Device
from areal_sc.controller.fleet import Fleet
from areal_sc.controller.runtime import Runtime
from areal_sc.errors import WorkerStartError
from areal_sc.workers.spec import WorkerOrder


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


@pytest.mark.parametrize("num_nodes", [1, 3])
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_nothing_is_left_of_a_launch_that_fails(
    tmp_path: Path, is_cancelled: bool, num_nodes: int
) -> None:
    async def launch() -> None:
        cluster = BrokenCluster(tmp_path, Behavior())
        cluster.num_nodes = num_nodes
        runtime = Runtime(transport=SimulatedTransport(cluster))
        fleet = Fleet(cluster, runtime, on_lost=lambda *_: None)
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

    run_virtual(launch())
