"""A fleet of which one worker does not come up, in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from simulation.behavior import Behavior
from simulation.cluster import SimulatedCluster, SimulatedTransport
from simulation.virtual_loop import run_virtual

from areal_sc.config.schema import Device
from areal_sc.controller.fleet import Fleet
from areal_sc.controller.runtime import Runtime
from areal_sc.errors import WorkerStartError
from areal_sc.schedulers.base import LaunchRequest, RunningWorker


class BrokenCluster(SimulatedCluster):
    """Worker 0 comes up, worker 1 fails after a while, worker 2 takes for ever."""

    is_given_up = False

    async def launch(self, request: LaunchRequest) -> RunningWorker:
        if request.index == 1:
            await asyncio.sleep(10.0)
            raise WorkerStartError("rollout/1 did not come up")
        if request.index == 2:
            try:
                await asyncio.sleep(1e6)
            finally:
                self.is_given_up = True
        return await super().launch(request)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_nothing_is_left_of_a_launch_that_fails(tmp_path: Path, is_cancelled: bool) -> None:
    async def launch() -> None:
        cluster = BrokenCluster(tmp_path, Behavior())
        runtime = Runtime(transport=SimulatedTransport(cluster))
        fleet = Fleet(cluster, runtime, on_lost=lambda _: None)
        requests = [
            LaunchRequest("rollout", index, "LocalGenerator", {}, Device.cpu, 1)
            for index in range(3)
        ]
        launching = asyncio.create_task(fleet.launch(requests))
        if is_cancelled:
            await asyncio.sleep(5.0)
            launching.cancel()
        with pytest.raises((WorkerStartError, asyncio.CancelledError)) as caught:
            await launching
        assert caught.type is (asyncio.CancelledError if is_cancelled else WorkerStartError)
        assert cluster.workers["rollout/0"].exit_status is not None
        assert cluster.is_given_up
        assert fleet.members == []
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(launch())
