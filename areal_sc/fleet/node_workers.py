"""The workers of one role on one node: launched, watched and ended by the node's agent.

consumes     `News`: the ends of processes, and the beats of the living
waits for    the next news: an agent answers when a worker has ended, and else after an interval.
             By asking, a controller also says that it is there itself. An agent that was not heard
             is asked for an answer at once, and the scheduler what became of it; neither wait
             keeps a loss from being noticed
unblocked by the agent, or the deadline of the call

silent       a worker whose last beat is older than some intervals, or whose event loop does not
             turn. It gets no new work until it is heard again
lost         a worker whose process has ended; whose last beat is older than `MAX_MISSED` intervals,
             which it also is when its agent is silent; whose event loop has not turned for
             `hung_after_s`; and all workers of a node whose agent has ended, as the scheduler says.
             A scheduler that cannot answer says nothing of the kind

A lost agent is replaced, on its machine or on another one; see `NodeAgent`. All times are those of
the controllers' loop, which stand still while the script is stopped: so its own pause is nobody's
silence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from areal_sc.config.schema import SchedulerConfig
from areal_sc.errors import ArealError, StaleTerm, TransportError, WorkerLost
from areal_sc.fleet.agent_restarts import MAX_MISSED, NodeAgent
from areal_sc.fleet.member import FoundWorkers, Member, NoConnection
from areal_sc.fleet.runtime import Runtime
from areal_sc.fleet.worker_life import Died, Heard, Joined, Lives, Missed, Tell, Wished
from areal_sc.log import log_tail, tell_warning
from areal_sc.nodes import spec
from areal_sc.nodes.beats import BLOCKED_WARNING_S
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.base import Node, Scheduler
from areal_sc.system import interrupts
from areal_sc.transport.rpc.transport import Connection
from areal_sc.transport.sockets.interface import host_of, port_of
from areal_sc.workers.calls import SHUTDOWN

MANY_MISSED: Final = 2


def note_turn(member: Member, beat: spec.Beat, config: SchedulerConfig) -> str | None:
    """Notes whether a worker's event loop turns.

    Returns: why the worker is lost; None: it is not.
    """
    # a beat tells of the turn that the one before has asked for
    asked_s = beat.turn_age_s - config.heartbeat_interval_s
    blocked_s, limit_s = asked_s - beat.beat_age_s, config.hung_after_s
    what = (
        f"event loop has not turned for {blocked_s:.0f} s, most likely because of a blocking call "
        "in a workflow"
    )
    if blocked_s > limit_s:
        return f"hangs: its {what} (its log says where)"
    was_blocked, member.is_blocked = member.is_blocked, blocked_s > BLOCKED_WARNING_S
    if member.is_blocked and not was_blocked:
        logger.warning(
            "worker=%s %s (its log %s says where); it is lost after %g s",
            member.name,
            what,
            RunFolder(config.run_dir).log_path(member.name),
            limit_s,
        )
    return None


logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_S: Final = 0.25
"""Between two questions to an agent that cannot be reached, and between looks at who is lost."""


class NodeWorkers:
    """Launches, watches and ends the workers of a role on a node.

    Args:
        role: of all of them.
        orders: for workers that are to be started.
        found: workers of the role that run there already.
        lives: of the role.
        tell: takes what is seen of the workers.

    Attributes:
        node: where they are.
        agent: of the node.
        members: the workers that were launched, also those that are lost.
        heard_s: loop time at which the agent last gave news.
    """

    def __init__(
        self,
        node: Node,
        role: str,
        orders: Sequence[spec.WorkerOrder],
        found: FoundWorkers,
        scheduler: Scheduler,
        runtime: Runtime,
        lives: Lives,
        tell: Tell,
    ) -> None:
        self.agent = NodeAgent(node, scheduler, runtime)
        self.members: list[Member] = []
        self.node = node
        self._role = role
        self._new_orders = list(orders)
        self._found = found
        self._first_orders = [*(worker.order for worker in found.adopted), *orders]
        self._scheduler = scheduler
        self._config = scheduler.config
        self._folder = RunFolder(scheduler.config.run_dir)
        self._runtime = runtime
        self._lives = lives
        self._tell = tell
        self._ended: dict[str, spec.EndedWorker] = {}  # by incarnation
        self._is_agent_heard = not self.agent.is_lost
        self.heard_s = 0.0  # the agent
        self._failure: Exception | None = None

    async def launch(self) -> None:
        """Takes over workers that run, ends those that nobody wants, and starts the new ones.

        New ones of a node that is on its way are lost ones until `restart` has started them.

        Raises: WorkerStartError: one did not come up; the agent has ended the others.
        """
        for found in self._found.adopted:
            assert found.report is not None
            connection = self._connect(found.report)
            self.add(found.order, found.report, connection, is_adopted=True)
        if self._found.unwanted:
            await self.agent.stop([worker.order.incarnation for worker in self._found.unwanted])
        if self.agent.is_lost:
            for order in self._new_orders:
                self.expect(order)
        elif self._new_orders:
            workers = await self.agent.launch(self._new_orders)
            for order, worker in zip(self._new_orders, workers, strict=True):
                self.add(order, worker, self._connect(worker))

    async def restart(self, members: Sequence[Member]) -> None:
        """Starts a new life of each, at the address of the one before, which is killed if need be.

        While the agent is started again, this waits for it. On another machine addresses are new.

        Raises: WorkerStartError: one did not come up; the agent has ended the others. NodeLost:
            the agent cannot be started again.
        """
        for member in members:
            self.fence(member, "is started again")
        await self.agent.wait_until_served()
        here = host_of(self.node.facts.address)
        for member in members:
            address, new_id = member.worker.address, self._runtime.new_id()
            port = port_of(address) if address and host_of(address) == here else 0
            life = member.order.life + 1
            member.order = replace(member.order, incarnation=new_id, life=life, port=port)
        workers = await self.agent.launch([member.order for member in members])
        for member, worker in zip(members, workers, strict=True):
            await member.connection.close()
            member.worker, member.connection = worker, self._connect(worker)
            member.failure, member.is_blocked, member.is_adopted = None, False, False
            self._watch(member)

    def expect(self, order: spec.WorkerOrder) -> Member:
        """A further worker, which is a lost one until `restart` has given it a life."""
        report = spec.WorkerReport(order.name, "", "", 0, self.node.facts.token)
        member = Member(order, report, NoConnection(order.name), self._lives.of(order))
        member.failure = WorkerLost(f"worker {order.name} has not been started yet")
        self.members.append(member)
        return member

    async def dismiss(self, member: Member) -> None:
        """Asks a worker to end, and ends it if it does not; the node has one less then."""
        is_alive = member.failure is None
        self.fence(member, "is dismissed")
        if is_alive:
            with suppress(ArealError):  # who does not answer is ended all the same
                limit_s = SHUTDOWN.deadline_s or RETRY_S
                await member.connection.call(SHUTDOWN, None, timeout_s=limit_s)
        grace_s = self._config.shutdown_timeout_s / 2
        lives = [member.worker.incarnation, member.order.incarnation]
        await self.agent.stop(lives, grace_s if is_alive else 0.0)
        await member.connection.close()
        self.members.remove(member)
        self._first_orders = [it for it in self._first_orders if it.name != member.name]
        self.node.placement.release(member.name)

    def fence(self, member: Member, cause: str) -> None:
        """Nothing more is sent to this life of a worker, or taken from it, whether it lives or not.

        Args:
            cause: why, in words that follow the worker's name.
        """
        if member.failure is None:
            member.failure = WorkerLost(f"worker {member.name} {cause}")
            member.connection.fail_pending(member.failure)

    def lose(self, member: Member, cause: str, lines: Sequence[str] | None = None) -> None:
        """Loses a worker as if its process had ended; `lines`, or the log's end, explain it."""
        path = self._folder.log_path(member.name)
        self._lose(member, cause, path, log_tail(path) if lines is None else lines)

    async def stacks(self, names: Sequence[str]) -> list[spec.WorkerStacks]:
        """Where workers are, as far as the agent can tell."""
        return await self.agent.stacks(names) if self._is_agent_heard else []

    async def kill(self, members: Sequence[Member]) -> None:
        """Ends what is left of these lives at once."""
        for member in members:
            self.fence(member, "is started again")
        await self.agent.stop([member.worker.incarnation for member in members])

    def _connect(self, worker: spec.WorkerReport) -> Connection:
        return self._runtime.transport.connect(
            worker.address, worker.name, worker.incarnation, keeps_trying=True
        )

    def add(
        self,
        order: spec.WorkerOrder,
        worker: spec.WorkerReport,
        connection: Connection,
        *,
        is_adopted: bool = False,
    ) -> None:
        """The worker serves, and has to beat from now on."""
        life = self._lives.of(order)
        member = Member(order, worker, connection, life, is_adopted=is_adopted)
        self.members.append(member)
        self._tell(Joined(life.unit, worker.incarnation, is_adopted))
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
            first_hold_s: how long the agent may hold the first question. Different times for many
                nodes spread their answers over the interval.
        """
        try:
            await self._ask(first_hold_s)
        except Exception as error:  # the task's end: nobody awaits it, so the workers' callers hear
            logger.exception("the watch over the workers failed")
            self._fail(error)

    async def close(self, *, ends_workers: bool) -> None:
        """Ends the workers that are still there, if asked to, and closes all connections."""
        if ends_workers:
            # nobody has asked workers to end whose start is given up: they are not waited for
            grace_s = self._config.shutdown_timeout_s / 2 if self.members else 0.0
            orders = [member.order for member in self.members] or self._first_orders
            await self.agent.stop([order.incarnation for order in orders], grace_s)
        await self.agent.close()
        for member in self.members:
            await member.connection.close()
        for order in self._first_orders:
            self.node.placement.release(order.name)

    @property
    def _living(self) -> list[Member]:
        return [member for member in self.members if member.failure is None]

    async def _ask(self, first_hold_s: float) -> None:
        num_ended, num_wishes, hold_s = 0, 0, first_hold_s
        passes, told = self._scheduler.passes, dict[str, int]()
        interval_s = self._config.heartbeat_interval_s
        if self.agent.is_lost:
            await self.agent.renew(None)
            self._is_agent_heard = True
        self.heard_s = asyncio.get_running_loop().time()
        while True:
            replaced = passes.replaced
            watch = spec.Watch(
                self._role,
                num_ended,
                hold_s,
                num_wishes,
                replaced={} if replaced is told else replaced,
            )
            asked = self.agent.connection.call(spec.WATCH, watch, timeout_s=hold_s + interval_s)
            try:
                news = await (asked if self._is_agent_heard else self._judging(asked))
            except TransportError as error:
                if self._is_agent_heard:  # the next questions have no answer for the same reason
                    logger.warning("node=%s its agent gives no news: %s", self.node.name, error)
                self._is_agent_heard, hold_s = False, 0.0
                if await self._look_after_node():
                    num_ended = num_wishes = 0  # the new agent counts its own
                    told = {}
            else:
                self._is_agent_heard = True
                self.agent.note_heard()
                self.heard_s = asyncio.get_running_loop().time()
                num_ended, hold_s, told = news.num_ended, interval_s, replaced
                num_wishes = news.num_wishes
                self._note_wishes(news)
                await self._note(news)
                await self._judge_silence()

    def _note_wishes(self, news: spec.News) -> None:
        for wish in news.wishes:
            if wish is spec.Wish.stop:
                interrupts.ask_to_stop(f"{self.node.facts.incarnation}/{news.num_wishes}")
            else:
                logger.info("node=%s is asked from outside: %s", self.node.name, wish)
                self._tell(Wished(wish))

    async def _note(self, news: spec.News) -> None:
        for text in news.warnings:
            tell_warning(text, f"node {self.node.name}")
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
                if cause := note_turn(member, beat, self._config):
                    await self._lose_living(member, cause)

    def _note_end(self, member: Member, end: spec.EndedWorker) -> None:
        self._lose(member, f"ended with {end.how}", end.log_path, end.log_tail)

    async def _look_after_node(self) -> bool:
        """Finds out whether the agent is lost; if so, its workers are, and it is replaced.

        Returns: whether it was.
        Raises: NodeLost: it cannot be.
        """
        try:
            how = await self._judging(self.agent.how_it_ended())
        except ArealError as error:
            logger.warning("node=%s its state is unknown: %s", self.node.name, error)
            how = None
        if how is None:
            await self._judge_silence()
            limit_s = MAX_MISSED * self._config.heartbeat_interval_s
            is_silent = asyncio.get_running_loop().time() > self.heard_s + limit_s
            if self._living or not is_silent:
                await asyncio.sleep(RETRY_S)
                return False
            how = f"gave no news for {limit_s:g} s"
        self.agent.lose()
        path = self.node.log_path
        for member in self._living:
            cause = f"went down with node {self.node.name}: its agent {how}"
            self._lose(member, cause, path, log_tail(path))
        await self.agent.replace(how)
        self.heard_s = asyncio.get_running_loop().time()
        return True

    async def _judging(self, waiting: Coroutine[Any, Any, T]) -> T:
        """Its result; meanwhile workers that nobody hears are lost when it is time."""
        task = asyncio.ensure_future(waiting)
        try:
            while not (await asyncio.wait([task], timeout=RETRY_S))[0]:
                await self._judge_silence()
            return task.result()
        finally:
            task.cancel()

    async def _judge_silence(self) -> None:
        """Tells who falls silent, or is heard again; who was not heard for long is lost."""
        interval_s, living = self._config.heartbeat_interval_s, self._living
        now_s = asyncio.get_running_loop().time()
        for member in living:
            is_late = member.beat_s < now_s - MANY_MISSED * interval_s
            if member.is_silent != (is_late or member.is_blocked):
                event = Heard if member.is_silent else Missed
                self._tell(event(member.life.unit, member.worker.incarnation))
        lost = [member for member in living if member.beat_s < now_s - MAX_MISSED * interval_s]
        is_any_heard = len(lost) < len(living)
        # other roles have a watch of their own
        others = f"other {self._role} workers" if is_any_heard else f"no {self._role} worker"
        cause = f"({others} on {self.node.name} can be heard)"
        for member in lost:
            what = f"missed {MAX_MISSED} heartbeats of {interval_s:g} s {cause}"
            await self._lose_living(member, what)

    async def _lose_living(self, member: Member, cause: str) -> None:
        tail: list[str] = []
        for told in await self.stacks([member.name]):
            cause, tail = f"{cause}; its process {told.state}", told.lines
        self._lose(member, cause, self._folder.log_path(member.name), tail)

    def _fail(self, error: Exception) -> None:
        """The watch has failed: whom it cannot watch is lost, now and later."""
        self._failure, cause = error, f"cannot be watched any more: {error!r}"
        self.agent.give_up(cause)
        for member in self._living:
            self._lose(member, cause, self._folder.log_path(member.name), [], error)

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
        life, is_final = member.worker.incarnation, isinstance(error, StaleTerm)
        self._tell(Died(member.life.unit, life, member.failure, is_final))
