"""What stands in for the run folder on a node that does not see it: the agent's side.

Model and code are brought before workers start, the rest when a worker asks for it (`worker_side`).
Where the files are served changes with each start of the script, and workers live longer. So what
stands in for the folder says it, as the folder itself would.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import shutil
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from areal_sc.config.schema import SchedulerConfig, WeightUpdateMethod
from areal_sc.errors import ArealError, ConfigError, NotPermitted, TransportError, WaitTimeout
from areal_sc.nodes.joining import JOIN_LIMIT_S, read_address
from areal_sc.nodes.node_folder import NodeFolder
from areal_sc.nodes.spec import Launch, Shipped, Welcome, WorkerOrder
from areal_sc.run.run_folder import RunFolder
from areal_sc.shipping.client import ScriptFiles, until_there
from areal_sc.shipping.node_cache import NodeCache, unusable
from areal_sc.system.durable import write_atomic
from areal_sc.system.file_lock import HeldLock, take_lock
from areal_sc.system.os_errors import os_errors_as
from areal_sc.system.process import machine_id
from areal_sc.system.waiting import polled
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.transport.security.curve import CurveClient
from areal_sc.transport.security.passes import WorkerKeys

_STANDARD_ERROR: Final = Path("/proc/self/fd/2")
_LOCK: Final = ".agent"
_END_LIMIT_S: Final = 10.0
"""An agent that ends has the folder for so long at most."""
_POLL_S: Final = 0.2

logger = logging.getLogger(__name__)


class FolderInPlace(NodeFolder):
    """A folder of this node, as long as its agent lives.

    Args:
        config: `run_dir` is that of the script.
        run_id: of this start of the agent.
    Raises: ConfigError: it cannot be made, or another agent of the run has it.
    """

    is_shared = False

    def __init__(self, config: SchedulerConfig, run_id: str) -> None:
        super().__init__(config)
        self._is_told = asyncio.Event()
        self._keys: dict[str, WorkerKeys] = {}  # by the worker that has them, or had
        self._cache = NodeCache(config.node_folder)
        self._cache.make()
        node = hashlib.sha256(machine_id().encode()).hexdigest()[:12]
        # of each node another one, should they have the folder around it in common
        self._path = self._cache.path / "runs" / f"{run_id}-{node}"
        self._lock = self._make_path()
        logger.info("run_dir=%s is not seen here: path=%s", config.run_dir, self._path)
        self.config = replace(config, run_dir=str(self._path))

    def _make_path(self) -> HeldLock:
        """Blocks. Raises: ConfigError."""

        def take() -> HeldLock | None:
            # an agent of another run may delete the folder before it is locked
            for name in ("logs", "checkpoints", "sources"):
                (self._path / name).mkdir(parents=True, exist_ok=True)
            return take_lock(self._path / _LOCK, fcntl.LOCK_EX)

        try:
            self._path.parent.mkdir(exist_ok=True)
            for left in self._path.parent.iterdir():  # of agents that were killed
                if left != self._path and (lock := take_lock(left / _LOCK, fcntl.LOCK_EX)):
                    shutil.rmtree(left, ignore_errors=True)
                    lock.close()
            taken = polled(take, _END_LIMIT_S, _POLL_S)
        except OSError as error:
            raise unusable(self._path, error.strerror) from error
        if taken is None:
            raise unusable(self._path, "another agent of this run is on this node")
        return taken

    async def bring_first(self, launch: Launch) -> Shipped | None:
        if not launch.orders:
            return None
        await self._wait_until_told()
        for order in launch.orders:
            _check_weights_folder(order, self.script_config.run_dir)
        # the files are asked for in the name of the workers
        self._keys |= {it.name: keys for it, keys in zip(launch.orders, launch.keys, strict=True)}
        transport = ZmqTransport(client=CurveClient.of_worker(launch.keys[0]))
        paths = set[str]().union(*map(_model_of, launch.orders))
        places: dict[str, str] = {}

        async def bring() -> None:
            async with ScriptFiles.opened(transport, self._files_address) as files:
                for path in paths:
                    await self._cache_path(files, path, places)

        try:
            await until_there("model and code", bring, self.config.shipping_timeout_s)
        finally:
            await transport.close()
        return Shipped(self.script_config.run_dir, places)

    def note_welcome(self, welcome: Welcome) -> None:
        folder = RunFolder(self.config.run_dir)
        for path, address in (
            (folder.join_path, welcome.address),
            (folder.files_path, welcome.files),
        ):
            if read_address(path) != address:
                with os_errors_as(TransportError, f"cannot write {path}"):
                    write_atomic(path, address.encode())
        self._is_told.set()

    async def _wait_until_told(self) -> None:
        """The script calls before its answer to the agent's joining is here."""
        with suppress(TimeoutError):
            async with asyncio.timeout(JOIN_LIMIT_S):
                await self._is_told.wait()
        if not self._files_address:
            raise TransportError("the script has not said where its files are")

    @property
    def _files_address(self) -> str:
        return read_address(RunFolder(self.config.run_dir).files_path)

    async def _cache_path(self, files: ScriptFiles, path: str, places: dict[str, str]) -> None:
        limit_s = self.config.shipping_timeout_s
        try:
            place = await self._cache.bring(files, path, limit_s)
        except (TransportError, WaitTimeout):
            raise  # some are errors of the system, too
        except OSError as error:
            raise TransportError(f"{path} cannot be brought to this node: {error}") from error
        if place is not None:
            places[path] = str(place)

    def shown(self, path: str) -> str:
        return f"{socket.gethostname()}:{path}" if path else ""

    async def close(self) -> None:
        try:
            await self._bring_logs_back()
        finally:
            shutil.rmtree(self._path, ignore_errors=True)
            self._lock.close()

    async def _bring_logs_back(self) -> None:
        """To `logs/<node>/` of the run folder, as far as that works."""
        below = f"logs/{socket.gethostname()}"
        logs = {it.name: it for it in sorted(RunFolder(self.config.run_dir).logs.iterdir())}
        if _STANDARD_ERROR.resolve().is_relative_to(self._cache.path):
            logs["agent.log"] = _STANDARD_ERROR
        for keys in self._keys.values():
            transport = ZmqTransport(client=CurveClient.of_worker(keys))
            try:
                # whoever ends the agent does not wait for long
                async with asyncio.timeout(self.config.shutdown_timeout_s):
                    async with ScriptFiles.opened(transport, self._files_address) as files:
                        for name, log in logs.items():
                            await files.write_file(log, f"{below}/{name}")
                return
            except NotPermitted:  # the worker was started again elsewhere, say
                continue
            except (ArealError, OSError) as error:  # the time limit's is an OSError, too
                logger.warning("not all logs of this node came back to the run folder: %s", error)
                return
            finally:
                await transport.close()
        if self._keys:
            logger.warning("the logs of this node are not taken: its workers are elsewhere by now")


def _check_weights_folder(order: WorkerOrder, run_dir: str) -> None:
    """Raises: ConfigError: new weights would be written where only this node sees them."""
    update = order.engine_config.get("weight_update", {})
    folder = Path(update.get("folder", ""))
    is_own = not folder.is_absolute() or folder.is_relative_to(run_dir)
    if update.get("method") == WeightUpdateMethod.disk and is_own:
        raise ConfigError(
            f"weight_update.method=disk: {socket.gethostname()} does not see the run folder, nor "
            f"weight_update.folder={folder}: set that to a folder that all nodes see, or take "
            "weight_update.method=pull"
        )


def _model_of(order: WorkerOrder) -> set[str]:
    """The folder on the script's machine that a worker needs when it begins, if it needs one."""
    path = str(order.engine_config.get("path"))
    return {path} if path.startswith("/") else set()
