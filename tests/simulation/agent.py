"""The agent of a simulated node: starts simulated workers, and tells of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from simulation.process import Process

from areal_sc.errors import WorkerStartError
from areal_sc.log import log_tail
from areal_sc.nodes.spec import (
    CALLS_FORMAT,
    DESCRIBE,
    LAUNCH,
    STACKS,
    STOP,
    WATCH,
    EndedWorker,
    Launch,
    Launched,
    LivingWorker,
    News,
    NodeDescription,
    NodeFacts,
    Stop,
    Watch,
    WorkerOrder,
    WorkerReport,
    WorkerStacks,
)
from areal_sc.run.run_folder import RunFolder
from areal_sc.transport.rpc.newest_term import NewestTerm

if TYPE_CHECKING:
    from simulation.cluster import SimulatedCluster
    from simulation.workers import SimulatedWorker


END_S = 0.1
"""More than a worker takes to end that was asked to."""


class SimulatedAgent:
    """As `Agent`, without processes.

    Attributes:
        node: name of its node.
        incarnation: of this life.
        exit_status: how its process ended; None while it lives.
        is_hung: it lives, and answers nobody.
        inbox: what it takes when it goes on.
        num_watches: questions for news so far.
        warnings: that it tells with the next answer.
    """

    is_blocked = False
    role = "agent"

    def __init__(self, cluster: SimulatedCluster, node: str, incarnation: str) -> None:
        self.cluster = cluster
        self.name = "agent"
        self.node = node
        self.incarnation = incarnation
        self.address = f"sim://{cluster.machine(node)}:{incarnation}"
        self.newest_term = NewestTerm()
        self.process = Process(f"agent of {node}")
        self.exit_status: str | None = None
        self.inbox: list[Callable[[], None]] = []
        self._is_hung = False
        self.num_watches = 0
        self.warnings: tuple[str, ...] = ()
        self.served = {
            served.method.name: served
            for served in (
                DESCRIBE.served_by(self.describe),
                LAUNCH.served_by(self.launch),
                WATCH.served_by(self.watch),
                STOP.served_by(self.stop),
                STACKS.served_by(self.stacks),
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

    @property
    def facts(self) -> NodeFacts:
        root = self.cluster.config.run_dir
        return NodeFacts(self.node, self.node, 0, root, self.address, self.incarnation)

    @property
    def found(self) -> list[LivingWorker]:
        """The workers that it has started, and that live; some do not serve yet."""
        serving = [
            LivingWorker(worker.order, self._report(worker))
            for worker in self.cluster.workers_on(self.node)
            if worker.exit_status is None
        ]
        starting = self.cluster.starting.values()
        return serving + [LivingWorker(order, None) for order, at in starting if at == self.node]

    async def describe(self, _: None) -> NodeDescription:
        return NodeDescription(self.facts, self.cluster.config, self.found, CALLS_FORMAT)

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
        return self._report(await self.cluster.start(order, self.node))

    def _report(self, worker: SimulatedWorker) -> WorkerReport:
        found = worker.name, worker.incarnation, worker.address, 1, self.node, worker.room_bytes
        return WorkerReport(*found)

    async def watch(self, watch: Watch) -> News:
        self.num_watches += 1
        if watch.num_ended == len(self._ended):
            with suppress(TimeoutError):
                async with asyncio.timeout(watch.hold_s):
                    await self._end_noted.wait()
        prefix = f"{watch.role}/"
        warnings, self.warnings = self.warnings, ()
        return News(
            beats=[
                worker.beat
                for worker in self.cluster.workers_on(self.node)
                if worker.name.startswith(prefix) and worker.exit_status is None
            ],
            ended=[e for e in self._ended[watch.num_ended :] if e.name.startswith(prefix)],
            num_ended=len(self._ended),
            warnings=warnings,
        )

    async def stop(self, stop: Stop) -> None:
        workers = [
            worker
            for worker in self.cluster.workers_on(self.node)
            if worker.incarnation in stop.incarnations
        ]
        for order, _ in list(self.cluster.starting.values()):
            if order.incarnation in stop.incarnations:
                del self.cluster.starting[order.name]
        if any(worker.exit_status is None for worker in workers):
            await asyncio.sleep(min(stop.grace_s, END_S))  # they end by themselves, if they can
        for worker in workers:
            worker.end("signal 9 (SIGKILL)")

    async def stacks(self, names: list[str]) -> list[WorkerStacks]:
        return [WorkerStacks(name, "waits", [f"the log of {name}"]) for name in names]

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
        self.process.kill()
        for worker in self.cluster.workers_on(self.node):
            worker.end("signal 9 (SIGKILL)")
        self.cluster.network.end(self)
