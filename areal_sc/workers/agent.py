"""The agent of a node: starts, watches and ends the workers there, and owns their shared memory.

    script ── RPC, CURVE with the run's keys ──► agent ══ socket pair ══► fork server ──► workers
      controllers: LAUNCH, WATCH,                  ▲                                        │
                   STOP, LOG_TAIL                  └────────── one socket pair each ────────┘
                                                          WorkerReport once, then beats

    WorkerOrder ─► WorkerSpec ─► process ─► WorkerReport ─► Beat, Beat, … ─► EndedWorker

One process a node, started as `python -m areal_sc.workers.agent <run id> <SchedulerConfig as JSON>`
on this machine or any other. When it listens, it writes its `NodeFacts` to its standard output, one
line of JSON, or a string that says why the node cannot be used.

    consumes     calls of the controllers, reports and beats of workers, the ends of processes
    waits for    a call, a worker, or the end
    unblocked by SIGTERM; the death of its fork server; or no word of a controller for
                 `orphan_timeout_s`. Until workers run, it is enough that the standard input is open

The fork server must be single-threaded, and ZMQ has threads: so it is a process of its own, forked
before anything else happens. Processes die with whoever forked them, and a fork server whose agent
is stopped ends by itself. So whatever becomes of the agent, no worker is left. An agent that can
still act deletes the run's shared memory and its keys.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from msgspec import MsgspecError, json, msgpack

from areal_sc.config.machine import count_cuda_devices
from areal_sc.config.schema import SchedulerConfig
from areal_sc.errors import ArealError, ConfigError, WorkerError, WorkerStartError
from areal_sc.fork_server import Child, ForkServer
from areal_sc.ids import random_id
from areal_sc.log import log_tail, setup_logging
from areal_sc.process import allow_open_files, name_process
from areal_sc.run_folder import RunFolder
from areal_sc.transport.rpc.server import RpcServer
from areal_sc.transport.security.curve import CurveAuthenticator
from areal_sc.transport.security.keys import RunKeys
from areal_sc.transport.shards.memory_folder import ArenaFolder, clean_leftovers, memory_root
from areal_sc.transport.sockets.interface import Interface
from areal_sc.workers.entry import PRELOAD
from areal_sc.workers.left_files import delete_left_files
from areal_sc.workers.spec import (
    LAUNCH,
    LOG_TAIL,
    STOP,
    WATCH,
    Beat,
    EndedWorker,
    Launch,
    Launched,
    News,
    NodeFacts,
    Stop,
    Watch,
    WorkerOrder,
    WorkerReport,
    WorkerSpec,
)

logger = logging.getLogger(__name__)

SERVERS_END_S: Final = 5.0
"""The kernel kills the servers of a killed worker; after so long they are gone."""
KILL_LIMIT_S: Final = 10.0
"""A process that takes longer to die of SIGKILL hangs in the kernel."""

_MESSAGE_BYTES: Final = 64 << 10

_from_worker: Final = msgpack.Decoder(WorkerReport | tuple[int, int])


@dataclass(eq=False)
class _Worker:
    """A worker's process, from its fork to its end.

    Attributes:
        reported: what it told when it began to serve.
        beat_ns, turn_ns: its last signs of life, `CLOCK_MONOTONIC`.
    """

    order: WorkerOrder
    child: Child
    reported: asyncio.Future[WorkerReport]
    beat_ns: int
    turn_ns: int


class Agent:
    """Serves until the end.

    Args:
        run_id: names this start of the script.
        config: the run's; `run_dir` is absolute.
        keys: of the run.
        fork_server: of this process.
        num_devices: CUDA devices of this node.
    """

    def __init__(
        self,
        run_id: str,
        config: SchedulerConfig,
        keys: RunKeys,
        fork_server: ForkServer,
        num_devices: int,
    ) -> None:
        self._run_id = run_id
        self._config = config
        self._fork_server = fork_server
        self._num_devices = num_devices
        self._folder = RunFolder(config.run_dir)
        self._memory_root = memory_root(config.transport.shared_memory, self._folder.path)
        self._interface = Interface.of(config.transport.bind)
        self._memory: ArenaFolder | None = None
        self._incarnation = random_id()
        self._server = RpcServer(
            [
                LAUNCH.served_by(self.launch),
                WATCH.served_by(self.watch),
                STOP.served_by(self.stop),
                LOG_TAIL.served_by(self.log_tail),
            ],
            node_id="agent",
            incarnation=self._incarnation,
            bind=self._interface.bind,
            authenticator=CurveAuthenticator(keys, "agent"),
        )
        self._workers: dict[str, _Worker] = {}  # by incarnation
        self._ended: list[EndedWorker] = []
        self._end_noted = asyncio.Event()
        self._heard_s = time.monotonic()
        self._started_s = time.time()

    async def serve(self) -> None:
        """Tells of the node, and returns when all is ended and cleaned up.

        Raises: WorkerStartError: the fork server has died. ConfigError: the node's shared memory
            cannot be used.
        """
        terminated = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated.set)
        limit_s = self._config.orphan_timeout_s
        try:
            await self._tell_of_node()
            while not terminated.is_set() and self._is_wanted():
                self._fork_server.go_on(limit_s)
                with suppress(TimeoutError):
                    await asyncio.wait_for(terminated.wait(), min(1.0, limit_s / 10))
            if self._fork_server.is_gone.is_set():
                raise WorkerStartError("the fork server is gone, and all workers with it")
        finally:
            await self._server.close()
            await self._fork_server.close()
            self._clean_up()

    async def launch(self, launch: Launch) -> Launched:
        """Starts workers; they all serve when it returns, or none is left.

        An earlier life of the same worker is killed first.
        """
        self._heard()
        started = time.monotonic()
        starts = [
            asyncio.create_task(self._start(order, launch.timeout_s)) for order in launch.orders
        ]
        try:
            workers = await asyncio.gather(*starts)
        except BaseException as error:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self._kill([w for w in self._workers.values() if w.order in launch.orders])
            if not isinstance(error, WorkerError):
                raise
            return Launched([], str(error), error.log_path or "", list(error.log_tail))
        logger.info("workers=%d start_s=%.2f", len(workers), time.monotonic() - started)
        return Launched(workers)

    async def watch(self, watch: Watch) -> News:
        """News of the workers of a role, at once when one has ended."""
        self._heard()
        if watch.num_ended == len(self._ended):
            with suppress(TimeoutError):
                async with asyncio.timeout(watch.hold_s):
                    await self._end_noted.wait()
        prefix, now_ns = f"{watch.role}/", time.monotonic_ns()
        return News(
            beats=[
                Beat(
                    worker.order.name,
                    worker.order.incarnation,
                    (now_ns - worker.beat_ns) / 1e9,
                    (now_ns - worker.turn_ns) / 1e9,
                )
                for worker in self._workers.values()
                if worker.order.role == watch.role and worker.reported.done()
            ],
            ended=[e for e in self._ended[watch.num_ended :] if e.name.startswith(prefix)],
            num_ended=len(self._ended),
        )

    async def stop(self, stop: Stop) -> None:
        """Waits for the end of workers, and kills those that take too long."""
        self._heard()
        workers = [self._workers[i] for i in stop.incarnations if i in self._workers]
        await _wait_for_ends(workers, stop.grace_s)
        left = [worker for worker in workers if not worker.child.ended.done()]
        for worker in left:
            logger.warning("worker=%s did not end by itself; killed", worker.order.name)
        await self._kill(left)

    async def log_tail(self, name: str) -> list[str]:
        """The last lines of a worker's log; none of a name that is no worker's."""
        self._heard()
        is_known = any(worker.order.name == name for worker in self._workers.values())
        return log_tail(self._folder.log_path(name)) if is_known else []

    async def _tell_of_node(self) -> None:
        """Opens the node's shared memory, and deletes what killed runs have left there."""
        clean_leftovers(self._memory_root)
        self._memory = ArenaFolder(self._memory_root, self._run_id)
        facts = NodeFacts(
            host=socket.gethostname(),
            token=self._memory.node_token(),
            num_devices=self._num_devices,
            memory_root=str(self._memory_root),
            address=self._interface.reachable(await self._server.start()),
            incarnation=self._incarnation,
        )
        _announce(facts)

    async def _start(self, order: WorkerOrder, timeout_s: float) -> WorkerReport:
        """Raises: WorkerStartError: it did not come up; WorkerLost: the fork server is gone."""
        path = self._folder.log_path(order.name)
        try:
            async with asyncio.timeout(timeout_s):
                worker = await self._fork(order, path, timeout_s)
                first: list[asyncio.Future[Any]] = [worker.reported, worker.child.ended]
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            what = f"did not report within {timeout_s:g} s"
        else:
            if worker.reported.done():
                return worker.reported.result()
            what = f"ended with {worker.child.how} before it served"
        raise WorkerStartError.with_log(f"worker {order.name} {what}", path, log_tail(path))

    async def _fork(self, order: WorkerOrder, log_path: Path, timeout_s: float) -> _Worker:
        await self._kill([w for w in self._workers.values() if w.order.name == order.name])
        child = await self._fork_server.spawn(
            asdict(self._worker_spec(order)),
            log_path,
            kind=socket.SOCK_SEQPACKET,
            timeout_s=timeout_s,
        )
        loop, now_ns = asyncio.get_running_loop(), time.monotonic_ns()
        worker = _Worker(order, child, loop.create_future(), now_ns, now_ns)
        self._workers[order.incarnation] = worker
        loop.add_reader(child.connection, self._on_word, worker)
        child.ended.add_done_callback(lambda _: self._on_end(worker))
        return worker

    def _worker_spec(self, order: WorkerOrder) -> WorkerSpec:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else list(map(str, range(self._num_devices)))
        devices = ",".join(names[device].strip() for device in order.devices)
        return WorkerSpec(order, self._config, self._run_id, str(self._memory_root), devices)

    def _on_word(self, worker: _Worker) -> None:
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

    def _on_end(self, worker: _Worker) -> None:
        order, how, path = worker.order, worker.child.how, self._folder.log_path(worker.order.name)
        if self._fork_server.is_gone.is_set():
            how += ", since the fork server is gone"
        logger.info("worker=%s pid=%d ended with %s", order.name, worker.child.pid, how)
        del self._workers[order.incarnation]
        loop = asyncio.get_running_loop()
        loop.call_later(SERVERS_END_S, delete_left_files, self._started_s)
        self._ended.append(
            EndedWorker(order.name, order.incarnation, how, str(path), log_tail(path))
        )
        self._end_noted.set()
        self._end_noted = asyncio.Event()

    async def _kill(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            self._fork_server.kill(worker.child)
        await _wait_for_ends(workers, KILL_LIMIT_S)

    def _heard(self) -> None:
        self._heard_s = time.monotonic()

    def _is_wanted(self) -> bool:
        """Someone may still need workers.

        Until any run, the script may be silent: it holds the standard input open, and writes none.
        """
        limit_s = self._config.orphan_timeout_s
        if self._fork_server.is_gone.is_set():
            return False
        if time.monotonic() > self._heard_s + limit_s and (
            self._workers or select.select([sys.stdin], [], [], 0)[0]
        ):
            logger.error("no controller was heard for %g s; ending", limit_s)
            return False
        return True

    def _clean_up(self) -> None:
        """Deletes what the run leaves, unless another script has its folder by now."""
        try:
            delete_left_files(self._started_s)
            if self._memory is not None:
                self._memory.remove()
            self._folder.remove_keys()
        except (OSError, ArealError) as error:
            logger.warning("not all was deleted that the run left: %s", error)


async def _wait_for_ends(workers: Sequence[_Worker], timeout_s: float) -> None:
    if workers:
        await asyncio.wait([worker.child.ended for worker in workers], timeout=timeout_s)


def _announce(what: NodeFacts | str) -> None:
    os.write(sys.stdout.fileno(), json.encode(what) + b"\n")


def main(
    argv: Sequence[str] | None = None,
    *,
    target: str = "areal_sc.workers.entry:run_worker",
    preload: Sequence[str] = PRELOAD,
) -> int:
    """An agent as a process.

    Args:
        target, preload: of its workers, as in `ForkServer`.
    """
    run_id, settings = sys.argv[1:] if argv is None else argv
    config = json.decode(settings, type=SchedulerConfig)
    setup_logging("agent")
    name_process("agent")
    allow_open_files()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    num_devices = count_cuda_devices()
    fork_server = ForkServer(target, () if num_devices else preload)
    try:
        keys = RunKeys.from_environment(os.environ)
        keys = keys or RunKeys.read(RunFolder(config.run_dir).keys_path)
        asyncio.run(Agent(run_id, config, keys, fork_server, num_devices).serve())
    except ArealError as error:
        logger.error("the agent ended: %s", error)
        if isinstance(error, ConfigError):
            _announce(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
