"""The network between controllers and workers; messages may be lost, held up, and arrive twice.

A `NetworkConnection` is what `RpcClient` is: a request that waits is sent again under its id when
its connection was made anew, and whoever then lives at the address answers it. Each life of a
worker executes an id once and keeps its reply. Every message goes through the codec, so that what
cannot be sent fails, every byte is counted, and errors arrive as over the wire.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from simulation.process import PROCESS, Process
from simulation.virtual_loop import VirtualTimeLoop

from areal_sc.errors import ArealError, IncarnationMismatch, PeerLost, RpcTimeout
from areal_sc.transport.rpc.codec import (
    ANY_INCARNATION,
    Failure,
    Reply,
    Request,
    decode,
    encode,
    error_of,
    failure_of,
)
from areal_sc.transport.rpc.method import A, Method, R, pack

if TYPE_CHECKING:
    from simulation.agent import SimulatedAgent
    from simulation.cluster import SimulatedCluster
    from simulation.workers import SimulatedWorker

    Peer = SimulatedWorker | SimulatedAgent

RECONNECT_S = 0.25


class Stage(StrEnum):
    """Where a message is."""

    sent = "sent"
    received = "received"
    handled = "handled"
    replied = "replied"


class Direction(StrEnum):
    to_worker = "to worker"
    to_controller = "to controller"


@dataclass
class Served:
    """What one life of a worker or agent was asked for."""

    running: dict[str, tuple[asyncio.Task[Any], list[NetworkConnection]]] = field(
        default_factory=dict
    )
    finished: dict[str, bytes] = field(default_factory=dict)


class Network:
    """What lies between the controllers and the nodes.

    Without any of what its attributes say, a message takes `Behavior.latency_s`.

    Attributes:
        on_call: is told of every call before it is sent.
        on_message: is told of every message at each of its stages, before that stage is done.
        cuts: (node, direction) -> loop time until which nothing gets through.
        duplication: probability that a message arrives twice.
        jitter_s: what a message takes at most beyond its latency.
    """

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.cluster = cluster
        self.on_call: Callable[[Any], None] = lambda args: None
        self.on_message: Callable[[Stage, str, Peer], None] = lambda stage, method, peer: None
        self.cuts: dict[tuple[str, Direction], float] = {}
        self.duplication = 0.0
        self.jitter_s = 0.0
        self.connections: dict[NetworkConnection, None] = {}  # in the order of their making
        self.request_ids = itertools.count()
        self._peers: dict[str, Peer] = {}  # the newest life at each address
        self._served: dict[Peer, Served] = {}

    def served(self, peer: Peer) -> Served:
        return self._served.setdefault(peer, Served())

    def join(self, peer: Peer) -> None:
        """It serves at its address from now on."""
        self._peers[peer.address] = peer

    def end(self, peer: Peer) -> None:
        """Its process has ended: what it executes is never answered."""
        for connection in list(self.connections):
            if connection.address == peer.address:
                connection.reset()

    def peer_at(self, address: str) -> Peer | None:
        """The life that serves at an address now."""
        peer = self._peers.get(address)
        return peer if peer is not None and peer.exit_status is None else None

    def delay_s(self, node: str, direction: Direction) -> float:
        """What a message takes that is sent now."""
        rng, now_s = self.cluster.rng, self.cluster.now_s
        delay_s = self.cluster.behavior.latency_s
        if self.jitter_s and rng.random() < 0.3:
            delay_s += rng.choice((0.25, 0.5, 1.0)) * self.jitter_s
        held_s = max(0.0, self.cuts.get((node, direction), 0.0) - now_s)
        return held_s + delay_s

    def forget(self, process: Process) -> None:
        """It has died: nobody answers it any more."""
        for connection in list(self.connections):
            if connection.process is process:
                connection.drop()

    def reset(self, node: str) -> None:
        """Connections to a node end: what is under way is lost."""
        for connection in list(self.connections):
            if connection.node == node:
                connection.reset()


class NetworkConnection:
    """One controller's connection to one life of a worker or agent."""

    def __init__(
        self,
        network: Network,
        address: str,
        node_id: str,
        incarnation: str,
        keeps_trying: bool,
        count: Callable[[int], None],
        term: int = 0,
    ) -> None:
        self.node_id = node_id
        self.address = address
        self._count = count
        peer = network.peer_at(address)
        self.node = peer.node if peer is not None else ""
        self.process = PROCESS.get()
        self._network = network
        self._incarnation = incarnation
        self._term = term
        self._keeps_trying = keeps_trying
        self._pending: dict[str, tuple[Method[Any, Any], bytes, asyncio.Future[Any]]] = {}
        self._epoch = 0  # messages of an earlier one are lost
        self._is_closed = False
        network.connections[self] = None

    async def call(self, method: Method[A, R], args: A, *, timeout_s: float) -> R:
        self._network.on_call(args)
        request_id = f"{next(self._network.request_ids):032x}"
        frame = encode(Request(request_id, self._incarnation, method.name, pack(args), self._term))
        if self._is_closed:
            raise self._peer_lost()
        self._count(len(frame))
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[request_id] = method, frame, answer
        self._send(request_id)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except BaseException as error:
            if self._pending.pop(request_id, None) is not None:
                self._later(Direction.to_worker, self._cancel, request_id)
            if isinstance(error, TimeoutError):
                what = f"{method.name} on {self.node_id} gave no reply within {timeout_s:g} s"
                raise RpcTimeout(what, silent=self.node_id) from None
            raise

    def fail_pending(self, error: Exception) -> None:
        pending, self._pending = self._pending, {}
        for _, _, answer in pending.values():
            if not answer.done():
                answer.set_exception(error)

    async def close(self) -> None:
        self.drop()
        self.fail_pending(self._peer_lost())

    def drop(self) -> None:
        """It is not used any more, and what is under way is lost."""
        self._is_closed = True
        self._epoch += 1
        self._network.connections.pop(self, None)

    def reset(self) -> None:
        """The connection ends; it is made anew, unless nobody is there any more."""
        self._epoch += 1
        if self._keeps_trying or self._network.peer_at(self.address) is not None:
            self._repeat_soon()
        else:
            self._to_controller(self.fail_pending, self._peer_lost())

    def _to_controller(self, take: Callable[..., None], *args: Any) -> None:
        """Its controllers take something now, or after their pause."""
        loop, process = asyncio.get_running_loop(), self.process
        if process is None:
            take(*args)
        elif not process.is_dead:
            assert isinstance(loop, VirtualTimeLoop)
            pause_s = process.paused_until_s - loop.world_s
            if pause_s > 0.0:
                loop.call_later(pause_s, self._to_controller, take, *args, context=Context())
            else:
                take(*args)

    def _peer_lost(self) -> PeerLost:
        return PeerLost(f"{self.node_id} is lost: the connection ended")

    def _later(
        self,
        direction: Direction,
        deliver: Callable[..., None],
        *args: Any,
        after_s: float = 0.0,
    ) -> None:
        network, loop, epoch = self._network, asyncio.get_running_loop(), self._epoch

        def arrive() -> None:
            if self._epoch == epoch:
                deliver(*args)

        delay_s = after_s + network.delay_s(self.node, direction)
        loop.call_later(delay_s, arrive, context=Context())
        if network.duplication and network.cluster.rng.random() < network.duplication:
            delay_s += network.cluster.rng.choice((0.0, 0.5))
            loop.call_later(delay_s, arrive, context=Context())

    def _repeat_soon(self) -> None:
        epoch = self._epoch

        def repeat() -> None:
            if self._epoch == epoch:
                for request_id in list(self._pending):
                    if request_id in self._pending:
                        self._send(request_id)

        loop = asyncio.get_running_loop()
        loop.call_later(RECONNECT_S, self._to_controller, repeat, context=Context())

    def _send(self, request_id: str) -> None:
        method, frame, _ = self._pending[request_id]
        peer = self._network.peer_at(self.address)
        if peer is not None:
            self._network.on_message(Stage.sent, method.name, peer)
        self._later(Direction.to_worker, self._arrive, frame)

    def _arrive(self, frame: bytes) -> None:
        request = decode([memoryview(frame)])
        assert isinstance(request, Request)
        peer = self._network.peer_at(self.address)
        if peer is None:
            self.reset()
            return
        self._network.on_message(Stage.received, request.method, peer)
        if peer.is_hung or peer.is_blocked:
            if peer.exit_status is None:
                peer.inbox.append(lambda: self._accept(frame, request, peer))
            return
        self._accept(frame, request, peer)

    def _accept(self, frame: bytes, request: Request, peer: Peer) -> None:
        if peer.exit_status is not None:
            return
        error: ArealError | None = peer.newest_term.refusal(request.term)
        if error is None and request.incarnation not in (peer.incarnation, ANY_INCARNATION):
            error = IncarnationMismatch(f"{peer.name} is {peer.incarnation}: it was restarted")
        if error is not None:
            self._reply(request.request_id, encode(failure_of(error, request.request_id)))
            return
        served, key = self._network.served(peer), request.request_id
        if key in served.running:
            served.running[key][1].append(self)
        elif key in served.finished:
            self._reply(request.request_id, served.finished[key])
        else:
            work = self._execute(request, peer, served, key)
            task = peer.process.create_task(work, f"{request.method} of {peer.name}")
            served.running[key] = task, [self]

    async def _execute(self, request: Request, peer: Peer, served: Served, key: str) -> None:
        reply: Reply | Failure
        try:
            method = peer.served[request.method]
            args = method.method.read_args(request.args)
            reply = Reply(request.request_id, pack(await method.handler(args)))
        except asyncio.CancelledError:
            reply = failure_of(ArealError("it was cancelled"), request.request_id)
        except Exception as error:
            reply = failure_of(error, request.request_id)
        _, callers = served.running.pop(key)
        if peer.exit_status is not None:
            return
        self._network.on_message(Stage.handled, request.method, peer)
        frame = served.finished[key] = encode(reply)
        delay_s = self._network.cluster.reply_delay_s(request.method)

        def answer() -> None:
            for caller in callers:
                caller._reply(request.request_id, frame, delay_s)

        if peer.exit_status is not None:
            return
        if peer.is_hung or peer.is_blocked:
            peer.inbox.append(answer)
        else:
            answer()

    def _cancel(self, request_id: str) -> None:
        peer = self._network.peer_at(self.address)
        if peer is not None and request_id in self._network.served(peer).running:
            self._network.served(peer).running[request_id][0].cancel()

    def _reply(self, request_id: str, frame: bytes, delay_s: float = 0.0) -> None:
        def arrive() -> None:
            self._to_controller(self._take, request_id, frame)

        self._later(Direction.to_controller, arrive, after_s=delay_s)

    def _take(self, request_id: str, frame: bytes) -> None:
        self._count(len(frame))
        if request_id not in self._pending:
            return
        method, _, answer = self._pending[request_id]
        peer = self._network.peer_at(self.address)
        if peer is not None:
            self._network.on_message(Stage.replied, method.name, peer)
        if self._pending.pop(request_id, None) is None or answer.done():
            return
        message = decode([memoryview(frame)])
        if isinstance(message, Failure):
            answer.set_exception(error_of(message, node_id=self.node_id, method=method.name))
        else:
            assert isinstance(message, Reply)
            answer.set_result(method.read_reply(message.value))
