"""The agent of one node, through all its lives, as the controller of one role sees it.

    launch ──► connection to the newest life
    lost  ──► Supervisor ── Restart ──► pause, Scheduler.renew, new connection ──► serves
                              └──────── GiveUp ───► NodeLost, for every launch from then on

consumes     launches; `replace`, by whoever watches the node
waits for    the agent's replies; while it is started again, launches wait for that
unblocked by the new agent, or by the end of the attempts, each of which the scheduler bounds

An agent is lost when its process has ended, as the scheduler says; when it is silent for as long as
a worker may be; and when another controller has had it replaced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from areal_sc.controller.runtime import Runtime
from areal_sc.controller.supervisor import (
    GiveUp,
    Lost,
    Progressed,
    Restart,
    Served,
    Started,
    StartFailed,
    Supervisor,
)
from areal_sc.errors import (
    ArealError,
    NodeLost,
    PeerLost,
    TransportError,
    WorkerError,
    WorkerLost,
    WorkerStartError,
)
from areal_sc.log import log_tail
from areal_sc.schedulers.base import Node, Scheduler
from areal_sc.transport.rpc.transport import Connection
from areal_sc.workers.spec import LAUNCH, Launch, Launched, WorkerOrder, WorkerReport

logger = logging.getLogger(__name__)

RPC_MARGIN_S: Final = 30.0
"""What a call of an agent may take beyond the time that it says."""


class NodeAgent:
    """Starts workers through the agent of a node, and has the agent started again.

    Attributes:
        connection: to the newest life that is known here.
    """

    def __init__(self, node: Node, scheduler: Scheduler, runtime: Runtime) -> None:
        self._node = node
        self._scheduler = scheduler
        self._runtime = runtime
        self._supervisor = Supervisor([node.name], scheduler.config.max_deaths)
        self._serves = asyncio.Event()
        self._failure: NodeLost | None = None
        self._past_bytes = 0
        self._connect()

    @property
    def num_bytes(self) -> int:
        """Sent and received on all connections so far."""
        return self._past_bytes + self.connection.bytes_sent + self.connection.bytes_received

    async def launch(self, orders: Sequence[WorkerOrder]) -> list[WorkerReport]:
        """Starts workers, once the agent serves; they are in the order of the orders.

        Raises: WorkerStartError: one did not come up; the agent has ended the others. NodeLost: the
            agent cannot be started again.
        """
        launch = Launch(list(orders), self._scheduler.config.startup_timeout_s)
        try:
            try:
                launched = await self._launch(launch)
            except PeerLost:
                self.lose()  # whoever watches finds out what became of it
                launched = await self._launch(launch)
        except TransportError as error:
            path = self._node.log_path
            what = f"the agent of node {self._node.name} started no workers: {error}"
            raise WorkerStartError.with_log(what, path, log_tail(path)) from error
        if launched.failure:
            raise WorkerStartError(
                launched.failure, log_path=launched.log_path, log_tail=launched.log_tail
            )
        self._supervisor.on(Progressed(self._node.name))
        for worker in launched.workers:
            logger.info("worker=%s pid=%d address=%s", worker.name, worker.pid, worker.address)
        return launched.workers

    async def _launch(self, launch: Launch) -> Launched:
        await self._serves.wait()
        if self._failure is not None:
            raise self._failure
        return await self.connection.call(LAUNCH, launch, timeout_s=launch.timeout_s + RPC_MARGIN_S)

    async def how_it_ended(self) -> str | None:
        """In words that follow "its agent"; None: nobody says that it has ended.

        Raises: ArealError: that is not known now.
        """
        if self._node.facts.incarnation != self._incarnation:
            return "was started again"
        how = (await self._scheduler.ended_nodes()).get(self._node)
        return None if how is None else f"ended with {how}"

    def note_heard(self) -> None:
        """It answers: whoever took it for lost was wrong."""
        self._serves.set()

    def lose(self) -> None:
        """Ends the calls that wait; later launches wait for `replace`, or for `note_heard`."""
        self._serves.clear()
        self.connection.fail_pending(PeerLost(f"the agent of node {self._node.name} is lost"))

    async def replace(self, cause: str) -> None:
        """Returns when a new agent serves.

        Args:
            cause: why, in words that follow "the agent of node X".
        Raises: NodeLost: it was started too often in vain.
        """
        node, path = self._node, self._node.log_path
        what = f"the agent of node {node.name} {cause}"
        action = self._supervisor.on(
            Lost(self._incarnation, WorkerLost.with_log(what, path, log_tail(path)))
        )
        while isinstance(action, Restart):
            await asyncio.sleep(action.after_s)
            logger.warning("node=%s its agent is started again, since it %s", node.name, cause)
            try:
                await self._scheduler.renew(node, self._incarnation)
            except WorkerError as error:
                action = self._supervisor.on(StartFailed(node.name, error))
            except ArealError as error:
                lost = WorkerLost(f"node {node.name} cannot be used any more: {error}")
                action = self._supervisor.on(StartFailed(node.name, lost))
            else:
                action = None
        if isinstance(action, GiveUp):
            last = action.cause
            self._failure = NodeLost(
                f"node {node.name} was lost {action.num_deaths} times in a row: {last}",
                log_path=last.log_path,
                log_tail=last.log_tail,
            )
            self._serves.set()
            raise self._failure
        await self.connection.close()
        self._past_bytes = self.num_bytes
        self._connect()

    async def close(self) -> None:
        """Ends the connection; the agent is the scheduler's."""
        await self.connection.close()

    def _connect(self) -> None:
        facts = self._node.facts
        self._incarnation = facts.incarnation
        self.connection: Connection = self._runtime.transport.connect(
            facts.address, "agent", facts.incarnation
        )
        self._supervisor.on(Started(self._node.name, frozenset([facts.incarnation])))
        self._supervisor.on(Served(self._node.name))
        self._serves.set()
