"""The files of a worker whose node does not see the run folder. The agent's side is `node_side`.

Records of such a worker come home like this:

    recorder's thread ─► RecordSender ─ SEND_RECORDS ─► ReceivedRecords ─► FilesOfProcess
    of the worker        event loop of the worker       process beside the script

consumes     blocks of a recorder, one after the other
waits for    the answer to each piece of a block, for as long as the worker lives
unblocked by the process beside the script, or another one in its place. Meanwhile the recorder's
             queue fills, and what finds no room there is lost; rows wait for nothing of this
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from areal_sc.config.lora_settings import ADAPTER_CONFIG
from areal_sc.config.schema import SchedulerConfig
from areal_sc.engines.training.snapshot_index import INDEX_NAME
from areal_sc.errors import (
    CheckpointError,
    ConfigError,
    ModelError,
    NotPermitted,
    PeerLost,
    RpcTimeout,
    RunFolderError,
    ServerBusy,
    StaleCall,
    TransportError,
    WaitTimeout,
    WorkflowError,
)
from areal_sc.nodes.joining import read_address
from areal_sc.nodes.node_folder import WorkerFiles
from areal_sc.nodes.spec import Shipped
from areal_sc.records.record_files import FilesOfProcess, RecordStore, Series
from areal_sc.shipping.calls import PIECE_BYTES, SEND_RECORDS, SentRecords
from areal_sc.shipping.client import RETRY_S, ScriptFiles, until_there
from areal_sc.shipping.node_side import NodeCache
from areal_sc.sizing.adapter_folder import ADAPTER_WEIGHTS
from areal_sc.sources.reference_paths import code_folders, data_paths, script_files
from areal_sc.sources.row_file import GROWING
from areal_sc.system.durable import os_errors_as, remove, write_atomic
from areal_sc.system.waiting import all_of
from areal_sc.transport.rpc.codec import ANY_INCARNATION
from areal_sc.transport.rpc.transport import Connection, Transport

logger = logging.getLogger(__name__)


class ShippedFiles(WorkerFiles):
    """Brings files to the node, and back.

    Args:
        shipped: what was brought already.
        config: of the run, with the run folder here.
        transport: of the worker.
    """

    are_shared = False

    def __init__(self, shipped: Shipped, config: SchedulerConfig, transport: Transport) -> None:
        super().__init__(config.run_dir)
        self._script_dir = shipped.run_dir
        self._places: dict[str, str] = {**shipped.places, shipped.run_dir: config.run_dir}
        self._limit_s = config.shipping_timeout_s
        self._cache = NodeCache(config.node_folder)
        self._transport = transport
        self._growing: dict[int, list[str]] = {}  # names of files, by the number of their source
        self._one_brings: dict[int, asyncio.Lock] = {}
        self._one_brings_adapter: dict[str, asyncio.Lock] = {}

    def place(self, path: str) -> str:
        for named in sorted(self._places, key=len, reverse=True):
            if path == named or path.startswith(f"{named.rstrip('/')}/"):
                return self._places[named] + path.removeprefix(named.rstrip("/"))
        return path

    def script_path(self, path: Path) -> str:
        return f"{self._script_dir}/{path.relative_to(self._here.path)}"

    async def bring_source(self, number: int) -> None:
        try:
            async with self._one_brings.setdefault(number, asyncio.Lock()):
                if self._growing.get(number) != []:
                    what = f"source {number}"
                    await until_there(what, lambda: self._bring_source(number), self._limit_s)
        except (TransportError, ConfigError, WaitTimeout, OSError) as error:
            raise WorkflowError(
                f"source {number} cannot be brought to this node: {error}"
            ) from error

    async def _bring_source(self, number: int) -> None:
        async with self._opened() as files:
            wanted = self._growing.get(number) or await self._bring_new(files, number)
            await all_of(self._bring_rest(files, it) for it in wanted)
        self._growing[number] = [it for it in wanted if Path(it).name.startswith(GROWING)]

    async def bring_adapter(self, name: str) -> Path:
        folder = await super().bring_adapter(name)
        try:
            async with self._one_brings_adapter.setdefault(name, asyncio.Lock()):
                if not (folder / ADAPTER_CONFIG).exists():
                    what = f"adapter {name}"
                    await until_there(
                        what, lambda: self._bring_adapter(name, folder), self._limit_s
                    )
        except (TransportError, WaitTimeout, OSError) as error:
            raise ModelError(f"adapter {name} cannot be brought to this node: {error}") from error
        return folder

    async def _bring_adapter(self, name: str, folder: Path) -> None:
        """Its settings come last: with them it is whole."""
        async with self._opened() as files:
            for file in (ADAPTER_WEIGHTS, ADAPTER_CONFIG):
                content = await files.read_all("", f"{name}/{file}")
                await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
                await asyncio.to_thread(write_atomic, folder / file, content)

    async def bring_snapshot(self, folder: Path) -> None:
        name = folder.relative_to(self._here.path).as_posix()
        digest = hashlib.sha256(str(folder).encode()).hexdigest()

        async def bring() -> None:
            async with (
                self._cache.bringing(digest, name, self._limit_s),
                self._opened() as files,
            ):
                await self._bring_snapshot(files, folder, name)

        try:
            await until_there(name, bring, self._limit_s)
        except WaitTimeout:
            raise  # an OSError, too; that it can be read is as likely as not
        except TransportError as error:
            raise CheckpointError(f"{name} cannot be brought to this node: {error}") from error
        except OSError as error:
            raise ConfigError(
                f"{name} cannot be written to {folder} of node {socket.gethostname()}: "
                f"{error.strerror}; set scheduler.node_folder to a disk of the nodes with room"
            ) from error

    async def _bring_snapshot(self, files: ScriptFiles, folder: Path, name: str) -> None:
        """All of it, unless another rank of this node has brought it: the index has checksums."""
        index, listing = folder / INDEX_NAME, await files.list_run(name)
        if INDEX_NAME not in {fact.name for fact in listing.files}:
            return  # whoever loads it says so
        content = await files.read_all("", f"{name}/{INDEX_NAME}")
        if index.exists() and index.read_bytes() == content:
            return
        await asyncio.to_thread(self._make_room_for, folder)
        for fact in listing.files:
            if fact.name != INDEX_NAME:
                below = replace(fact, name=f"{name}/{fact.name}")
                await files.read_file("", below, folder / fact.name)
        write_atomic(index, content)

    def _make_room_for(self, snapshot: Path) -> None:
        """One snapshot at a time is on this node, of each role."""
        for earlier in self._here.snapshots():
            remove(earlier / snapshot.name)
            with suppress(OSError):
                earlier.rmdir()  # unless there is another role's
        snapshot.mkdir(parents=True)

    async def bring_back(self, folder: Path, names: Sequence[str] | None) -> None:
        below = folder.relative_to(self._here.path).as_posix()
        found: Sequence[str] = names or ()
        try:
            found = sorted(os.listdir(folder)) if names is None else names
            async with self._opened() as files:
                for name in found:
                    await files.write_file(folder / name, f"{below}/{name}")
        except (TransportError, OSError) as error:
            raise CheckpointError(f"{below} cannot be brought back: {error}") from error
        finally:  # what has not come back is written again
            with suppress(OSError):
                for name in found:
                    (folder / name).unlink()
                for empty in (folder, folder.parent):
                    if empty == folder or empty.suffix == ".partial":
                        empty.rmdir()  # unless others still bring theirs

    def record_store(self, process: str, max_bytes: int) -> RecordStore:
        return RecordSender(
            self.loop,
            lambda: self._transport.connect(self._address, "files", ANY_INCARNATION),
            max_bytes,
        )

    def _opened(self) -> Any:
        return ScriptFiles.opened(self._transport, self._address)

    @property
    def _address(self) -> str:
        return read_address(self._here.files_path)

    async def _bring_new(self, files: ScriptFiles, number: int) -> list[str]:
        """The reference, and what it names; files of the run folder are left to `_bring_rest`."""
        name = f"sources/{int(number)}.json"
        wire = await files.read_all("", name)
        write_atomic(self._here.path / name, wire)
        reference, own = json.loads(wire), list[str]()
        sources = f"{self._script_dir}/sources/"
        named = data_paths(reference) | code_folders(reference)
        for path in named | script_files(reference):
            if path.startswith(sources):
                own.append(f"sources/{path.removeprefix(sources)}")
            elif path in named and path not in self._places:
                place = await self._cache.bring(files, path, self._limit_s)
                if place is not None:
                    self._places[path] = str(place)
        return own

    async def _bring_rest(self, files: ScriptFiles, name: str) -> None:
        """What a file of the run folder has got since; workers of a node write the same bytes.

        Of a growing one these are whole lines: the one that is being written becomes another one,
        if the script is killed.
        """
        target = self._here.path / name
        target.touch()
        with target.open("r+b") as file:
            offset = file.seek(0, 2)
            more = await files.read_all("", name, offset)
            if target.name.startswith(GROWING):
                more = more[: more.rfind(b"\n") + 1]
            file.seek(offset)
            file.write(more)


ANSWER_LIMIT_S: Final = 10.0
"""Then a piece comes again: a process that has just begun reads no long message of a caller that it
does not know."""
_COMES_AGAIN: Final = (PeerLost, RpcTimeout, ServerBusy)


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
        self.max_bytes = max_bytes
        self._num_sent = 0

    def append(self, series: Series, content: bytes) -> None:
        """Blocks until it is there. Raises: ArealError: it is refused, or cannot be written."""
        while True:
            with suppress(StaleCall):  # the process that had the beginning is gone
                for at in range(0, len(content), PIECE_BYTES):
                    self._send(series, content[at : at + PIECE_BYTES], 0 if at else len(content))
                return

    def close(self) -> None:
        """The connection ends with the worker's transport."""

    def _send(self, series: Series, content: bytes, block_bytes: int = 0) -> None:
        self._num_sent += 1
        sent = SentRecords(self._num_sent, series, content, block_bytes, self.max_bytes)
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
            if self._files is None and not sent.block_bytes:
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
