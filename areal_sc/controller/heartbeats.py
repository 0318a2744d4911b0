"""Which workers of a fleet are alive and making progress, as the boards of their nodes say.

consumes     replies of one speaker a node, each with the beats of all workers of that node
waits for    the next node's turn: the calls are spread evenly over the interval
unblocked by the clock alone; a speaker that does not answer in time is replaced by another worker

lost         a worker whose last beat is older than `MAX_MISSED` intervals (which it also is when
             nobody of its node answers), or whose event loop has not turned for `hung_after_s`
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from areal_sc.config.schema import SchedulerConfig
from areal_sc.errors import TransportError
from areal_sc.schedulers.base import RunningWorker
from areal_sc.transport.beat_board import BEAT, BLOCKED_WARNING_S, Beat
from areal_sc.transport.rpc.transport import Connection, Transport

logger = logging.getLogger(__name__)

MAX_MISSED: Final = 5
ATTEMPTS_AN_INTERVAL: Final = 2
"""Speakers that are asked within an interval until one answers."""

MIN_PAUSE_S: Final = 0.02
"""Where nodes are many, those whose turn comes within it are asked together: a wake-up costs more
than a call, and a few calls at once delay nobody."""


@dataclass(slots=True)
class _Watched:
    """One worker.

    Attributes:
        last_beat_s: loop time at which its process was last seen alive.
        is_blocked: its event loop had not turned for long at that time.
    """

    worker: RunningWorker
    last_beat_s: float
    is_blocked: bool = False


@dataclass(eq=False, slots=True)
class _Node:
    """One node's workers, and the one of them that speaks for all.

    Attributes:
        silent: workers that were asked and did not answer; asked again when all others are silent.
    """

    name: str
    members: dict[str, _Watched] = field(default_factory=dict)
    speaker: str = ""
    connection: Connection | None = None
    silent: set[str] = field(default_factory=set)
    asking: asyncio.Task[None] | None = None


class Heartbeats:
    """Watches workers, from one task.

    Args:
        transport: opens connections to the workers' heartbeat sockets.
        config: the `scheduler` section.
        on_lost: called once for a lost worker, with its name and the cause.
    """

    def __init__(
        self, transport: Transport, config: SchedulerConfig, on_lost: Callable[[str, str], None]
    ) -> None:
        self._transport = transport
        self._config = config
        self._interval_s = config.heartbeat_interval_s
        self._on_lost = on_lost
        self._nodes: dict[str, _Node] = {}
        self._turns: list[str] = []
        self._empty: list[_Node] = []
        self._closed_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes sent and received on heartbeat sockets."""
        open_bytes = sum(
            node.connection.bytes_sent + node.connection.bytes_received
            for node in self._nodes.values()
            if node.connection
        )
        return self._closed_bytes + open_bytes

    def watch(self, worker: RunningWorker) -> None:
        """From now on the worker has to beat."""
        name = worker.report.node
        node = self._nodes.setdefault(name, _Node(name))
        node.members[worker.name] = _Watched(worker, asyncio.get_running_loop().time())

    def forget(self, worker: RunningWorker) -> None:
        """The worker need not beat any more."""
        node = self._nodes.get(worker.report.node)
        if node is None:
            return
        node.members.pop(worker.name, None)
        node.silent.discard(worker.name)
        if not node.members:
            self._empty.append(self._nodes.pop(node.name))

    async def run(self) -> None:
        """Asks one node after the other, each once an interval, until it is cancelled.

        Raises: what asking a node raised, if that was no TransportError.
        """
        try:
            async with asyncio.TaskGroup() as asking:
                await self._take_turns(asking)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _take_turns(self, asking: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            while self._empty:
                await self._leave(self._empty.pop())
            now_s = loop.time()
            # Behind by more than an interval, as after a suspension, nothing is made up for.
            due_s = max(due_s, now_s - self._interval_s)
            while due_s <= now_s:
                due_s += self._interval_s / max(1, len(self._nodes))
                self._begin_to_ask(asking, self._next_node(), now_s)
            await asyncio.sleep(max(due_s - now_s, MIN_PAUSE_S))

    async def close(self) -> None:
        """Ends calls in flight and closes the connections; after `run` was cancelled."""
        nodes = [*self._nodes.values(), *self._empty]
        self._nodes.clear()
        self._empty.clear()
        for node in nodes:
            await self._leave(node)

    def _begin_to_ask(self, asking: asyncio.TaskGroup, node: _Node | None, now_s: float) -> None:
        if node is None:
            return
        self._judge_silence(node, now_s)
        if node.members and node.asking is None:
            node.asking = asking.create_task(self._ask(node), name=f"beats of {node.name}")

    def _next_node(self) -> _Node | None:
        """The node whose turn it is."""
        if not self._turns:
            self._turns = list(reversed(self._nodes))
        while self._turns:
            node = self._nodes.get(self._turns.pop())
            if node is not None:
                return node
        return None

    async def _leave(self, node: _Node) -> None:
        asking = node.asking
        if asking is not None:
            asking.cancel()
            await asyncio.wait([asking])
        await self._hang_up(node)

    async def _ask(self, node: _Node) -> None:
        """Asks workers of the node until one answers, or none is left to ask."""
        try:
            while node.members:
                speaker = self._choose_speaker(node)
                if speaker is None:
                    node.silent.clear()
                    return
                try:
                    connection = await self._connection_to(node, speaker.worker)
                    timeout_s = self._interval_s / ATTEMPTS_AN_INTERVAL
                    beats = await connection.call(BEAT, None, timeout_s=timeout_s)
                except TransportError as error:
                    logger.warning("worker=%s gives no heartbeat: %s", node.speaker, error)
                    node.silent.add(node.speaker)
                else:
                    node.silent.clear()
                    self._note(node, beats)
                    return
        finally:
            node.asking = None

    async def _connection_to(self, node: _Node, speaker: RunningWorker) -> Connection:
        """The one that there is, if it leads to the speaker."""
        if node.connection is None or node.speaker != speaker.name:
            await self._hang_up(node)
            node.speaker = speaker.name
            report = speaker.report
            node.connection = self._transport.connect(
                report.beat_address, report.name, report.incarnation
            )
        return node.connection

    def _choose_speaker(self, node: _Node) -> _Watched | None:
        """The one that spoke last, if it may; else the one whose last beat is the newest."""
        able = {name: w for name, w in node.members.items() if name not in node.silent}
        if node.speaker in able:
            return able[node.speaker]
        return max(able.values(), key=lambda watched: watched.last_beat_s, default=None)

    async def _hang_up(self, node: _Node) -> None:
        connection, node.connection = node.connection, None
        if connection is not None:
            self._closed_bytes += connection.bytes_sent + connection.bytes_received
            await connection.close()

    def _note(self, node: _Node, beats: Sequence[Beat]) -> None:
        now_s = asyncio.get_running_loop().time()
        for beat in beats:
            watched = node.members.get(beat.name)
            if watched is not None and watched.worker.spec.incarnation == beat.incarnation:
                watched.last_beat_s = max(watched.last_beat_s, now_s - beat.beat_age_s)
                self._judge_turn(watched, beat)

    def _judge_turn(self, watched: _Watched, beat: Beat) -> None:
        blocked_s = beat.turn_age_s - beat.beat_age_s
        if blocked_s > self._config.hung_after_s:
            self._lose(
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
                *(beat.name, blocked_s, watched.worker.spec.log_path, self._config.hung_after_s),
            )
        watched.is_blocked = is_blocked

    def _judge_silence(self, node: _Node, now_s: float) -> None:
        limit_s = MAX_MISSED * self._interval_s
        silent = [w for w in node.members.values() if now_s - w.last_beat_s > limit_s]
        is_any_heard = len(silent) < len(node.members)
        for watched in silent:
            role = watched.worker.spec.role  # other roles have a watch of their own
            others = f"other {role} workers" if is_any_heard else f"no {role} worker"
            self._lose(
                watched,
                f"{watched.worker.name} missed {MAX_MISSED} heartbeats of {self._interval_s:g} s "
                f"({others} on {node.name} can be heard)",
            )

    def _lose(self, watched: _Watched, cause: str) -> None:
        self.forget(watched.worker)
        self._on_lost(watched.worker.name, cause)
