"""Operations: state-changing calls of a worker. However often one is asked for, it is made once.

    consumes      operations; each is named by the policy that it begins from and what is done, so a
                  controller that was restarted, or repeats a call, names the same one
    waits for     the operations noted before it: one runs at a time
    unblocked by  their ends

An operation is noted before it runs. A repeat joins the one that runs, or gets its reply. A caller
that is cancelled does not cancel it: other ranks take part in it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar

import msgspec

from areal_sc.errors import EngineFailed, StaleCall
from areal_sc.system.waiting import cancel_all

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Kind(StrEnum):
    """What an operation does.

    update: changes the weights.
    publish: seals or writes the weights of a version, for others.
    snapshot: writes the engine's whole state to the disk.
    memory_snapshot: writes it to the memory of the node.
    export: writes a Hugging Face folder.
    load: replaces the engine's whole state.
    """

    update = "update"
    publish = "publish"
    snapshot = "snapshot"
    memory_snapshot = "memory_snapshot"
    export = "export"
    load = "load"


@dataclass(frozen=True, slots=True)
class Operation:
    """What a state-changing call does; its identity is (lineage, version, kind, which).

    Attributes:
        lineage, version: the policy that it begins from.
        which: tells operations of one kind at one policy apart.
        content: digest of what it is done with. A repeat must have the same.
    """

    lineage: int
    version: int
    kind: Kind
    which: str = ""
    content: str = field(default="", compare=False)

    def __str__(self) -> str:
        name = f"{self.kind} {self.which}".rstrip()
        return f"{name} at lineage {self.lineage}, policy version {self.version}"


def digest(content: Any) -> str:
    """A short name of something msgpack-able, the same in every process."""
    return hashlib.sha256(msgspec.msgpack.encode(content)).hexdigest()[:16]


class Operations:
    """The operations of one worker.

    Only those of the current policy version and the one before are remembered.

    Args:
        worker: its name, for messages.

    Attributes:
        lineage, version: the policy that the worker is at.
        broken: why only a new lineage is accepted, as a change failed half-way; "": it is not so.
    """

    def __init__(self, worker: str) -> None:
        self.lineage = 0
        self.version = 0
        self._worker = worker
        self._noted: dict[Operation, tuple[str, asyncio.Task[Any]]] = {}  # content and run of each
        self._turn = asyncio.Lock()
        self.broken = ""

    async def join(
        self,
        operation: Operation,
        run: Callable[[], Awaitable[T]],
        *,
        next_version: int | None = None,
        begins_lineage: bool = False,
    ) -> T:
        """Reply of the operation: of its first run, which may have ended or go on.

        Args:
            run: may be done again if it fails, unless it fails while `changing`.
            next_version: policy version once it is done; None: as before.
            begins_lineage: it replaces the whole state, and needs a lineage above the worker's.
        Raises: StaleCall: the worker is at another policy, or the operation was asked for before
            with something else. EngineFailed: an earlier change failed. What the run raises.
        """
        if operation not in self._noted:
            turn = self._in_turn(operation, run, next_version, begins_lineage)
            task = asyncio.create_task(turn, name=f"{operation} on {self._worker}")
            self._noted[operation] = operation.content, task
            task.add_done_callback(partial(self._on_end, operation))
        content, noted = self._noted[operation]
        if content != operation.content:
            raise StaleCall(
                f"{operation} on {self._worker}: it was asked for before, with something else; "
                "repeat it as it was, or publish the weights first"
            )
        return await asyncio.shield(noted)

    @property
    def noted(self) -> tuple[Operation, ...]:
        """The operations that are remembered: they are done, or go on, or wait."""
        return tuple(self._noted)

    @contextmanager
    def changing(self, operation: Operation) -> Iterator[None]:
        """What fails within leaves the state in between: only a new lineage is accepted then."""
        try:
            yield
        except BaseException as error:
            self.broken = (
                f"{operation} failed on {self._worker}, and has left the engine in between "
                f"two versions: {error!r}; load a snapshot, or start again"
            )
            raise

    def forget(self, operation: Operation) -> None:
        """The next call of it is not a repeat."""
        self._noted.pop(operation, None)

    async def close(self) -> None:
        """Cancels what waits or runs."""
        await cancel_all(task for _, task in self._noted.values())

    async def _in_turn(
        self,
        operation: Operation,
        run: Callable[[], Awaitable[T]],
        next_version: int | None,
        begins_lineage: bool,
    ) -> T:
        async with self._turn:
            self._check(operation, begins_lineage)
            reply = await run()
            if begins_lineage:
                self.lineage, self.broken = operation.lineage, ""
            if next_version is not None:
                self.version = next_version
            for earlier, (_, task) in list(self._noted.items()):
                is_old = (earlier.lineage, earlier.version) < (self.lineage, self.version - 1)
                if is_old and task.done():
                    self.forget(earlier)
            return reply

    def _check(self, operation: Operation, begins_lineage: bool) -> None:
        if begins_lineage:
            is_stale = operation.lineage <= self.lineage
        else:
            is_stale = (operation.lineage, operation.version) != (self.lineage, self.version)
        if is_stale:
            raise StaleCall(
                f"{operation}: {self._worker} is at lineage {self.lineage}, policy version "
                f"{self.version}"
            )
        if self.broken and not begins_lineage:
            raise EngineFailed(self.broken)

    def _on_end(self, operation: Operation, task: asyncio.Task[Any]) -> None:
        """What failed is not remembered: see `join` for what a repeat gets."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.warning("operation=%s failed: %r", operation, error)
        is_noted = operation in self._noted and self._noted[operation][1] is task
        if is_noted and (task.cancelled() or error is not None):
            self.forget(operation)
