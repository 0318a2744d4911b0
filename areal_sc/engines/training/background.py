"""Writing on a thread of its own while training goes on; all ranks agree on how it ended.

consumes     writes that the engine's thread begins, on every rank the same ones in the same order
waits for    the disk, and after each phase of a write for the other ranks
unblocked by the other ranks' writing threads. If a rank dies, its connections break and the wait
             fails. The controller bounds it by `transport.write_timeout_s`

One write goes on at a time, so at most one staged copy of the state waits for the disk.
"""

from __future__ import annotations

import logging
import secrets
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from areal_sc.engines.training.process_group import ProcessGroup
from areal_sc.errors import CheckpointError
from areal_sc.system.durable import commit_folder, partial_of, remove, sync_folder

logger = logging.getLogger(__name__)

WRITE_TIMEOUT = timedelta(days=30)
"""Above every deadline of a call: the controller restarts ranks whose writing hangs."""

# What writing and reading raise: the system, torch, damaged files, or their content.
FAILURES = (
    *(OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError),
    *(OverflowError, MemoryError, SafetensorError),
)

T = TypeVar("T")


class SideGroup:
    """The ranks once more, over gloo: for use by one thread at a time, beside the engine's.

    Collective operations of one group must meet in one order on all ranks, so the thread that
    writes cannot share the group of the thread that trains.

    Args:
        shares_files: whether this rank sees the folders that others, of which the same is true,
            write to.
        node: names the machine whose memory this rank sees.

    Attributes:
        ranks: for collectives on the CPU.
        shares_files: of each rank.
        nodes: of each rank.
    """

    def __init__(self, group: ProcessGroup, *, shares_files: bool = True, node: str = "") -> None:
        self.rank = group.rank
        self.size = group.size
        gloo = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT) if group.size > 1 else None
        self.ranks = replace(group, handle=gloo, device=torch.device("cpu"))
        places = self.ranks.gather((shares_files, node))
        self.shares_files: list[bool] = [shares for shares, _ in places]
        self.nodes: list[str] = [name for _, name in places]

    @property
    def neighbours(self) -> list[int]:
        """The ranks on this one's node, in their order."""
        own = self.nodes[self.rank]
        return [rank for rank, node in enumerate(self.nodes) if node == own]

    def together(self, what: str, action: Callable[[], T]) -> list[T]:
        """Runs `action` on every rank; if it fails anywhere, every rank raises.

        Returns: what the ranks' actions returned, in rank order.
        Raises: CheckpointError: "`what` (train rank n): cause", or the ranks lost each other.
        """
        result = failure = None
        try:
            result = action()
        except FAILURES as error:
            failure = error
        message = f"{type(failure).__name__}: {failure}" if failure is not None else None
        try:
            outcomes = self.ranks.gather((message, result))
        except (dist.DistError, RuntimeError) as error:
            raise CheckpointError(
                f"{what} (train rank {self.rank}): another rank ended or took longer than "
                f"{WRITE_TIMEOUT.total_seconds():.0f} s: {error}"
            ) from error
        for rank, (reported, _) in enumerate(outcomes):
            if reported is not None:
                raise CheckpointError(f"{what} (train rank {rank}): {reported}") from failure
        return [result for _, result in outcomes]


class BackgroundWriter:
    """Runs one write after the other on a thread; made by all ranks together. As `SideGroup`."""

    def __init__(self, group: ProcessGroup, *, shares_files: bool = True, node: str = "") -> None:
        self.group = SideGroup(group, shares_files=shares_files, node=node)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None

    def begin(self, write: Callable[[], None]) -> Future[None]:
        """Starts a write. One that still goes on is waited for; its error stays in its future.

        Args:
            write: raises CheckpointError, on all ranks or none.
        """
        self.wait()
        self._running = self._thread.submit(write)
        self._running.add_done_callback(_report_failure)
        return self._running

    def wait(self) -> None:
        """Returns once nothing is being written; what went wrong with it is in its future.

        Raises: CheckpointError: the disk took longer than `WRITE_TIMEOUT`.
        """
        if self._running is None:
            return
        limit_s = WRITE_TIMEOUT.total_seconds()
        if wait_for([self._running], timeout=limit_s).not_done:
            raise CheckpointError(
                f"train rank {self.group.rank} still writes a snapshot or an export after "
                f"{limit_s:.0f} s: the disk does not keep up, or does not answer"
            )
        self._running = None

    def close(self) -> None:
        """Lets the write that goes on end, and then the thread."""
        self.wait()
        self._thread.shutdown()


def replace_folder(
    folder: Path,
    group: SideGroup,
    fill: Callable[[Path, bool], None],
    *,
    is_common: bool = False,
) -> None:
    """Fills a folder beside `folder` on all ranks, then puts it in its place: `commit_folder`.

    Args:
        folder: ranks that do not see that of rank 0, and are not known to share files with it, have
            others of this name.
        fill: gets the folder to write to, and whether it is one for all ranks; itself agrees with
            the other ranks on how that ended.
        is_common: it must be one for all ranks.
    Raises: CheckpointError: the former content stays; unless that was committed elsewhere already.
    """
    what = f"cannot write {folder}"
    partial = partial_of(folder)
    owners: list[int | None] = [None] * group.size

    def commit() -> None:
        if owners[group.rank] == group.rank:
            commit_folder(partial, folder)

    try:
        _make_folders(partial, group, what, owners, is_common=is_common)
        fill(partial, set(owners) == {0})
        group.together(what, lambda: sync_folder(partial))  # each rank what its machine has written
        group.together(what, commit)
    except CheckpointError:
        if owners[group.rank] == group.rank:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _make_folders(
    partial: Path, group: SideGroup, what: str, owners: list[int | None], *, is_common: bool
) -> None:
    """Makes an empty folder, and others of the name for ranks that do not see it.

    Args:
        owners: is filled in: the rank that has made the folder which each rank sees.
    Raises: CheckpointError: ranks that share files do not see the same one.
    """
    signs: list[Path] = []  # of this rank's folder
    while None in owners:
        owner = owners.index(None)
        owners[owner] = owner

        def make(owner: int = owner) -> str:
            if group.rank != owner:
                return ""
            remove(partial)
            partial.mkdir(parents=True)
            sign = f".{secrets.token_hex(8)}"
            (partial / sign).touch()
            signs.append(partial / sign)
            return sign

        sign = group.together(what, make)[owner]

        def look(owner: int = owner, sign: str = sign) -> bool:
            if owners[group.rank] is not None:
                return True
            share = group.shares_files[group.rank], group.shares_files[owner]
            if not is_common and share in ((True, False), (False, True)):
                return False  # a network file system would remember that nothing was there
            if (partial / sign).exists():
                return True
            if is_common or all(share):
                raise FileNotFoundError(
                    f"{partial} is not seen here; it must be on a shared file system"
                )
            return False

        for rank, is_placed in enumerate(group.together(what, look)):
            if is_placed and owners[rank] is None:
                owners[rank] = owner

    def remove_signs() -> None:
        for sign in signs:
            sign.unlink()

    group.together(what, remove_signs)


def _report_failure(written: Future[None]) -> None:
    """A failure is seen even where nobody asks the future."""
    if not written.cancelled() and (error := written.exception()) is not None:
        logger.warning("%s", error)
