"""The workers of one role on one node: launched, watched and ended by the node's agent.

consumes     `News`: the ends of processes, and the beats of the living
waits for    the next news: an agent answers when a worker has ended, and else after an interval.
             By asking, a controller also says that it is there itself
unblocked by the agent, or the deadline of the call

silent       a worker whose last beat is older than `MANY_MISSED` intervals, or whose event loop
             does not turn. It gets no new work until it is heard again
lost         a worker whose process has ended; whose last beat is older than `MAX_MISSED` intervals,
             which it also is when its agent is silent; whose event loop has not turned for
             `hung_after_s`; and all workers of a node whose agent has ended, as the scheduler says.
             A scheduler that cannot answer says nothing of the kind

A lost agent is replaced; see `NodeAgent`. All times are those of the controllers' loop, which stand
still while the script is stopped: so its own pause is nobody's silence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from areal_sc.controller.node_agent import RPC_MARGIN_S, NodeAgent
from areal_sc.controller.runtime import Runtime
from areal_sc.errors import ArealError, TransportError, WorkerLost
from areal_sc.log import log_tail
from areal_sc.run_folder import RunFolder
from areal_sc.schedulers.base import Node, Scheduler
from areal_sc.transport.rpc.transport import Connection
from areal_sc.transport.sockets.interface import port_of
from areal_sc.workers.beats import BLOCKED_WARNING_S
from areal_sc.workers.spec import (
    LOG_TAIL,
    STOP,
    WATCH,
    Beat,
    EndedWorker,
    News,
    Stop,
    Watch,
    WorkerOrder,
    WorkerReport,
)

logger = logging.getLogger(__name__)

MANY_MISSED: Final = 2
MAX_MISSED: Final = 5
RETRY_S: Final = 0.25
"""Between two questions to an agent that cannot be reached."""
LOG_TAIL_LIMIT_S: Final = 2.0
KILL_LIMIT_S: Final = 15.0
"""An agent waits for 10 s until a process has died of SIGKILL."""


@dataclass(eq=False)
class Member:
    """One worker of the fleet, through all its lives.

    Attributes:
        order: for its newest life.
        worker: its newest life, as it told of itself.
        beat_s: loop time at which its process was last seen alive.
        is_blocked: its event loop had not turned for long at that time.
        is_silent: it gives no signs of life, or is blocked, and is not lost yet.
        failure: why the worker is lost, while it is; a new life has none.
    """

    order: WorkerOrder
    worker: WorkerReport
    connection: Connection
    beat_s: float = 0.0
    is_blocked: bool = False
    is_silent: bool = False
    failure: WorkerLost | None = None

    @property
    def name(self) -> str:
        return self.worker.name

    @property
    def index(self) -> int:
        """Its number within its role."""
        return self.order.index

    @property
    def node(self) -> tuple[str, str]:
        """(node_id, node_addr), as shards name their owner."""
        return self.worker.name, self.worker.address


OnLost = Callable[[Member, WorkerLost], None]
"""Called once for each life of a worker that is lost."""

OnSilence = Callable[[Member], None]
"""Called when a worker falls silent, and when it is heard again; `is_silent` says which."""


class NodeWorkers:
    """Launches, watches and ends the workers of a role on a node.

    Args:
        orders: for the workers, all of one role.

    Attributes:
        agent: of the node.
        members: the workers that were launched, also those that are lost.
    """

    def __init__(
        self,
        node: Node,
        orders: Sequence[WorkerOrder],
        scheduler: Scheduler,
        runtime: Runtime,
        on_lost: OnLost,
        on_silence: OnSilence = lambda member: None,
    ) -> None:
        self.agent = NodeAgent(node, scheduler, runtime)
        self.members: list[Member] = []
        self._node = node
        self._first_orders = list(orders)
        self._role = orders[0].role
        self._scheduler = scheduler
        self._config = scheduler.config
        self._folder = RunFolder(scheduler.config.run_dir)
        self._runtime = runtime
        self._on_lost = on_lost
        self._on_silence = on_silence
        self._past_bytes = 0
        self._ended: dict[str, EndedWorker] = {}  # by incarnation
        self._is_agent_heard = True
        self._heard_s = 0.0  # the agent
        self._failure: Exception | None = None

    @property
    def num_bytes(self) -> int:
        """Sent and received on all connections so far, that to the agent included."""
        connections = [member.connection for member in self.members]
        now = sum(c.bytes_sent + c.bytes_received for c in connections)
        return self._past_bytes + now + self.agent.num_bytes

    async def launch(self) -> None:
        """Starts all workers.

        Raises: WorkerStartError: one did not come up; the agent has ended the others.
        """
        for order, worker in zip(
            self._first_orders, await self.agent.launch(self._first_orders), strict=True
        ):
            self.add(Member(order, worker, self._connect(worker)))

    async def restart(self, members: Sequence[Member]) -> None:
        """Starts a new life of each, at the address of the one before, which is killed if need be.

        While the agent is started again, this waits for it.

        Raises: WorkerStartError: one did not come up; the agent has ended the others. NodeLost:
            the agent cannot be started again.
        """
        for member in members:
            self.fence(member, "is started again")
            port = port_of(member.worker.address)
            new_id = self._runtime.new_id()
            member.order = replace(member.order, incarnation=new_id, port=port)
        workers = await self.agent.launch([member.order for member in members])
        for member, worker in zip(members, workers, strict=True):
            past = member.connection
            await past.close()
            self._past_bytes += past.bytes_sent + past.bytes_received
            member.worker, member.connection = worker, self._connect(worker)
            member.failure, member.is_blocked, member.is_silent = None, False, False
            self._watch(member)

    def fence(self, member: Member, cause: str) -> None:
        """Nothing more is sent to this life of a worker, or taken from it, whether it lives or not.

        Args:
            cause: why, in words that follow the worker's name.
        """
        if member.failure is None:
            member.failure = WorkerLost(f"worker {member.name} {cause}")
            member.connection.fail_pending(member.failure)

    def lose(self, member: Member, cause: str) -> None:
        """As if the worker's process had ended; nothing happens if it is lost already."""
        path = self._folder.log_path(member.name)
        self._lose(member, cause, path, log_tail(path))

    async def kill(self, members: Sequence[Member]) -> None:
        """Ends what is left of these lives at once.

        If the agent cannot be reached, they die with it, or when their successors are started.
        """
        for member in members:
            self.fence(member, "is started again")
        stop = Stop([member.worker.incarnation for member in members], grace_s=0.0)
        try:
            await self.agent.connection.call(STOP, stop, timeout_s=KILL_LIMIT_S)
        except TransportError as error:
            logger.warning("node=%s its agent killed no workers: %s", self._node.name, error)

    def _connect(self, worker: WorkerReport) -> Connection:
        return self._runtime.transport.connect(
            worker.address, worker.name, worker.incarnation, keeps_trying=True
        )

    def add(self, member: Member) -> None:
        """The worker serves, and has to beat from now on."""
        self.members.append(member)
        self._watch(member)

    def _watch(self, member: Member) -> None:
        member.beat_s = asyncio.get_running_loop().time()
        if member.worker.incarnation in self._ended:  # the news was faster
            self._note_end(member, self._ended[member.worker.incarnation])
        elif self._failure is not None:
            self._fail(self._failure)

    async def run(self, first_hold_s: float) -> None:
        """Asks for news, until it is cancelled. If that fails, all workers are lost.

        Args:
            first_hold_s: of the first question. Where nodes are many, different times for each of
                them spread their answers over the interval.
        """
        try:
            await self._ask(first_hold_s)
        except Exception as error:  # the task's end: nobody awaits it, so the workers' callers hear
            logger.exception("the watch over the workers failed")
            self._fail(error)

    async def close(self) -> None:
        """Ends the workers that are still there, and closes all connections."""
        grace_s = self._config.shutdown_timeout_s / 2
        orders = [member.order for member in self.members] or self._first_orders
        stop = Stop([order.incarnation for order in orders], grace_s)
        try:
            await self.agent.connection.call(STOP, stop, timeout_s=grace_s + RPC_MARGIN_S)
        except TransportError as error:  # its workers die with it, or of their orphan timeout
            logger.warning("node=%s its agent stopped no workers: %s", self._node.name, error)
        await self.agent.close()
        for member in self.members:
            await member.connection.close()
        for order in self._first_orders:
            self._node.placement.release(order.name)

    @property
    def _living(self) -> list[Member]:
        return [member for member in self.members if member.failure is None]

    async def _ask(self, first_hold_s: float) -> None:
        num_ended, hold_s = 0, first_hold_s
        interval_s = self._config.heartbeat_interval_s
        self._heard_s = asyncio.get_running_loop().time()
        while True:
            try:
                news = await self.agent.connection.call(
                    WATCH, Watch(self._role, num_ended, hold_s), timeout_s=hold_s + interval_s
                )
            except TransportError as error:
                self._is_agent_heard = False
                logger.warning("node=%s its agent gives no news: %s", self._node.name, error)
                if await self._look_after_node():
                    num_ended = 0  # the new agent counts its own
            else:
                self._is_agent_heard = True
                self.agent.note_heard()
                self._heard_s = asyncio.get_running_loop().time()
                num_ended, hold_s = news.num_ended, interval_s
                await self._note(news)
                await self._judge_silence()

    async def _note(self, news: News) -> None:
        living = {member.worker.incarnation: member for member in self._living}
        for end in news.ended:
            self._ended[end.incarnation] = end
            if end.incarnation in living:
                self._note_end(living.pop(end.incarnation), end)
        now_s = asyncio.get_running_loop().time()
        for beat in news.beats:
            member = living.get(beat.incarnation)
            if member is not None:
                member.beat_s = max(member.beat_s, now_s - beat.beat_age_s)
                await self._judge_turn(member, beat)

    def _note_end(self, member: Member, end: EndedWorker) -> None:
        self._lose(member, f"ended with {end.how}", end.log_path, end.log_tail)

    async def _look_after_node(self) -> bool:
        """Finds out whether the agent is lost; if so, its workers are, and it is replaced.

        Returns: whether it was.
        Raises: NodeLost: it cannot be.
        """
        try:
            how = await self.agent.how_it_ended()
        except ArealError as error:
            logger.warning("node=%s its state is unknown: %s", self._node.name, error)
            how = None
        if how is None:
            await self._judge_silence()
            limit_s = MAX_MISSED * self._config.heartbeat_interval_s
            is_silent = asyncio.get_running_loop().time() > self._heard_s + limit_s
            if self._living or not is_silent:
                await asyncio.sleep(RETRY_S)
                return False
            how = f"gave no news for {limit_s:g} s"
        self.agent.lose()
        path = self._node.log_path
        for member in self._living:
            cause = f"went down with node {self._node.name}: its agent {how}"
            self._lose(member, cause, path, log_tail(path))
        await self.agent.replace(how)
        self._heard_s = asyncio.get_running_loop().time()
        return True

    async def _judge_turn(self, member: Member, beat: Beat) -> None:
        blocked_s, limit_s = beat.turn_age_s - beat.beat_age_s, self._config.hung_after_s
        what = (
            f"event loop has not turned for {blocked_s:.0f} s, most likely because of a blocking "
            "call in a workflow"
        )
        if blocked_s > limit_s:
            await self._lose_living(member, f"hangs: its {what} (its log says where)")
            return
        is_blocked = blocked_s > BLOCKED_WARNING_S
        if is_blocked and not member.is_blocked:
            log = self._folder.log_path(member.name)
            logger.warning(
                "worker=%s %s (its log %s says where); it is lost after %g s",
                *(member.name, what, log, limit_s),
            )
        member.is_blocked = is_blocked

    async def _judge_silence(self) -> None:
        interval_s, living = self._config.heartbeat_interval_s, self._living
        now_s = asyncio.get_running_loop().time()
        for member in living:
            is_late = member.beat_s < now_s - MANY_MISSED * interval_s
            if member.is_silent != (is_late or member.is_blocked):
                member.is_silent = not member.is_silent
                self._on_silence(member)
        lost = [member for member in living if member.beat_s < now_s - MAX_MISSED * interval_s]
        is_any_heard = len(lost) < len(living)
        # other roles have a watch of their own
        others = f"other {self._role} workers" if is_any_heard else f"no {self._role} worker"
        for member in lost:
            await self._lose_living(
                member,
                f"missed {MAX_MISSED} heartbeats of {interval_s:g} s "
                f"({others} on {self._node.name} can be heard)",
            )

    async def _lose_living(self, member: Member, cause: str) -> None:
        tail: list[str] = []
        if self._is_agent_heard:
            try:
                tail = await self.agent.connection.call(
                    LOG_TAIL, member.name, timeout_s=LOG_TAIL_LIMIT_S
                )
            except TransportError as error:
                logger.warning("worker=%s its log cannot be read: %s", member.name, error)
        self._lose(member, cause, self._folder.log_path(member.name), tail)

    def _fail(self, error: Exception) -> None:
        """The watch has failed: whom it cannot watch is lost, now and later."""
        self._failure = error
        for member in self._living:
            path = self._folder.log_path(member.name)
            self._lose(member, f"cannot be watched any more: {error!r}", path, [], error)

    def _lose(
        self,
        member: Member,
        cause: str,
        log_path: Path | str,
        tail: Sequence[str],
        error: Exception | None = None,
    ) -> None:
        if member.failure is not None:
            return
        logger.error("worker=%s lost=%r", member.name, cause)
        member.failure = WorkerLost.with_log(f"worker {member.name} {cause}", log_path, tail)
        member.failure.__cause__ = error
        member.connection.fail_pending(member.failure)
        self._on_lost(member, member.failure)
