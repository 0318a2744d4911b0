"""A connection to a simulated worker, with the real wire form.

Every request and reply goes through the codec and back, so that what cannot be sent fails and
every byte is counted; errors arrive as over the wire; a call that is given up is cancelled on the
other side, one latency later.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

from areal_sc.errors import PeerLost, RpcTimeout
from areal_sc.transport.rpc.codec import (
    Cancel,
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
    from simulation.workers import SimulatedWorker


class SimulatedConnection:
    """One controller's connection to one worker or agent.

    Args:
        keeps_trying: calls of a worker that is gone wait for `fail_pending`.
    """

    def __init__(
        self,
        worker: SimulatedWorker | SimulatedAgent,
        incarnation: str,
        latency_s: float,
        *,
        keeps_trying: bool = False,
    ) -> None:
        self.node_id = worker.name
        self.bytes_sent = 0
        self.bytes_received = 0
        self._worker = worker
        self._incarnation = incarnation
        self._latency_s = latency_s
        self._keeps_trying = keeps_trying
        self._pending: set[asyncio.Future[Reply | Failure]] = set()
        self._executions: set[asyncio.Task[None]] = set()
        self._ids = itertools.count()

    async def call(
        self,
        method: Method[A, R],
        args: A,
        *,
        timeout_s: float,
        request_id: str | None = None,
    ) -> R:
        request_id = request_id or f"{next(self._ids):032x}"
        wire = encode(Request(request_id, self._incarnation, method.name, pack(args)))
        if self._worker.exit_status is not None and not self._keeps_trying:
            raise self._peer_lost()
        self.bytes_sent += len(wire)
        answer: asyncio.Future[Reply | Failure] = asyncio.get_running_loop().create_future()
        self._pending.add(answer)
        execution = self._execute(wire, answer)
        try:
            async with asyncio.timeout(timeout_s):
                message = await answer
        except BaseException as error:
            self._cancel(request_id, execution)
            if isinstance(error, TimeoutError):
                raise RpcTimeout(
                    f"{method.name} on {self.node_id} gave no reply within {timeout_s:g} s"
                ) from None
            raise
        finally:
            self._pending.discard(answer)
        if isinstance(message, Failure):
            raise error_of(message, node_id=self.node_id, method=method.name)
        return method.read_reply(message.value)

    def fail_pending(self, error: Exception) -> None:
        for answer in self._pending:
            if not answer.done():
                answer.set_exception(error)

    async def close(self) -> None:
        self.lose_peer()
        self.fail_pending(self._peer_lost())

    def lose_peer(self) -> None:
        """The far side ends: what it executes is never answered."""
        for execution in self._executions:
            execution.cancel()
        if not self._keeps_trying:
            self.fail_pending(self._peer_lost())

    def _peer_lost(self) -> PeerLost:
        return PeerLost(f"{self.node_id} is lost: the connection ended")

    def _cancel(self, request_id: str, execution: asyncio.Task[None]) -> None:
        """Tells the worker that nobody waits any more; it is still at work until that arrives."""
        if not execution.done() and self._worker.exit_status is None:
            self.bytes_sent += len(encode(Cancel(request_id, self._incarnation)))
            asyncio.get_running_loop().call_later(self._latency_s, execution.cancel)

    def _execute(self, wire: bytes, answer: asyncio.Future[Reply | Failure]) -> asyncio.Task[None]:
        execution = asyncio.create_task(self._run(wire, answer), name=f"method of {self.node_id}")
        self._executions.add(execution)
        execution.add_done_callback(self._executions.discard)
        return execution

    async def _run(self, wire: bytes, answer: asyncio.Future[Reply | Failure]) -> None:
        await asyncio.sleep(self._latency_s)
        request = decode([memoryview(wire)])
        assert isinstance(request, Request)
        worker = self._worker
        if worker.is_hung or worker.is_blocked:
            await asyncio.get_running_loop().create_future()
        reply: Reply | Failure
        try:
            served = worker.served[request.method]
            args = served.method.read_args(request.args)
            reply = Reply(request.request_id, pack(await served.handler(args)))
        except Exception as error:
            reply = failure_of(error, request.request_id)
        frame = encode(reply)
        cluster = worker.cluster
        delays = {
            "run_group": cluster.behavior.reply_delay_s,
            "sweep": cluster.behavior.sweep_delay_s,
        }
        await asyncio.sleep(self._latency_s + cluster.draw(delays.get(request.method, 0.0)))
        self.bytes_received += len(frame)
        if not answer.done():
            message = decode([memoryview(frame)])
            assert isinstance(message, Reply | Failure)
            answer.set_result(message)
