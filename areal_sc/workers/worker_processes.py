"""The processes of a node's workers, from their forks to their ends. Part of the agent.

    WorkerSpec ─► fork ─► WorkerReport ─► beats ─► EndedWorker

consumes     reports and beats of workers, and their ends, as the fork server tells of them
waits for    a worker's report, or its end
unblocked by the worker, or the time limit of its start
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from msgspec import MsgspecError, msgpack

from areal_sc.errors import WorkerStartError
from areal_sc.fork_server import Child, ForkServer
from areal_sc.log import log_tail
from areal_sc.run_folder import RunFolder
from areal_sc.workers.left_files import delete_left_files
from areal_sc.workers.spec import EndedWorker, WorkerOrder, WorkerReport, WorkerSpec

logger = logging.getLogger(__name__)

SERVERS_END_S: Final = 5.0
"""The kernel kills the servers of a killed worker; after so long they are gone."""
KILL_LIMIT_S: Final = 10.0
"""A process that takes longer to die of SIGKILL hangs in the kernel."""

_MESSAGE_BYTES: Final = 64 << 10

_from_worker: Final = msgpack.Decoder(WorkerReport | tuple[int, int])


@dataclass(eq=False)
class WorkerProcess:
    """One life of a worker.

    Attributes:
        reported: what it told when it began to serve.
        beat_ns, turn_ns: its last signs of life, `CLOCK_MONOTONIC`.
    """

    order: WorkerOrder
    child: Child
    reported: asyncio.Future[WorkerReport]
    beat_ns: int
    turn_ns: int


class WorkerProcesses:
    """All workers of a node.

    Attributes:
        living: by incarnation.
        ended: those that were, in order.
        end_noted: set, and replaced, at the next end.
        begun_s: Unix time; younger files that killed servers left are deleted.
    """

    def __init__(self, fork_server: ForkServer, folder: RunFolder) -> None:
        self.living: dict[str, WorkerProcess] = {}
        self.ended: list[EndedWorker] = []
        self.end_noted = asyncio.Event()
        self.begun_s = time.time()
        self._fork_server = fork_server
        self._folder = folder
        self._one_life: dict[str, asyncio.Lock] = {}  # by name

    async def start(self, specs: Sequence[WorkerSpec], timeout_s: float) -> list[WorkerReport]:
        """Starts workers, each when its earlier life is dead; all serve afterwards, or none does.

        Raises: WorkerError: one did not come up.
        """
        starts = [asyncio.create_task(self._start(spec, timeout_s)) for spec in specs]
        try:
            return await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            orders = [spec.order for spec in specs]
            await self._kill([w for w in self.living.values() if w.order in orders])
            raise

    async def stop(self, incarnations: Sequence[str], grace_s: float) -> None:
        """Waits for the end of workers, and kills those that take too long; skips unknown ones."""
        workers = [self.living[i] for i in incarnations if i in self.living]
        await _wait_for_ends(workers, grace_s)
        left = [worker for worker in workers if not worker.child.ended.done()]
        for worker in left:
            logger.warning("worker=%s did not end by itself; killed", worker.order.name)
        await self._kill(left)

    async def _start(self, spec: WorkerSpec, timeout_s: float) -> WorkerReport:
        """Raises: WorkerStartError: it did not come up; WorkerLost: the fork server is gone."""
        path = spec.log_path
        forking = asyncio.create_task(self._fork(spec, timeout_s))
        try:
            async with asyncio.timeout(timeout_s):
                worker = await asyncio.shield(forking)
                first: list[asyncio.Future[Any]] = [worker.reported, worker.child.ended]
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            what = f"did not report within {timeout_s:g} s"
        else:
            if worker.reported.done():
                return worker.reported.result()
            what = f"ended with {worker.child.how} before it served"
        finally:
            # also one that nobody waits for any more must not be left
            forking.add_done_callback(self._end_unreported)
        raise WorkerStartError.with_log(f"worker {spec.name} {what}", path, log_tail(path))

    async def _fork(self, spec: WorkerSpec, timeout_s: float) -> WorkerProcess:
        """Forks a new life when the one before is dead.

        Nobody cancels it, and there is one at a time: two living ones would want the same port, and
        the shards of the one before.

        Raises: WorkerStartError, WorkerLost.
        """
        async with self._one_life.setdefault(spec.name, asyncio.Lock()):
            earlier = [w for w in self.living.values() if w.order.name == spec.name]
            await self._kill(earlier)
            for worker in earlier:
                if not worker.child.ended.done():
                    raise WorkerStartError(
                        f"worker {spec.name} cannot be started again: its process "
                        f"{worker.child.pid} did not die of SIGKILL within {KILL_LIMIT_S:g} s"
                    )
            child = await self._fork_server.spawn(
                *(asdict(spec), spec.log_path), kind=socket.SOCK_SEQPACKET, timeout_s=timeout_s
            )
            loop, now_ns = asyncio.get_running_loop(), time.monotonic_ns()
            worker = WorkerProcess(spec.order, child, loop.create_future(), now_ns, now_ns)
            self.living[spec.order.incarnation] = worker
            loop.add_reader(child.connection, self._on_word, worker)
            child.ended.add_done_callback(lambda _: self._on_end(worker))
            return worker

    def _end_unreported(self, forking: asyncio.Task[WorkerProcess]) -> None:
        if not forking.cancelled() and forking.exception() is None:
            worker = forking.result()
            if not worker.reported.done():
                self._fork_server.kill(worker.child)

    def _on_word(self, worker: WorkerProcess) -> None:
        """A worker reports, or beats. It runs its user's code, so it may say anything."""
        try:
            while received := worker.child.connection.recv(_MESSAGE_BYTES):
                match _from_worker.decode(received):
                    case WorkerReport() as report if not worker.reported.done():
                        worker.reported.set_result(report)
                    case (beat_ns, turn_ns):
                        worker.beat_ns, worker.turn_ns = beat_ns, turn_ns
        except BlockingIOError:
            return
        except (OSError, MsgspecError, UnicodeDecodeError) as error:
            logger.warning("worker=%s is not understood: %s", worker.order.name, error)
        asyncio.get_running_loop().remove_reader(worker.child.connection)
        worker.child.connection.close()

    def _on_end(self, worker: WorkerProcess) -> None:
        order, how, path = worker.order, worker.child.how, self._folder.log_path(worker.order.name)
        if self._fork_server.is_gone.is_set():
            how += ", since the fork server is gone"
        logger.info("worker=%s pid=%d ended with %s", order.name, worker.child.pid, how)
        del self.living[order.incarnation]
        loop = asyncio.get_running_loop()
        loop.call_later(SERVERS_END_S, lambda: delete_left_files(self.begun_s))
        self.ended.append(
            EndedWorker(order.name, order.incarnation, how, str(path), log_tail(path))
        )
        self.end_noted.set()
        self.end_noted = asyncio.Event()

    async def _kill(self, workers: Sequence[WorkerProcess]) -> None:
        for worker in workers:
            self._fork_server.kill(worker.child)
        await _wait_for_ends(workers, KILL_LIMIT_S)


async def _wait_for_ends(workers: Sequence[WorkerProcess], timeout_s: float) -> None:
    if workers:
        await asyncio.wait([worker.child.ended for worker in workers], timeout=timeout_s)
