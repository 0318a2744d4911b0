"""LocalScheduler: workers on this machine, forked from a server that has imported torch already.

    make_scheduler      the fork server starts importing at once, in the background
    launch              fork -> the worker binds its socket -> it writes its report file -> serving
    stop                the workers were asked to end; what is left after a while gets SIGKILL

Where there are CUDA devices, the server imports nothing beforehand. It is a process of its own; it
and the workers outlive this one by `orphan_timeout_s` at most. The keys of the run are made here,
and lie in a file of the run folder, for its owner alone, while the scheduler is open.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict

from areal_sc import interrupts, open_files
from areal_sc.config.machine import Machine, resolved_device, this_machine
from areal_sc.config.placement import DevicePlacement
from areal_sc.config.schema import Device, SchedulerConfig
from areal_sc.errors import WorkerLost, WorkerStartError
from areal_sc.ids import random_id
from areal_sc.run_folder import RunFolder
from areal_sc.schedulers.base import LaunchRequest, RunningWorker, log_tail
from areal_sc.transport.arena.folder import ArenaFolder, clean_leftovers
from areal_sc.transport.keys import RunKeys
from areal_sc.workers.fork_client import (
    ForkServerClient,
    random_address,
    start_fork_server,
)
from areal_sc.workers.run_memory import memory_root
from areal_sc.workers.spec import WorkerReport, WorkerSpec

logger = logging.getLogger(__name__)

REPORT_POLL_S = 0.01
PRELOAD = (
    "torch",
    "transformers",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.auto.modeling_auto",
    "areal_sc.workers.entry",
    "areal_sc.workers.train_worker",
    "areal_sc.workers.rollout_worker",
    "areal_sc.engines.fsdp.engine",
    "areal_sc.engines.local.engine",
)


class LocalScheduler:
    """Runs workers on this machine.

    Args:
        config: the `scheduler` section.
        folder: as in `make_scheduler`.
        probe: what this machine offers.
    Raises: RunFolderError: another process runs in the folder, or it cannot be used.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        folder: RunFolder | None = None,
        *,
        probe: Callable[[], Machine] = this_machine,
    ) -> None:
        self.config = config
        self.keys = RunKeys.create()
        self._run_id = random_id()
        self._num_devices = probe().num_cuda_devices
        self._placement = DevicePlacement(self._num_devices)
        self._exit_codes: dict[int, int] = {}
        open_files.raise_limit()
        with interrupts.deferred(), ExitStack() as undo:
            if folder is None:
                folder = RunFolder(config.run_dir)
                folder.lock()
                undo.callback(folder.close)
            self._run_dir = folder.path
            folder.remove_traces()  # of a run that was killed
            undo.callback(folder.remove_traces)
            self._memory_root = memory_root(config.transport.shared_memory, self._run_dir)
            run_memory = self._open_run_memory()
            undo.callback(run_memory.remove)
            self.keys.write(folder.keys_path)
            self._fork_server = self._start_fork_server()
            undo.callback(self._fork_server.shutdown, config.shutdown_timeout_s)
            self._undo = undo.pop_all()
        # A script that ends without `close` does not leave the server to its orphan timeout.
        atexit.register(self._close_at_exit)

    async def launch(self, request: LaunchRequest) -> RunningWorker:
        spec = self._spec(request)
        spec.report_path.unlink(missing_ok=True)
        started = time.monotonic()
        pid = await asyncio.to_thread(
            self._fork_server.spawn,
            "worker",
            spec.to_dict(),
            spec.log_path,
            timeout_s=self.config.startup_timeout_s,
        )
        self._exit_codes.pop(pid, None)  # of a process that had this number before
        with ExitStack() as undo:
            undo.callback(self._give_up, spec.name, pid)
            report = await self._wait_for_report(spec, pid)
            undo.pop_all()
        logger.info(
            "worker=%s pid=%d address=%s start_s=%.2f",
            *(spec.name, pid, report.address, time.monotonic() - started),
        )
        return RunningWorker(spec, report)

    async def exit_statuses(self, workers: Sequence[RunningWorker]) -> dict[str, str]:
        by_pid = await self._exit_statuses([worker.report.pid for worker in workers])
        return {w.name: by_pid[w.report.pid] for w in workers if w.report.pid in by_pid}

    async def stop(self, workers: list[RunningWorker]) -> None:
        loop = asyncio.get_running_loop()
        gentle_until = loop.time() + self.config.shutdown_timeout_s / 2
        running = await self._running(workers)
        while running and loop.time() < gentle_until:
            await asyncio.sleep(REPORT_POLL_S)
            running = await self._running(running)
        for worker in running:
            logger.warning("worker=%s did not end by itself; killed", worker.name)
            await asyncio.to_thread(self._fork_server.kill, worker.report.pid, signal.SIGKILL)
        for worker in workers:
            worker.spec.report_path.unlink(missing_ok=True)
            self._placement.release(worker.name)

    def close(self) -> None:
        """Ends the fork server, and with it every worker that is left."""
        with interrupts.deferred():
            self._undo.close()
            atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        with interrupts.deferred(are_dropped=True):
            self.close()

    def _open_run_memory(self) -> ArenaFolder:
        """The run's folder on this node; those of runs that were killed are deleted."""
        clean_leftovers(self._memory_root)
        return ArenaFolder(self._memory_root, self._run_id)

    def _start_fork_server(self) -> ForkServerClient:
        return start_fork_server(
            address=random_address(),
            preload=() if self._num_devices else PRELOAD,
            orphan_timeout_s=self.config.orphan_timeout_s,
            log_path=self._run_dir / "logs" / "fork_server.log",
            leftovers_of=(self._run_dir, self._memory_root),
            env={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ},
            timeout_s=self.config.startup_timeout_s,
        )

    def _spec(self, request: LaunchRequest) -> WorkerSpec:
        return WorkerSpec(
            role=request.role,
            index=request.index,
            run_id=self._run_id,
            incarnation=random_id(),
            engine=request.engine,
            engine_config=request.engine_config,
            run_dir=str(self._run_dir),
            memory_root=str(self._memory_root),
            transport=asdict(self.config.transport),
            store_bytes=request.store_bytes,
            heartbeat_interval_s=self.config.heartbeat_interval_s,
            orphan_timeout_s=self.config.orphan_timeout_s,
            environment=self._device_environment(request),
        )

    def _device_environment(self, request: LaunchRequest) -> dict[str, str]:
        """CUDA_VISIBLE_DEVICES of the worker's devices, in the order of this process's own."""
        on_cpu = resolved_device(request.device, self._num_devices) == Device.cpu
        if on_cpu or not request.num_devices:
            return {"CUDA_VISIBLE_DEVICES": ""}
        devices = self._placement.place(request.role, request.index, request.num_devices)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else list(map(str, range(self._num_devices)))
        return {"CUDA_VISIBLE_DEVICES": ",".join(names[device].strip() for device in devices)}

    async def _wait_for_report(self, spec: WorkerSpec, pid: int) -> WorkerReport:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self.config.startup_timeout_s
        while True:
            report = WorkerReport.read(spec.report_path, spec.incarnation)
            if report:
                return report
            status = (await self._exit_statuses([pid])).get(pid)
            if status or loop.time() > give_up:
                what = (
                    f"ended with {status} before it served"
                    if status
                    else f"did not report within {self.config.startup_timeout_s:g} s"
                )
                raise WorkerStartError(
                    f"worker {spec.name} {what}; its log is {spec.log_path}",
                    log_path=str(spec.log_path),
                    log_tail=log_tail(spec.log_path),
                )
            await asyncio.sleep(REPORT_POLL_S)

    def _give_up(self, name: str, pid: int) -> None:
        """Nobody else knows of the worker yet, so nobody else would end it."""
        self._fork_server.kill(pid, signal.SIGKILL)
        self._placement.release(name)

    async def _running(self, workers: list[RunningWorker]) -> list[RunningWorker]:
        ended = await self.exit_statuses(workers)
        return [worker for worker in workers if worker.name not in ended]

    async def _exit_statuses(self, pids: Sequence[int]) -> dict[int, str]:
        """Of those of the processes that ended; one question to the fork server."""
        gone: WorkerLost | None = None
        try:
            self._exit_codes.update(await asyncio.to_thread(self._fork_server.poll))
        except WorkerLost as error:
            gone = error  # and with it all its children
        statuses = {}
        for pid in pids:
            code = self._exit_codes.get(pid)
            if code is not None:
                statuses[pid] = _exit_status(code)
            elif gone is not None:
                statuses[pid] = f"SIGKILL, since {gone}"
        return statuses


def _exit_status(code: int) -> str:
    if code < 0:
        return f"signal {-code} ({signal.Signals(-code).name})"
    return f"exit code {code}"
