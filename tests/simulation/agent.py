"""The agent of a simulated node: starts simulated workers, and tells of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from areal_sc.errors import WorkerStartError
from areal_sc.log import log_tail
from areal_sc.run_folder import RunFolder
from areal_sc.workers.spec import (
    LAUNCH,
    LOG_TAIL,
    STOP,
    WATCH,
    EndedWorker,
    Launch,
    Launched,
    News,
    Stop,
    Watch,
    WorkerOrder,
    WorkerReport,
)

if TYPE_CHECKING:
    from simulation.cluster import SimulatedCluster
    from simulation.connection import SimulatedConnection


class SimulatedAgent:
    """As `Agent`, without processes.

    Attributes:
        node: name of its node.
        incarnation: of this life.
        exit_status: how its process ended; None while it lives.
        is_hung: it lives, and answers nobody.
        inbox: what it takes when it goes on.
        num_watches: questions for news so far.
    """

    is_blocked = False

    def __init__(self, cluster: SimulatedCluster, node: str, incarnation: str) -> None:
        self.cluster = cluster
        self.name = "agent"
        self.node = node
        self.incarnation = incarnation
        self.address = f"sim-agent://{node}/{incarnation}"
        self.exit_status: str | None = None
        self.inbox: list[Callable[[], None]] = []
        self._is_hung = False
        self.num_watches = 0
        self.connections: list[SimulatedConnection] = []
        self.served = {
            served.method.name: served
            for served in (
                LAUNCH.served_by(self.launch),
                WATCH.served_by(self.watch),
                STOP.served_by(self.stop),
                LOG_TAIL.served_by(self.log_tail),
            )
        }
        self._ended: list[EndedWorker] = []
        self._end_noted = asyncio.Event()

    @property
    def is_hung(self) -> bool:
        return self._is_hung

    @is_hung.setter
    def is_hung(self, is_hung: bool) -> None:
        self._is_hung = is_hung
        if not is_hung:
            inbox, self.inbox = self.inbox, []
            for take in inbox:
                take()

    async def launch(self, launch: Launch) -> Launched:
        starts = [asyncio.create_task(self._start(order)) for order in launch.orders]
        try:
            return Launched(await asyncio.gather(*starts))
        except WorkerStartError as error:
            return Launched([], str(error), "", list(error.log_tail))
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)

    async def _start(self, order: WorkerOrder) -> WorkerReport:
        worker = await self.cluster.start(order, self.node)
        return WorkerReport(worker.name, worker.incarnation, worker.address, 1, self.node)

    async def watch(self, watch: Watch) -> News:
        self.num_watches += 1
        if watch.num_ended == len(self._ended):
            with suppress(TimeoutError):
                async with asyncio.timeout(watch.hold_s):
                    await self._end_noted.wait()
        prefix = f"{watch.role}/"
        return News(
            beats=[
                worker.beat
                for worker in self.cluster.workers_on(self.node)
                if worker.name.startswith(prefix) and worker.exit_status is None
            ],
            ended=[e for e in self._ended[watch.num_ended :] if e.name.startswith(prefix)],
            num_ended=len(self._ended),
        )

    async def stop(self, stop: Stop) -> None:
        for worker in self.cluster.workers_on(self.node):
            if worker.incarnation in stop.incarnations:
                worker.end("signal 9 (SIGKILL)")

    async def log_tail(self, name: str) -> list[str]:
        return [f"the log of {name}"]

    def note_end(self, name: str, incarnation: str, how: str) -> None:
        """The process of one of its workers has ended."""
        path = RunFolder(self.cluster.config.run_dir).log_path(name)
        self._ended.append(EndedWorker(name, incarnation, how, str(path), log_tail(path)))
        self._end_noted.set()
        self._end_noted = asyncio.Event()

    def end(self, exit_status: str) -> None:
        """Its process ends, and with it those of its workers."""
        if self.exit_status is not None:
            return
        self.exit_status = exit_status
        for worker in self.cluster.workers_on(self.node):
            worker.end("signal 9 (SIGKILL)")
        for connection in self.connections:
            connection.lose_peer()
        self.cluster.on_end(self)
