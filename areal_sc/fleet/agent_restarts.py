"""The agent of one node, through all its lives, as the controller of one role sees it.

    launch ──► connection to the newest life; of a node that is on its way, once `come` is done
    lost   ──► Deaths ── again ──► pause, Scheduler.renew, new connection ──► serves
                 └────── too often ──► NodeLost, for every launch from then on

consumes     launches; `replace`, by whoever watches the node
waits for    the agent's replies; while it is started again, launches wait for that
unblocked by the new agent, or by the end of the attempts, each of which the scheduler bounds. One
             that has to queue for a machine in place of a lost one may wait for hours; the others
             go on meanwhile

An agent is lost when its process has ended, as the scheduler says; when it is silent for as long as
a worker may be; and when another controller has had it replaced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from areal_sc.errors import (
    ArealError,
    NodeLost,
    PeerLost,
    StaleTerm,
    TransportError,
    WorkerError,
    WorkerLost,
    WorkerStartError,
)
from areal_sc.fleet.member import NoConnection
from areal_sc.fleet.runtime import Runtime
from areal_sc.log import log_tail
from areal_sc.nodes import spec
from areal_sc.schedulers.base import Node, Scheduler
from areal_sc.system.deaths import Deaths
from areal_sc.system.waiting import bounded
from areal_sc.transport.rpc.transport import Connection

logger = logging.getLogger(__name__)

MAX_MISSED: Final = 5
"""Heartbeats; who gives no more of them is lost."""
RPC_MARGIN_S: Final = 30.0
"""What a call of an agent may take beyond the time that it says."""
STOP_MARGIN_S: Final = 15.0
"""An agent waits for 10 s until a process has died of SIGKILL."""
STACKS_LIMIT_S: Final = 5.0


class NodeAgent:
    """Starts workers through the agent of a node, and has the agent started again.

    Attributes:
        connection: to the newest life that is known here.
    """

    def __init__(self, node: Node, scheduler: Scheduler, runtime: Runtime) -> None:
        self._node = node
        self._scheduler = scheduler
        self._runtime = runtime
        self._first_name = node.name  # the machine may be another one later
        self._num_devices = node.facts.num_devices
        self._deaths = Deaths(scheduler.config.max_deaths)
        self._serves = asyncio.Event()
        self._failure: NodeLost | None = None
        self._incarnation = node.facts.incarnation
        self.connection: Connection = NoConnection(f"the agent of node {node.name}")
        if node.is_there:
            self._connect()

    async def launch(self, orders: Sequence[spec.WorkerOrder]) -> list[spec.WorkerReport]:
        """Starts workers, once the agent serves; they are in the order of the orders.

        Raises: WorkerStartError: one did not come up; the agent has ended the others. NodeLost: the
            agent cannot be started again.
        """
        passes = self._scheduler.passes
        keys = [passes.issue(order.name, order.caller) for order in orders]
        limit_s = self._scheduler.config.startup_timeout_s
        launch = spec.Launch(list(orders), keys, limit_s, passes.replaced)
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
        self._deaths.number = 0  # it has done something useful
        for worker in launched.workers:
            logger.info("worker=%s pid=%d address=%s", worker.name, worker.pid, worker.address)
        return launched.workers

    async def _launch(self, launch: spec.Launch) -> spec.Launched:
        await self.wait_until_served()
        limit_s = launch.timeout_s + RPC_MARGIN_S
        if not self._node.facts.shares_folder:
            limit_s += self._scheduler.config.shipping_timeout_s
        return await self.connection.call(spec.LAUNCH, launch, timeout_s=limit_s)

    async def wait_until_served(self) -> None:
        """Returns when workers can be launched. Raises: NodeLost: they never can."""
        await self._serves.wait()
        if self._failure is not None:
            raise self._failure

    async def stop(self, incarnations: Sequence[str], grace_s: float = 0.0) -> None:
        """Ends workers; those that have not ended by then are killed.

        If the agent cannot be reached, they die with it, of their orphan timeout, or when their
        successors are started.
        """
        if self.is_lost:
            return
        stop, limit_s = spec.Stop(list(incarnations), grace_s), grace_s + STOP_MARGIN_S
        try:
            await self.connection.call(spec.STOP, stop, timeout_s=limit_s)
        except (TransportError, StaleTerm) as error:
            logger.warning("node=%s its agent stopped no workers: %s", self._node.name, error)

    async def stacks(self, workers: Sequence[str]) -> list[spec.WorkerStacks]:
        """Where workers are, as far as the agent can tell."""
        try:
            return await self.connection.call(spec.STACKS, list(workers), timeout_s=STACKS_LIMIT_S)
        except TransportError as error:
            logger.warning("workers=%s nobody tells where they are: %s", workers, error)
            return []

    async def how_it_ended(self) -> str | None:
        """In words that follow "its agent"; None: nobody says that it has ended.

        Raises: ArealError: that is not known now.
        """
        if self._node.facts.incarnation != self._incarnation:
            return "was started again"
        limit_s = MAX_MISSED * self._scheduler.config.heartbeat_interval_s
        what = "the scheduler to tell which agents have ended"
        setting = f"scheduler.heartbeat_interval_s, {MAX_MISSED} times,"
        ended = await bounded(self._scheduler.ended_nodes(), limit_s, what, setting)
        how = ended.get(self._node)
        return None if how is None else f"ended with {how}"

    @property
    def is_lost(self) -> bool:
        """Whether launches wait for the next one."""
        return not self._serves.is_set()

    def note_heard(self) -> None:
        """It answers: whoever took it for lost was wrong."""
        self._serves.set()

    def lose(self) -> None:
        """Ends the calls that wait; later launches wait for `replace`, or for `note_heard`."""
        self._serves.clear()
        self.connection.fail_pending(PeerLost(f"the agent of node {self._node.name} is lost"))

    def give_up(self, cause: str) -> None:
        """Nobody looks after it any more: launches fail, those that wait for it, too."""
        self._failure = self._failure or NodeLost(f"node {self._node.name} {cause}")
        self._serves.set()

    async def replace(self, cause: str) -> None:
        """Returns when a new agent serves.

        Args:
            cause: why, in words that follow "the agent of node X".
        Raises: NodeLost: it was started too often in vain.
        """
        path, name = self._node.log_path, self._node.name
        lost = WorkerLost.with_log(f"the agent of node {name} {cause}", path, log_tail(path))
        logger.warning("node=%s its agent is started again, since it %s", name, cause)
        await self.renew(lost)

    async def renew(self, death: WorkerError | None) -> None:
        """Returns when an agent serves.

        Args:
            death: of the agent before; None: there was none.
        Raises: NodeLost: see `replace`.
        """
        node, is_final = self._node, False
        pause_s = 0.0 if death is None else self._deaths.note_death()
        while pause_s is not None:
            await asyncio.sleep(pause_s)
            try:
                await self._scheduler.renew(node, self._incarnation)
                death = self._lack_of_devices()
                is_final = death is not None
            except StaleTerm:
                raise
            except ArealError as error:
                logger.warning("node=%s has no agent: %s", node.name, error)
                lost = WorkerLost(f"node {node.name} cannot be used: {error}")
                death = error if isinstance(error, WorkerError) else lost
            if death is None:
                break
            pause_s = self._deaths.note_death(is_final=is_final)
        if death is not None:
            self._failure = NodeLost(
                f"node {node.name} was lost {self._deaths.number} times in a row: {death}",
                log_path=death.log_path,
                log_tail=death.log_tail,
            )
            self._serves.set()
            raise self._failure
        await self.connection.close()
        self._connect()

    def _lack_of_devices(self) -> WorkerLost | None:
        """Workers keep the numbers of their devices; another machine may lack some."""
        num_devices = self._node.facts.num_devices
        if num_devices >= self._num_devices:
            return None
        return WorkerLost(
            f"{self._node.name}, in place of {self._first_name}: expected at least "
            f"{self._num_devices} CUDA devices, got {num_devices}; lend machines that are alike"
        )

    async def close(self) -> None:
        """Ends the connection; the agent is the scheduler's."""
        await self.connection.close()

    def _connect(self) -> None:
        facts = self._node.facts
        self._incarnation = facts.incarnation
        self.connection = self._runtime.transport.connect(
            facts.address, "agent", facts.incarnation, server_key=facts.key
        )
        self._serves.set()
