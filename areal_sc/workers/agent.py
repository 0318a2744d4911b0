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
is stopped ends by itself. So whatever becomes of the agent, no worker is left.

An agent deletes the run's shared memory and its keys when the run ends. One whose fork server has
died leaves them to its successor, which the scheduler starts, and which takes over what it finds.
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

from msgspec import json

from areal_sc.config.machine import count_cuda_devices
from areal_sc.config.schema import SchedulerConfig
from areal_sc.errors import ArealError, ConfigError, WorkerError, WorkerStartError
from areal_sc.fork_server import ForkServer
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
    Launch,
    Launched,
    News,
    NodeFacts,
    Stop,
    Watch,
    WorkerOrder,
    WorkerSpec,
)
from areal_sc.workers.worker_processes import WorkerProcesses

logger = logging.getLogger(__name__)


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
        self._processes = WorkerProcesses(fork_server, self._folder)
        self._heard_s = time.monotonic()

    async def serve(self) -> None:
        """Tells of the node, and returns when all is ended and cleaned up.

        Raises: WorkerStartError: the fork server has died. ConfigError: the node's shared memory
            cannot be used.
        """
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        limit_s = self._config.orphan_timeout_s
        watch = asyncio.create_task(_set_after(self._fork_server.is_gone, ended))
        try:
            await self._tell_of_node()
            while not ended.is_set() and self._is_wanted():
                self._fork_server.go_on(limit_s)
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), min(1.0, limit_s / 10))
            if self._fork_server.is_gone.is_set():
                raise WorkerStartError("the fork server is gone, and all workers with it")
        finally:
            watch.cancel()
            has_successor = self._fork_server.is_gone.is_set() and not _is_input_closed()
            await self._server.close()
            await self._fork_server.close()
            self._clean_up(has_successor=has_successor)

    async def launch(self, launch: Launch) -> Launched:
        """Starts workers; they all serve when it returns, or none is left.

        An earlier life of the same worker is killed first.
        """
        self._heard()
        started = time.monotonic()
        specs = [self._worker_spec(order) for order in launch.orders]
        try:
            workers = await self._processes.start(specs, launch.timeout_s)
        except WorkerError as error:
            return Launched([], str(error), error.log_path or "", list(error.log_tail))
        logger.info("workers=%d start_s=%.2f", len(workers), time.monotonic() - started)
        return Launched(workers)

    async def watch(self, watch: Watch) -> News:
        """News of the workers of a role, at once when one has ended."""
        self._heard()
        processes = self._processes
        if watch.num_ended == len(processes.ended):
            with suppress(TimeoutError):
                async with asyncio.timeout(watch.hold_s):
                    await processes.end_noted.wait()
        prefix, now_ns = f"{watch.role}/", time.monotonic_ns()
        return News(
            beats=[
                Beat(
                    worker.order.name,
                    worker.order.incarnation,
                    (now_ns - worker.beat_ns) / 1e9,
                    (now_ns - worker.turn_ns) / 1e9,
                )
                for worker in processes.living.values()
                if worker.order.role == watch.role and worker.reported.done()
            ],
            ended=[e for e in processes.ended[watch.num_ended :] if e.name.startswith(prefix)],
            num_ended=len(processes.ended),
        )

    async def stop(self, stop: Stop) -> None:
        """Waits for the end of workers, and kills those that take too long."""
        self._heard()
        await self._processes.stop(stop.incarnations, stop.grace_s)

    async def log_tail(self, name: str) -> list[str]:
        """The last lines of a worker's log; none of a name that is no worker's."""
        self._heard()
        is_known = any(worker.order.name == name for worker in self._processes.living.values())
        return log_tail(self._folder.log_path(name)) if is_known else []

    async def _tell_of_node(self) -> None:
        """Opens the node's shared memory, and deletes what killed runs have left there."""
        # first, so that what an earlier agent of this run has left stays
        self._memory = ArenaFolder(self._memory_root, self._run_id)
        clean_leftovers(self._memory_root)
        token = self._memory.node_token()
        self._processes.begun_s = self._memory.begun_s
        facts = NodeFacts(
            host=socket.gethostname(),
            token=token,
            num_devices=self._num_devices,
            memory_root=str(self._memory_root),
            address=self._interface.reachable(await self._server.start()),
            incarnation=self._incarnation,
        )
        _announce(facts)

    def _worker_spec(self, order: WorkerOrder) -> WorkerSpec:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else list(map(str, range(self._num_devices)))
        devices = ",".join(names[device].strip() for device in order.devices)
        return WorkerSpec(order, self._config, self._run_id, str(self._memory_root), devices)

    def _heard(self) -> None:
        self._heard_s = time.monotonic()

    def _is_wanted(self) -> bool:
        """Someone may still need workers; until any run, the script may be silent."""
        limit_s = self._config.orphan_timeout_s
        if time.monotonic() > self._heard_s + limit_s and (
            self._processes.living or _is_input_closed()
        ):
            logger.error("no controller was heard for %g s; ending", limit_s)
            return False
        return True

    def _clean_up(self, *, has_successor: bool) -> None:
        """Deletes what the run leaves, unless another script has its folder by now."""
        try:
            delete_left_files(self._processes.begun_s)
            if has_successor:
                return
            if self._memory is not None:
                self._memory.remove()
            self._folder.remove_keys()
        except (OSError, ArealError) as error:
            logger.warning("not all was deleted that the run left: %s", error)


async def _set_after(first: asyncio.Event, then: asyncio.Event) -> None:
    await first.wait()
    then.set()


def _is_input_closed() -> bool:
    """The script is gone: it holds the standard input open, and writes none."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


def _announce(what: NodeFacts | str) -> None:
    try:
        os.write(sys.stdout.fileno(), json.encode(what) + b"\n")
    except BrokenPipeError as error:
        raise WorkerStartError("nobody needs the agent: the script has ended") from error


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
