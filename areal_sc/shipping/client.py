"""A node's side: files of the script's machine are read, and others brought back, piece by piece.

waits for    each piece, `PIECE_LIMIT_S` at most
unblocked by the process beside the script; when that is gone, the next piece fails
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

from areal_sc.errors import PeerLost, RpcTimeout, StaleCall, TransportError, WaitTimeout
from areal_sc.ids import random_id
from areal_sc.shipping import calls
from areal_sc.shipping.names import checked_name
from areal_sc.system.waiting import all_of
from areal_sc.transport.rpc.codec import ANY_INCARNATION
from areal_sc.transport.rpc.method import Method
from areal_sc.transport.rpc.transport import Connection, Transport

NUM_AT_ONCE: Final = 8
"""Pieces on their way: enough for a network with some delay."""

RETRY_S: Final = 0.5

A = TypeVar("A")
R = TypeVar("R")
T = TypeVar("T")

logger = logging.getLogger(__name__)


async def until_there(what: str, bring: Callable[[], Awaitable[T]], limit_s: float) -> T:
    """What `bring` returns; again, while the process beside the script does not answer.

    It may have died, with the script or without it: another one then takes its place, maybe
    elsewhere, and knows nothing of what was listed.

    Args:
        bring: opens a connection of its own, to where the process is then.
        limit_s: after which files do not come any more.
    Raises: WaitTimeout: it is not here by then. Else what `bring` raises.
    """
    last: TransportError | None = None
    try:
        async with asyncio.timeout(limit_s) as limit:
            while True:
                try:
                    return await bring()
                except (PeerLost, RpcTimeout, StaleCall) as error:
                    last = error
                    logger.warning("%s is asked for again: %s", what, error)
                    await asyncio.sleep(RETRY_S)
    except TimeoutError:
        if not limit.expired():
            raise  # that of `bring` says more
        raise WaitTimeout(
            f"{what} did not come to node {socket.gethostname()} within "
            f"{limit_s:g} s{f': {last}' if last else ''}"
        ) from last


class ScriptFiles:
    """The files, over one connection.

    Args:
        connection: to the process beside the script.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @classmethod
    @asynccontextmanager
    async def opened(cls, transport: Transport, address: str) -> AsyncIterator[ScriptFiles]:
        """Args: address: of the process beside the script."""
        connection = transport.connect(address, "files", ANY_INCARNATION)
        try:
            yield cls(connection)
        finally:
            await connection.close()

    async def _call(self, method: Method[A, R], args: A, limit_s: float = calls.PIECE_LIMIT_S) -> R:
        return await self._connection.call(method, args, timeout_s=limit_s)

    async def list_path(self, path: str) -> calls.Listing:
        """Raises: NotPermitted, ConfigError: nodes do not get it. TransportError."""
        return _checked(await self._call(calls.LIST_PATH, path, calls.LISTING_LIMIT_S))

    async def list_run(self, name: str) -> calls.Listing:
        """Raises: TransportError."""
        return _checked(await self._call(calls.LIST_RUN, name))

    async def read_all(self, path: str, name: str, offset: int = 0) -> bytes:
        """A small file, or what has been written to it since. Raises: TransportError."""
        parts = []
        while True:
            piece = calls.FilePiece(path, name, offset, calls.PIECE_BYTES)
            parts.append(await self._call(calls.READ_PIECE, piece))
            offset += len(parts[-1])
            if len(parts[-1]) < calls.PIECE_BYTES:
                return b"".join(parts)

    async def read_file(self, path: str, fact: calls.FileFact, target: Path) -> None:
        """Makes a file that holds what was listed.

        Raises: TransportError: it cannot be had, or is another one by now. OSError.
        """

        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(target, flags, 0o600)
        try:

            async def bring(offset: int) -> None:
                size = min(calls.PIECE_BYTES, fact.num_bytes - offset)
                piece = calls.FilePiece(path, fact.name, offset, size)
                got = await self._call(calls.READ_PIECE, piece)
                if len(got) != size:
                    raise _changed(path, fact)
                await asyncio.to_thread(os.pwrite, fd, got, offset)

            await _some_at_once(bring, fact.num_bytes)
            if fact.sha256 and await asyncio.to_thread(_digest, fd) != fact.sha256:
                raise _changed(path, fact)
        finally:
            os.close(fd)

    async def write_file(self, source: Path, name: str) -> None:
        """Brings a file back to the run folder.

        Raises: NotPermitted, TransportError, CheckpointError: it cannot be written there. OSError.
        """
        fd, token = os.open(source, os.O_RDONLY | os.O_CLOEXEC), random_id()
        try:
            num_bytes = os.fstat(fd).st_size

            async def write(offset: int) -> None:
                content = await asyncio.to_thread(os.pread, fd, calls.PIECE_BYTES, offset)
                piece = calls.WrittenPiece(name, token, offset, content)
                await self._call(calls.WRITE_PIECE, piece)

            # a caller that is not known yet may say little
            await self._call(calls.WRITE_PIECE, calls.WrittenPiece(name, token, 0, b""))
            await _some_at_once(write, num_bytes)
            end = calls.WrittenFile(name, token, num_bytes)
            await self._call(calls.END_FILE, end, calls.LISTING_LIMIT_S)
        finally:
            os.close(fd)


def _checked(listing: calls.Listing) -> calls.Listing:
    """Raises: NotPermitted: a name of it is none."""
    for fact in listing.files:
        checked_name(fact.name)
    return listing


def _changed(path: str, fact: calls.FileFact) -> TransportError:
    where = f"{fact.name} of {path}" if path else fact.name
    return TransportError(f"{where} was changed while it was brought to this node; try again")


def _digest(fd: int) -> str:
    with open(os.dup(fd), "rb") as file:
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


async def _some_at_once(work: Callable[[int], Awaitable[None]], num_bytes: int) -> None:
    """Calls with the offset of each piece; the first error ends it."""
    offsets = iter(range(0, num_bytes, calls.PIECE_BYTES))

    async def next_ones() -> None:
        for offset in offsets:
            await work(offset)

    num_pieces = -(-num_bytes // calls.PIECE_BYTES)
    await all_of(next_ones() for _ in range(min(NUM_AT_ONCE, num_pieces)))
