"""Which CUDA devices LocalScheduler shows to which worker; no process is started."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from areal_sc.config.machine import Machine
from areal_sc.config.schema import Device, SchedulerConfig, TransportConfig
from areal_sc.errors import ConfigError, RunFolderError, WorkerStartError
from areal_sc.open_files import MAX_OPEN_FILES
from areal_sc.schedulers import local
from areal_sc.schedulers.base import LaunchRequest, RunningWorker
from areal_sc.schedulers.local import LocalScheduler
from areal_sc.workers.spec import WorkerReport, WorkerSpec


class ServingAtOnce:
    """A fork server whose workers report as soon as they are spawned, and end when asked."""

    def __init__(self) -> None:
        self.num_spawned = 0

    def spawn(self, kind: str, spec: dict[str, Any], log_path: Path, *, timeout_s: float) -> int:
        self.num_spawned += 1
        worker = WorkerSpec(**spec)
        report = WorkerReport(
            worker.name, worker.incarnation, "tcp://nowhere:1", "", self.num_spawned, "node"
        )
        worker.report_path.write_text(json.dumps(asdict(report)))
        return self.num_spawned

    def poll(self) -> dict[int, int]:
        return dict.fromkeys(range(1, self.num_spawned + 1), 0)

    def shutdown(self, timeout_s: float) -> None: ...


class Launcher:
    """Launches workers on a machine with so many devices."""

    def __init__(self, scheduler: LocalScheduler) -> None:
        self.scheduler = scheduler

    async def launch(
        self, role: str, index: int, num_devices: int = 1, device: Device = Device.auto
    ) -> RunningWorker:
        request = LaunchRequest(role, index, "none", {}, device, 1, num_devices)
        return await self.scheduler.launch(request)

    async def devices(self, *arguments: Any) -> str:
        """CUDA_VISIBLE_DEVICES of a worker that is launched."""
        return (await self.launch(*arguments)).spec.environment["CUDA_VISIBLE_DEVICES"]


@pytest.fixture
def on_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(local, "start_fork_server", lambda **_: ServingAtOnce())
    schedulers = []

    def make(num_devices: int) -> Launcher:
        transport = TransportConfig(shared_memory="off")
        config = SchedulerConfig(run_dir=str(tmp_path), transport=transport)
        machine = Machine(cuda_memory_bytes=(1 << 30,) * num_devices)
        schedulers.append(LocalScheduler(config, probe=lambda: machine))
        return Launcher(schedulers[-1])

    yield make
    for scheduler in schedulers:
        scheduler.close()


async def test_free_devices_first_then_those_of_other_roles(on_machine: Any) -> None:
    machine = on_machine(4)
    assert await machine.devices("train", 0) == "0"
    assert await machine.devices("train", 1) == "1"
    assert await machine.devices("rollout", 0, 2) == "2,3"
    assert await machine.devices("rollout", 1, 2) == "0,1", "shared with training"
    assert await machine.devices("train", 2) == "2", "not with its own role"


async def test_a_worker_that_needs_all_gets_them_in_order(on_machine: Any) -> None:
    machine = on_machine(3)
    assert await machine.devices("train", 0) == "0"
    assert await machine.devices("rollout", 0, 3) == "0,1,2", "the free ones are 1 and 2"


async def test_one_device_is_shared_by_all(on_machine: Any) -> None:
    machine = on_machine(1)
    assert await machine.devices("train", 0) == "0"
    assert await machine.devices("rollout", 0) == "0"


async def test_names_come_from_the_visible_devices(
    on_machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7, 5,GPU-a")
    machine = on_machine(3)
    assert await machine.devices("train", 0) == "7"
    assert await machine.devices("rollout", 0, 2) == "5,GPU-a"


async def test_workers_without_a_device_see_none(on_machine: Any) -> None:
    machine = on_machine(2)
    assert await machine.devices("rollout", 0, 2, Device.cpu) == ""
    assert await machine.devices("rollout", 1, 0) == ""
    assert await machine.devices("train", 0) == "0", "they have taken none"


async def test_a_machine_without_devices(on_machine: Any) -> None:
    machine = on_machine(0)
    assert await machine.devices("rollout", 0, 2) == ""
    with pytest.raises(ConfigError, match="needs 1 CUDA devices, and this machine has 0"):
        await machine.devices("rollout", 0, 1, Device.cuda)


async def test_more_devices_than_there_are(on_machine: Any) -> None:
    machine = on_machine(2)
    with pytest.raises(ConfigError, match=r"rollout/0 needs 3 CUDA devices.*has 2.*tp_size"):
        await machine.devices("rollout", 0, 3)
    assert await machine.devices("rollout", 0, 2) == "0,1", "the refused one has taken none"


async def test_devices_come_back_when_a_worker_stops_or_is_replaced(on_machine: Any) -> None:
    machine = on_machine(2)
    first = await machine.launch("train", 0)
    assert await machine.devices("train", 1) == "1"
    await machine.scheduler.stop([first])
    assert await machine.devices("rollout", 0) == "0"
    assert await machine.devices("rollout", 0) == "0", "its successor is placed as it was"


async def test_a_worker_that_does_not_report_is_ended_and_gives_its_device_back(
    on_machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = on_machine(2)
    killed: list[int] = []
    fork_server = machine.scheduler._fork_server
    with monkeypatch.context() as broken:
        broken.setattr(fork_server, "spawn", lambda *_, **__: 77)
        broken.setattr(fork_server, "poll", lambda: {77: 1})
        broken.setattr(fork_server, "kill", lambda pid, signum: killed.append(pid), raising=False)
        with pytest.raises(WorkerStartError, match="ended with exit code 1 before it served"):
            await machine.launch("train", 0)
    assert killed == [77]
    assert await machine.devices("train", 1) == "0", "the one that failed has none"


def test_a_run_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match=r"/file is a file, not a folder"):
        LocalScheduler(SchedulerConfig(run_dir=str(tmp_path / "file" / "run")))


def test_the_limit_of_open_files_is_raised_before_a_worker_inherits_it(on_machine: Any) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        on_machine(0)
        raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert raised == min(hard, MAX_OPEN_FILES)
