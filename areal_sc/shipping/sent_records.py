"""Records of workers on nodes that do not see the run folder: how they come home, and who writes
them there.

    recorder's thread ─► RecordSender ─ SEND_RECORDS ─► ReceivedRecords ─► FilesOfProcess
    of the worker        event loop of the worker       process beside the script

consumes     blocks of a recorder, one after the other
waits for    the answer to each piece of a block, for as long as the worker lives
unblocked by the process beside the script, or another one in its place. Meanwhile the recorder's
             queue fills, and what finds no room there is lost; rows wait for nothing of this
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from areal_sc.errors import (
    NotPermitted,
    PeerLost,
    RpcTimeout,
    RunFolderError,
    ServerBusy,
    StaleCall,
)
from areal_sc.records.record_files import FilesOfProcess, Series
from areal_sc.shipping.calls import PIECE_BYTES, SEND_RECORDS, SentRecords
from areal_sc.shipping.client import RETRY_S
from areal_sc.system.os_errors import os_errors_as
from areal_sc.transport.rpc.transport import Connection

ANSWER_LIMIT_S: Final = 10.0
"""Then a piece comes again: a process that has just begun reads no long message of a caller that it
does not know."""
_COMES_AGAIN: Final = (PeerLost, RpcTimeout, ServerBusy)

logger = logging.getLogger(__name__)


class RecordSender:
    """Sends the records of a worker. A `RecordStore`; nothing is sent before the loop is there.

    Args:
        loop: of the worker.
        connect: to where the process beside the script is now.
        max_bytes: of the files that they become.
    """

    def __init__(
        self,
        loop: Future[asyncio.AbstractEventLoop],
        connect: Callable[[], Connection],
        max_bytes: int,
    ) -> None:
        self._loop = loop
        self._connect = connect
        self._connection: Connection | None = None
        self._max_bytes = max_bytes
        self._num_sent = 0
        self._has_open = False

    def append(self, series: Series, content: bytes) -> None:
        """Blocks until it is there. Raises: ArealError: it is refused, or cannot be written."""
        while True:
            with suppress(StaleCall):  # the process that had the beginning is gone
                for at in range(0, len(content), PIECE_BYTES):
                    self._send(series, content[at : at + PIECE_BYTES], 0 if at else len(content))
                return

    def replace_open(self, content: bytes) -> None:
        """Raises: the errors of `append`."""
        if len(content) <= PIECE_BYTES:
            self._send(Series.open, content, int(self._has_open))
            self._has_open = bool(content)

    def close(self) -> None:
        """The connection ends with the worker's transport."""

    def _send(self, series: Series, content: bytes, block_bytes: int = 0) -> None:
        self._num_sent += 1
        sent = SentRecords(self._num_sent, series, content, block_bytes, self._max_bytes)
        asyncio.run_coroutine_threadsafe(self._until_there(sent), self._loop.result()).result()

    async def _until_there(self, sent: SentRecords) -> None:
        while True:
            try:
                if self._connection is None:
                    self._connection = self._connect()
                    # a caller that is not known yet may say little
                    await self._call(replace(sent, number=0, content=b""))
                return await self._call(sent)
            except _COMES_AGAIN as error:
                logger.debug("records wait: %s", error)
                if sent.series is Series.open:  # it may be there, and its answer be lost
                    sent = replace(sent, block_bytes=1)
                if self._connection is not None:
                    await self._connection.close()
                    self._connection = None
                await asyncio.sleep(RETRY_S)

    async def _call(self, sent: SentRecords) -> None:
        assert self._connection is not None
        await self._connection.call(SEND_RECORDS, sent, timeout_s=ANSWER_LIMIT_S)


class _Writer:
    """Writes what one life of a worker sends.

    Args:
        key: public key of that life.
    """

    def __init__(self, key: str, folder: Path, name: str) -> None:
        self.key = key
        self._folder = folder
        self._name = name
        self._files: FilesOfProcess | None = None
        self._newest = 0
        self._one_writes = threading.Lock()

    def write(self, sent: SentRecords) -> None:
        with self._one_writes:
            if sent.number <= self._newest:
                return  # it comes again, as its answer was lost
            files = self._files or FilesOfProcess(self._folder, self._name, sent.max_bytes)
            if sent.series is Series.open:
                files.replace_open(sent.content, is_there=bool(sent.block_bytes))
            elif self._files is None and not sent.block_bytes:
                raise StaleCall("the beginning of this block went to another process")
            elif self._files is not None or not self._came_before(files, sent):
                files.append(sent.series, sent.content, sent.block_bytes)
            self._files, self._newest = files, sent.number

    def _came_before(self, files: FilesOfProcess, sent: SentRecords) -> bool:
        """Whether a process before this one has written a whole block, and has not answered."""
        is_whole = sent.block_bytes == len(sent.content)
        return is_whole and files.ends_with(sent.series, sent.content)

    def close(self) -> None:
        with self._one_writes:
            if self._files is not None:
                self._files.close()


class ReceivedRecords:
    """Writes the records of all such workers, as each would do at home.

    Args:
        folder: `records/` of the run.
        name_of: gives the name of the worker that has a public key.
    """

    def __init__(self, folder: Path, name_of: Callable[[str], str]) -> None:
        self._folder = folder
        self._name_of = name_of
        self._writers: dict[str, _Writer] = {}
        self._one_begins = threading.Lock()

    def write(self, sent: SentRecords, key: str) -> None:
        """Blocks.

        Raises: NotPermitted: the piece is too large. RunFolderError: it cannot be written.
        """
        if len(sent.content) > PIECE_BYTES:
            raise NotPermitted(f"records come in pieces of {PIECE_BYTES} bytes at most")
        with os_errors_as(RunFolderError, f"records cannot be written to {self._folder}"):
            self._writer_of(key).write(sent)

    def _writer_of(self, key: str) -> _Writer:
        name = self._name_of(key)
        with self._one_begins:
            writer = self._writers.get(name)
            if writer is None or writer.key != key:
                if writer is not None:
                    writer.close()
                writer = self._writers[name] = _Writer(key, self._folder, name)
        return writer
