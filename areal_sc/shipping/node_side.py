"""What stands in for the run folder on a node that does not see it: the agent's side.

Model and code are brought before workers start, the rest when a worker asks for it (`worker_side`).
Where the files are served changes with each start of the script, and workers live longer. So what
stands in for the folder says it, as the folder itself would.

What a node keeps of the script's files, and where the files of a run are on it:

    <scheduler.node_folder>/areal_sc-<user>/
        trees/<digest>/         a folder, or one file, by the hash of its content
        trees/.<digest>.lock    of whoever brings it: once a node
        trees/.<digest>.use     of whoever uses it, as long as that lives
        runs/<run id>-<node>/   in place of the run folder; it goes when the run's agent ends
        logs/                   of agents that have not begun yet

A tree gets its name when all of it is on the disk and has the right hashes. It stays for later
runs, until nobody has begun to use it for `KEEP_S`, and nobody uses it.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import shutil
import socket
import stat
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from areal_sc.config.schema import SchedulerConfig, WeightUpdateMethod
from areal_sc.errors import (
    ArealError,
    ConfigError,
    NotPermitted,
    RunFolderError,
    TransportError,
    WaitTimeout,
)
from areal_sc.ids import random_id
from areal_sc.nodes.joining import JOIN_LIMIT_S, read_address
from areal_sc.nodes.node_folder import NodeFolder
from areal_sc.nodes.spec import Launch, Shipped, Welcome, WorkerOrder
from areal_sc.run.private_folder import make_private
from areal_sc.run.run_folder import RunFolder
from areal_sc.shipping.calls import Listing
from areal_sc.shipping.client import ScriptFiles, until_there
from areal_sc.shipping.trees import digest_of
from areal_sc.system.durable import commit_folder, os_errors_as, remove, write_atomic
from areal_sc.system.file_lock import HeldLock, take_lock
from areal_sc.system.process import machine_id
from areal_sc.system.waiting import polled
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.transport.security.curve import CurveClient
from areal_sc.transport.security.passes import WorkerKeys
from areal_sc.transport.shards.memory_folder import folder_on_node

logger = logging.getLogger(__name__)

_STANDARD_ERROR: Final = Path("/proc/self/fd/2")
_LOCK: Final = ".agent"
_END_LIMIT_S: Final = 10.0
"""An agent that ends has the folder for so long at most."""
_POLL_S: Final = 0.2


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
        named = {str(order.engine_config.get("path")) for order in launch.orders}
        paths = {path for path in named if path.startswith("/")}  # models that workers begin with
        paths |= {path for order in launch.orders for path in order.code_folders}
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


KEEP_S: Final = 14 * 86400.0
_OWNER_ONLY: Final = 0o700


class NodeCache:
    """Trees on this node, of all runs of this user.

    Args:
        node_folder: `scheduler.node_folder`.
    """

    def __init__(self, node_folder: str) -> None:
        self.path = folder_on_node(node_folder)
        self._trees = self.path / "trees"
        self._uses: dict[str, HeldLock] = {}

    def make(self) -> None:
        """Makes its folders, and deletes what was not used for long.

        Raises: ConfigError: they cannot be made, or are not this user's own.
        """
        try:
            self.path.mkdir(mode=_OWNER_ONLY, parents=True, exist_ok=True)
            status = self.path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                raise unusable(self.path, "it belongs to another user")
            make_private(self.path, partial(logger.warning, "%s"))
            self.path.chmod(_OWNER_ONLY)
            self._trees.mkdir(exist_ok=True)
            for log in (self.path / "logs").glob("*"):
                if _age_s(log) > KEEP_S:
                    remove(log)
            for entry in self._trees.iterdir():
                if _age_s(entry) > KEEP_S:
                    self._remove_unused(entry)
        except OSError as error:
            raise unusable(self.path, error.strerror) from error
        except RunFolderError as error:
            raise unusable(self.path, str(error)) from error

    def _remove_unused(self, entry: Path) -> None:
        if entry.suffix == ".partial":
            return remove(entry)
        path = entry if entry.name.startswith(".") else self._use_of(entry.name)
        lock = take_lock(path, fcntl.LOCK_EX)
        if lock is not None:
            remove(entry)
            remove(path)
            lock.close()

    async def bring(self, files: ScriptFiles, path: str, limit_s: float) -> Path | None:
        """Where a path of the script's machine is on this node; None: there is no such path.

        Args:
            limit_s: for another process of this node that brings it already.
        Raises: ConfigError: it is too large. TransportError. WaitTimeout. OSError: the disk of
            this node has failed.
        """
        listing = await files.list_path(path)
        if listing.is_missing:
            return None
        digest = digest_of(listing)
        tree = self._trees / digest
        await self._use(digest)
        if not tree.is_dir():
            async with self.bringing(digest, path, limit_s):
                if not tree.is_dir():
                    await self._fetch(files, path, listing, tree)
        os.utime(tree)
        return tree / listing.files[0].name if listing.is_file else tree

    async def _use(self, digest: str) -> None:
        """The tree of this digest stays as long as this object lives."""
        while digest not in self._uses:
            if lock := take_lock(self._use_of(digest), fcntl.LOCK_SH):
                self._uses[digest] = lock
            else:  # somebody looks whether it is used, or is about to delete it
                await asyncio.sleep(_POLL_S)

    async def _fetch(self, files: ScriptFiles, path: str, listing: Listing, tree: Path) -> None:
        num_bytes = sum(fact.num_bytes for fact in listing.files)
        free_bytes = shutil.disk_usage(self._trees).free
        if num_bytes > free_bytes:
            raise ConfigError(
                f"{path} has {num_bytes >> 20} MiB, and {self.path} of this node has room for "
                f"{free_bytes >> 20} MiB: set scheduler.node_folder to a larger disk of the nodes"
            )
        began_s, partial = time.monotonic(), self._trees / f".{random_id()}.partial"
        try:
            partial.mkdir()
            for fact in listing.files:
                target = partial / fact.name
                target.parent.mkdir(parents=True, exist_ok=True)
                await files.read_file(path, fact, target)
            await asyncio.to_thread(commit_folder, partial, tree)
        except BaseException:
            remove(partial)
            raise
        took_s = time.monotonic() - began_s
        what = (path, len(listing.files), num_bytes, took_s)
        logger.info("path=%s was brought to this node: files=%d bytes=%d s=%.1f", *what)

    @asynccontextmanager
    async def bringing(self, digest: str, path: str, limit_s: float) -> AsyncIterator[None]:
        """One process of this node at a time brings what a digest names.

        Raises: WaitTimeout: another one does not get on with it.
        """
        path_of_lock, give_up_s = self._trees / f".{digest}.lock", time.monotonic() + limit_s
        while (lock := take_lock(path_of_lock, fcntl.LOCK_EX)) is None:
            if time.monotonic() > give_up_s:
                raise WaitTimeout(
                    f"{path} was waited for, which another process of this node brings, for "
                    f"{limit_s:g} s"
                )
            await asyncio.sleep(_POLL_S)
        try:
            yield
        finally:
            lock.close()

    def _use_of(self, digest: str) -> Path:
        return self._trees / f".{digest}.use"


def _age_s(path: Path) -> float:
    with suppress(FileNotFoundError):
        return time.time() - path.lstat().st_mtime
    return 0.0


def unusable(path: Path, why: str | None) -> ConfigError:
    """Says which setting names another folder."""
    return ConfigError(
        f"{path} cannot be used for what this node needs of the script's files: {why}; set "
        "scheduler.node_folder to a folder of the nodes that can be written"
    )
