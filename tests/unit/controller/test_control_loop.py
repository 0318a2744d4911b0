"""Blocking methods: controllers' coroutines from a script's own thread."""

from __future__ import annotations

import asyncio
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulation.behavior import Behavior
from simulation.cluster import SimulatedCluster, SimulatedTransport
from simulation.settings import Settings, configs
from simulation.tasks import NamedWorkflow

from areal_sc.config.placement import Purpose
from areal_sc.config.server_settings import ServersConfig
from areal_sc.controller import starting
from areal_sc.controller.base import Controller, blocking
from areal_sc.controller.control_loop import ControlLoop
from areal_sc.controller.rollout.rollout_controller import RolloutController
from areal_sc.controller.starting import start
from areal_sc.engines.handles import make_generator
from areal_sc.errors import ConfigError, PeerLost, WorkerLost
from areal_sc.fleet.runtime import Runtime
from areal_sc.fleet.worker_life import FleetEvent
from areal_sc.nodes.spec import NodeFacts
from areal_sc.schedulers.base import Node


class Recorder(Controller):
    """A controller that only notes what happens to it."""

    def __init__(
        self, events: list[str], name: str, *, start_error: Exception | None = None
    ) -> None:
        self.events = events
        self.name = self.role = name
        self.start_error = start_error
        self.endings: list[BaseException] = []

    async def start_async(self) -> None:
        if self.start_error is not None:
            raise self.start_error
        await asyncio.sleep(0)
        self.events.append(f"{self.name} started")

    async def close_async(self) -> None:
        self.events.append(f"{self.name} closed")

    version = 0

    def _hear(self, event: FleetEvent) -> None:
        raise AssertionError("it has no workers")

    def note_end(self, error: BaseException) -> None:
        self.endings.append(error)

    async def where_async(self) -> str:
        return threading.current_thread().name

    where = blocking(where_async)

    async def fail_async(self, error: Exception) -> None:
        raise error

    fail = blocking(fail_async)

    async def wait_for_loss_async(self, other: Recorder, loss: WorkerLost) -> None:
        other.worker_lost = loss
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.events.append(f"{self.name} unwound")

    wait_for_loss = blocking(wait_for_loss_async)

    async def wait_for_ctrl_c_async(self) -> None:
        try:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            await asyncio.get_running_loop().create_future()
        finally:
            self.events.append(f"{self.name} unwound")

    wait_for_ctrl_c = blocking(wait_for_ctrl_c_async)


class Measurer(Recorder):
    async def measures_free_memory(self) -> bool:
        return True


