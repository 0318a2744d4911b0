"""The process beside the script that has the script's files: nodes read them, and bring some back.

consumes     calls of workers, and of agents in the name of the workers that they start; from its
             standard input, which passes are void, a line each time: workers that have them have
             been started again
waits for    that input, which the script holds open
unblocked by the end of the script

A file that comes back is written beside its place, and gets its name when its hash is right. What
folder it belongs to, and whether that is whole, is the script's to say: see `names`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Final

from msgspec import json

from areal_sc.errors import CheckpointError, StaleCall, TransportError
from areal_sc.log import setup_logging
from areal_sc.run.named_paths import find_named_path
from areal_sc.run.run_folder import RunFolder
from areal_sc.shipping import calls, names
from areal_sc.shipping.trees import Trees
from areal_sc.shipping.worker_side import ReceivedRecords
from areal_sc.system.durable import os_errors_as
from areal_sc.system.process import (
    allow_open_files,
    leave_signals_to_script,
    name_process,
    tell_starter,
)
from areal_sc.transport.rpc.method import Served
from areal_sc.transport.rpc.server import RpcServer
from areal_sc.transport.security.curve import CurveServer
from areal_sc.transport.security.keys import RunKeys
from areal_sc.transport.security.passes import KnownCallers

_MAX_LINE_BYTES: Final = 16 << 20
_OPEN: int = os.O_CLOEXEC | os.O_NOFOLLOW


class FileServer:
    """What the process serves. Everything that touches the disk runs in threads."""

    def __init__(self, folder: RunFolder, callers: KnownCallers) -> None:
        self._folder = folder
        self._callers = callers
        self._records = ReceivedRecords(folder.records, callers.name_of)
        self._trees = Trees()
        self._listed: dict[str, calls.Listing] = {}
        self._one_lists: dict[str, asyncio.Lock] = {}

    def methods(self) -> list[Served]:
        in_thread = asyncio.to_thread
        return [
            calls.LIST_PATH.served_by(self.list_path),
            calls.LIST_RUN.served_by(self.list_run),
            calls.READ_PIECE.served_by(lambda it: in_thread(self._read, it)),
            calls.WRITE_PIECE.served_to(lambda it, key: in_thread(self._write, it, key)),
            calls.END_FILE.served_to(lambda it, key: in_thread(self._end, it, key)),
            calls.SEND_RECORDS.served_to(lambda it, key: in_thread(self._records.write, it, key)),
        ]

    async def list_path(self, path: str) -> calls.Listing:
        """Raises: ConfigError: see `Trees.list`."""
        named = await asyncio.to_thread(find_named_path, self._folder.sources, path)
        if named is None:
            return calls.Listing([], is_missing=True)
        async with self._one_lists.setdefault(path, asyncio.Lock()):  # nodes come all at once
            listing = await asyncio.to_thread(self._trees.list, named)
            self._listed[path] = listing
            return listing

    async def list_run(self, name: str) -> calls.Listing:
        """Raises: NotPermitted."""
        return await asyncio.to_thread(self._list_run, names.listable(self._folder.path, name))

    def _list_run(self, folder: Path) -> calls.Listing:
        if not folder.is_dir():
            return calls.Listing([], is_missing=True)
        files = [it for it in folder.iterdir() if it.is_file() and not it.is_symlink()]
        return calls.Listing([calls.FileFact(it.name, it.stat().st_size) for it in files])

    def _read(self, piece: calls.FilePiece) -> bytes:
        """Raises: NotPermitted. TransportError: it cannot be read."""
        path, flags = self._place_of(piece)
        num_bytes = piece.num_bytes
        if not 0 <= num_bytes <= calls.PIECE_BYTES or piece.offset < 0:
            raise TransportError(f"a piece has 0 to {calls.PIECE_BYTES} bytes, not {num_bytes}")
        with os_errors_as(TransportError, f"{path} cannot be read"):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
            try:
                return os.pread(fd, num_bytes, piece.offset)
            finally:
                os.close(fd)

    def _place_of(self, piece: calls.FilePiece) -> tuple[Path, int]:
        if not piece.path:
            return names.readable(self._folder.path, piece.name), os.O_NOFOLLOW
        listing = self._listed.get(piece.path)
        known = () if listing is None else (it.name for it in listing.files)
        if listing is None or piece.name not in known:
            raise StaleCall(f"{piece.name!r} of {piece.path!r} was not listed")
        # links are followed: a model hub's files are links
        return Path(piece.path) if listing.is_file else Path(piece.path, piece.name), 0

    def _write(self, piece: calls.WrittenPiece, key: str) -> None:
        """Raises: NotPermitted. CheckpointError: it cannot be written."""
        partial = self._partial_of(piece.name, piece.token, key)
        if piece.offset < 0:
            raise TransportError(f"a piece begins at 0 or later, not at {piece.offset}")
        with os_errors_as(CheckpointError, f"cannot write {partial}"):
            # a snapshot that the script has given up is not made again
            is_given_up = self._folder.checkpoints in partial.parent.parents
            partial.parent.mkdir(exist_ok=True, parents=not is_given_up)
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | _OPEN, 0o666)
            try:
                written = os.pwrite(fd, piece.content, piece.offset)
                if written < len(piece.content):
                    raise OSError(0, "the disk took a part of it")
            finally:
                os.close(fd)

    def _end(self, file: calls.WrittenFile, key: str) -> None:
        """Raises: NotPermitted. CheckpointError: it is not what was sent."""
        partial = self._partial_of(file.name, file.token, key)
        target = self._folder.path / file.name
        with os_errors_as(CheckpointError, f"cannot write {target}"):
            with partial.open("rb") as opened:
                num_bytes = os.fstat(opened.fileno()).st_size
                os.fsync(opened.fileno())
            if num_bytes != file.num_bytes:
                partial.unlink()
                raise CheckpointError(f"{target}: {num_bytes} of {file.num_bytes} bytes have come")
            partial.replace(target)

    def _partial_of(self, name: str, token: str, key: str) -> Path:
        target = names.writable(self._folder.path, name, self._callers.known.get(key))
        if not names.TOKEN.fullmatch(token):
            raise TransportError("the token of a file that is written has 8 to 64 digits")
        return target.with_name(f".{target.name}.{token}.partial")


async def _serve(folder: RunFolder, interface: str, port: str) -> None:
    keys = RunKeys.read(folder.keys_path)
    callers = KnownCallers(keys.controller.public, keys.authority)
    told = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(told), sys.stdin
    )

    async def is_told() -> bool:
        """False: the script has ended, in the midst of a line maybe."""
        line = await told.readline()
        is_whole = line.endswith(b"\n")
        if is_whole:
            callers.note_replaced(json.decode(line, type=dict[str, int]))
        return is_whole

    if not await is_told():
        return
    server = RpcServer(
        FileServer(folder, callers).methods(),
        node_id="files",
        incarnation="files",
        bind=f"{interface}:{port}",
        security=CurveServer(keys.workers, callers, "files"),
    )
    address = await server.start()
    tell_starter(address.encode())
    try:
        while await is_told():
            pass
    finally:
        await server.close()


def main() -> None:
    """The process: `server.py RUN_DIR INTERFACE PORT`; its address is its only line of output.

    Port 0 is any free one.
    """
    run_dir, interface, port = sys.argv[1:]
    leave_signals_to_script()
    setup_logging("files")
    name_process("files")
    allow_open_files()
    asyncio.run(_serve(RunFolder(run_dir), interface, port))


if __name__ == "__main__":
    main()
