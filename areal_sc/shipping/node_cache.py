"""What a node keeps of the script's files, and where the files of a run are on it.

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
import logging
import os
import shutil
import stat
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from areal_sc.errors import ConfigError, RunFolderError, WaitTimeout
from areal_sc.ids import random_id
from areal_sc.run.private_folder import make_private
from areal_sc.shipping.calls import Listing
from areal_sc.shipping.client import ScriptFiles
from areal_sc.shipping.trees import digest_of
from areal_sc.system.durable import commit_folder, remove
from areal_sc.system.file_lock import HeldLock, take_lock
from areal_sc.transport.shards.memory_folder import folder_on_node

KEEP_S: Final = 14 * 86400.0
_OWNER_ONLY: Final = 0o700
_POLL_S: Final = 0.2

logger = logging.getLogger(__name__)


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
        give_up_s = time.monotonic() + limit_s
        while (lock := take_lock(self._lock_of(digest), fcntl.LOCK_EX)) is None:
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

    def _lock_of(self, digest: str) -> Path:
        return self._trees / f".{digest}.lock"

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