class SlowRecorder(Recorder):
    async def start_async(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        await super().start_async()


def test_who_measures_free_memory_starts_when_the_others_hold_theirs() -> None:
    events: list[str] = []
    with start(Measurer(events, "servers"), SlowRecorder(events, "trainer")):
        assert events == ["trainer started", "servers started"]


@pytest.mark.parametrize(
    ("settings", "num_devices", "measures"),
    [
        ({"engine": "sglang", "device": "cuda"}, 1, True),
        ({"engine": "sglang", "device": "auto"}, 1, True),
        ({"engine": "sglang", "device": "auto"}, 0, False),
        ({"engine": "sglang", "device": "cpu"}, 1, False),
        ({"engine": "local", "device": "cuda"}, 1, False),  # its KV cache has a size
        ({"engine": "sglang", "servers": ServersConfig(urls=["http://a"])}, 1, False),
    ],
)
async def test_servers_of_its_own_on_gpus_of_their_nodes_measure_free_memory(
    settings: dict[str, Any], num_devices: int, measures: bool, tmp_path: Path
) -> None:
    controller = rollout_controller(tmp_path, settings, num_devices)
    assert await controller.measures_free_memory() == measures


class LentNodes(SimulatedCluster):
    """One for each role, of which that for generation has so many CUDA devices."""

    num_devices = 0

    async def nodes(self) -> list[Node]:
        found = [(Purpose.train, 1 - self.num_devices), (Purpose.rollout, self.num_devices)]
        return [
            Node(NodeFacts("a", "a", count, "", "", ""), Path(), purpose=purpose)
            for purpose, count in found
        ]


def rollout_controller(
    folder: Path, settings: dict[str, Any], num_devices: int = 0
) -> RolloutController:
    config = replace(configs(Settings())[1], **{"servers": ServersConfig(), **settings})
    cluster = LentNodes(folder, Behavior(), seed=0)
    cluster.num_devices = num_devices
    runtime = Runtime(transport=SimulatedTransport(cluster), new_id=cluster.new_id)
    return RolloutController(make_generator(config), cluster, runtime=runtime)


def num_control_threads() -> int:
    return sum(thread.name == "areal-controllers" for thread in threading.enumerate())


def test_methods_run_on_the_loop_of_the_block_and_block_their_caller() -> None:
    events: list[str] = []
    one, two = Recorder(events, "one"), Recorder(events, "two")
    with start(one, two):
        assert sorted(events) == ["one started", "two started"]
        assert one.where() == two.where() == "areal-controllers"
        assert num_control_threads() == 1
    assert sorted(events[2:]) == ["one closed", "two closed"]
    assert num_control_threads() == 0


def test_outside_of_the_block_a_method_says_what_to_do() -> None:
    controller = Recorder([], "one")
    with pytest.raises(RuntimeError, match=r"Recorder is not started: .*areal_sc\.start\("):
        controller.where()
    with start(controller):
        assert controller.where()
    with pytest.raises(RuntimeError, match="not started"):
        controller.where()


def test_the_loop_of_a_script_cannot_await_what_runs_on_that_of_the_block(tmp_path: Path) -> None:
    rollout = rollout_controller(tmp_path, {})
    loop = ControlLoop()
    rollout.attach(loop)
    try:
        with pytest.raises(RuntimeError, match=r"in place of the block, await start_async\(\)"):
            asyncio.run(rollout.prepare_batch_async([], NamedWorkflow()))
    finally:
        loop.close()


def test_an_exception_of_a_method_arrives_and_closes_everything() -> None:
    events: list[str] = []
    controller = Recorder(events, "one")
    error = ConfigError("no such thing")
    with pytest.raises(ConfigError) as caught, start(controller):
        controller.fail(error)
    assert caught.value is error
    assert controller.endings == [error], "what `status` says"
    assert events == ["one started", "one closed"]


def test_a_controller_that_does_not_start_closes_all() -> None:
    events: list[str] = []
    good = Recorder(events, "good")
    bad = Recorder(events, "bad", start_error=ConfigError("no"))
    with pytest.raises(ConfigError, match="no"), start(good, bad):
        raise AssertionError("the block began")
    assert {"good closed", "bad closed"} <= set(events)
    assert num_control_threads() == 0


def test_ctrl_c_unwinds_the_coroutine_before_the_workers_are_closed() -> None:
    events: list[str] = []
    controller = Recorder(events, "one")
    with pytest.raises(KeyboardInterrupt), start(controller):
        controller.wait_for_ctrl_c()
    assert events == ["one started", "one unwound", "one closed"]


def test_a_lost_worker_explains_the_failed_call_of_another_one() -> None:
    rollout, actor = Recorder([], "rollout"), Recorder([], "actor")
    lost = WorkerLost("worker train/0 ended with exit code 1")
    refused = PeerLost("train/0 is lost")

    def script() -> None:
        with start(rollout, actor):
            actor.worker_lost = lost  # as its heartbeat finds
            rollout.fail(refused)

    with pytest.raises(WorkerLost) as caught:
        script()
    assert caught.value is lost
    assert lost.__cause__ is refused


def test_a_lost_worker_ends_the_wait_in_a_call_of_another_controller() -> None:
    events: list[str] = []
    rollout, actor = Recorder(events, "rollout"), Recorder(events, "actor")
    lost = WorkerLost("worker train/0 ended with exit code 1")
    with pytest.raises(WorkerLost) as caught, start(rollout, actor):
        rollout.wait_for_loss(actor, lost)
    assert caught.value is lost
    assert events.index("rollout unwound") < events.index("rollout closed")


def test_a_loss_of_an_earlier_start_is_forgotten() -> None:
    controller = Recorder([], "one")
    controller.worker_lost = WorkerLost("worker train/0 ended with exit code 1")
    with start(controller):
        assert controller.where() == "areal-controllers"


def test_a_failed_call_without_a_lost_worker_stays_what_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(starting, "LOSS_NOTICE_S", 0.1)
    controller = Recorder([], "one")
    with pytest.raises(PeerLost, match="unreachable"), start(controller):
        controller.fail(PeerLost("unreachable"))
