"""The workers of one role on one node, as the node's agent tells of them.

consumes     `News`: the ends of processes, and the beats of the living
waits for    the next news: an agent answers when a worker has ended, and else after an interval.
             By asking, a controller also says that it is there itself
unblocked by the agent, or the deadline of the call

lost         a worker whose process has ended; whose last beat is older than `MAX_MISSED` intervals,
             which it also is when its agent is silent; whose event loop has not turned for
             `hung_after_s`; and all workers of a node whose agent has ended, as the scheduler says.
             A scheduler that cannot answer says nothing of the kind
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from areal_sc.errors import ArealError, TransportError, WorkerLost
from areal_sc.log import log_tail
from areal_sc.schedulers.base import Node, Scheduler
from areal_sc.transport.rpc.transport import Connection
from areal_sc.workers.beats import BLOCKED_WARNING_S
from areal_sc.workers.spec import (
    LOG_TAIL,
    WATCH,
    Beat,
    EndedWorker,
    News,
    Watch,
    WorkerOrder,
    WorkerReport,
)

logger = logging.getLogger(__name__)

MAX_MISSED: Final = 5
RETRY_S: Final = 0.25
"""Between two questions to an agent that cannot be reached."""
LOG_TAIL_LIMIT_S: Final = 2.0


@dataclass(slots=True)
class _Watched:
    """One worker.

    Attributes:
        last_beat_s: loop time at which its process was last seen alive.
        is_blocked: its event loop had not turned for long at that time.
    """

    worker: WorkerReport
    log_path: Path
    last_beat_s: float
    is_blocked: bool = False


class NodeWatch:
    """Watches the workers of a role on a node.

    Args:
        node: of the workers.
        orders: for the workers that will be added; all of one role.
        agent: connection to the node's agent.
        on_lost: called once for each worker that is lost, with its name and why.
    """

    def __init__(
        self,
        node: Node,
        orders: Sequence[WorkerOrder],
        agent: Connection,
        scheduler: Scheduler,
        on_lost: Callable[[str, WorkerLost], None],
    ) -> None:
        self.node = node
        self.orders = list(orders)
        self.agent = agent
        self._role = orders[0].role
        self._scheduler = scheduler
        self._config = scheduler.config
        self._on_lost = on_lost
        self._watched: dict[str, _Watched] = {}
        self._ended: dict[str, EndedWorker] = {}  # by incarnation
        self._is_agent_heard = True
        self._failure: Exception | None = None

    def add(self, worker: WorkerReport, log_path: Path) -> None:
        """The worker serves, and has to beat from now on."""
        now_s = asyncio.get_running_loop().time()
        self._watched[worker.name] = _Watched(worker, log_path, now_s)
        if worker.incarnation in self._ended:  # the news was faster
            self._note_end(self._ended[worker.incarnation])
        if self._failure is not None:
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

    async def _ask(self, first_hold_s: float) -> None:
        num_ended, hold_s = 0, first_hold_s
        interval_s = self._config.heartbeat_interval_s
        while True:
            try:
                news = await self.agent.call(
                    WATCH, Watch(self._role, num_ended, hold_s), timeout_s=hold_s + interval_s
                )
            except TransportError as error:
                self._is_agent_heard = False
                logger.warning("node=%s its agent gives no news: %s", self.node.name, error)
                await self._look_after_node()
            else:
                self._is_agent_heard = True
                num_ended, hold_s = news.num_ended, interval_s
                await self._note(news)
            await self._judge_silence()

    async def _note(self, news: News) -> None:
        for end in news.ended:
            self._ended[end.incarnation] = end
            self._note_end(end)
        now_s = asyncio.get_running_loop().time()
        for beat in news.beats:
            watched = self._watched.get(beat.name)
            if watched is not None and watched.worker.incarnation == beat.incarnation:
                watched.last_beat_s = max(watched.last_beat_s, now_s - beat.beat_age_s)
                await self._judge_turn(watched, beat)

    def _note_end(self, end: EndedWorker) -> None:
        watched = self._watched.get(end.name)
        if watched is not None and watched.worker.incarnation == end.incarnation:
            cause = f"{end.name} ended with {end.how}"
            self._lose(end.name, cause, end.log_path, end.log_tail)

    async def _look_after_node(self) -> None:
        """Asks the scheduler whether the node is still there."""
        try:
            how = (await self._scheduler.ended_nodes()).get(self.node)
        except ArealError as error:
            logger.warning("node=%s its state is unknown: %s", self.node.name, error)
            how = None
        if how is not None:
            path = self.node.log_path
            for name in list(self._watched):
                cause = f"{name} is lost with node {self.node.name}: its agent ended with {how}"
                self._lose(name, cause, path, log_tail(path))
        await asyncio.sleep(RETRY_S)

    async def _judge_turn(self, watched: _Watched, beat: Beat) -> None:
        blocked_s = beat.turn_age_s - beat.beat_age_s
        if blocked_s > self._config.hung_after_s:
            await self._lose_living(
                watched,
                f"{beat.name} hangs: its event loop has not turned for {blocked_s:.0f} s, most "
                "likely because of a blocking call in a workflow (its log says where)",
            )
            return
        is_blocked = blocked_s > BLOCKED_WARNING_S
        if is_blocked and not watched.is_blocked:
            logger.warning(
                "worker=%s event loop has not turned for %.0f s, most likely because of a blocking "
                "call in a workflow (its log %s says where); it is lost after %g s",
                *(beat.name, blocked_s, watched.log_path, self._config.hung_after_s),
            )
        watched.is_blocked = is_blocked

    async def _judge_silence(self) -> None:
        interval_s = self._config.heartbeat_interval_s
        silent_since_s = asyncio.get_running_loop().time() - MAX_MISSED * interval_s
        silent = [w for w in self._watched.values() if w.last_beat_s < silent_since_s]
        is_any_heard = len(silent) < len(self._watched)
        # other roles have a watch of their own
        others = f"other {self._role} workers" if is_any_heard else f"no {self._role} worker"
        for watched in silent:
            await self._lose_living(
                watched,
                f"{watched.worker.name} missed {MAX_MISSED} heartbeats of {interval_s:g} s "
                f"({others} on {self.node.name} can be heard)",
            )

    async def _lose_living(self, watched: _Watched, cause: str) -> None:
        name = watched.worker.name
        tail: list[str] = []
        if self._is_agent_heard:
            try:
                tail = await self.agent.call(LOG_TAIL, name, timeout_s=LOG_TAIL_LIMIT_S)
            except TransportError as error:
                logger.warning("worker=%s its log cannot be read: %s", name, error)
        self._lose(name, cause, watched.log_path, tail)

    def _fail(self, error: Exception) -> None:
        """The watch has failed: whom it cannot watch is lost, now and later."""
        self._failure = error
        for name, watched in list(self._watched.items()):
            cause = f"{name} cannot be watched any more: {error!r}"
            self._lose(name, cause, watched.log_path, [], error)

    def _lose(
        self,
        name: str,
        cause: str,
        log_path: Path | str,
        tail: Sequence[str],
        error: Exception | None = None,
    ) -> None:
        if self._watched.pop(name, None) is None:
            return
        logger.error("worker=%s lost=%r", name, cause)
        lost = WorkerLost(
            f"worker {cause}; its log is {log_path}", log_path=str(log_path), log_tail=tail
        )
        lost.__cause__ = error
        self._on_lost(name, lost)
