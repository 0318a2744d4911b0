"""A TCP proxy that a test can cut: what a failing network does to living processes."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class CuttingProxy:
    """Stands before one server.

    Attributes:
        address: of the proxy, as a ZMQ endpoint.
        num_accepted: connections so far.
        passes_replies: False: what the server sends goes nowhere.
    """

    def __init__(self) -> None:
        self.address = ""
        self.num_accepted = 0
        self.passes_replies = True
        self._target = ("", 0)
        self._port = 0
        self._server: asyncio.Server | None = None
        self._port_keeper: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def listen(self) -> None:
        """Takes connections, at the same address each time."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        self._keep_port(False)
        self.address = f"tcp://127.0.0.1:{self._port}"

    def stand_before(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))

    def cut(self) -> None:
        """Resets all connections; new ones are taken."""
        for writer in list(self._writers):
            raw = writer.get_extra_info("socket")
            if raw is not None:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def refuse(self) -> None:
        """Takes no connections until it listens again; those that there are go on."""
        assert self._server is not None
        self._server.close()
        self._keep_port(True)

    async def close(self) -> None:
        await self.refuse()
        self._keep_port(False)
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _keep_port(self, is_kept: bool) -> None:
        """While nobody listens at it, no other process may get it."""
        if self._port_keeper is not None:
            self._port_keeper.close()
            self._port_keeper = None
        if is_kept:
            self._port_keeper = socket.socket()
            self._port_keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._port_keeper.bind(("127.0.0.1", self._port))

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        self._writers.add(writer)
        task = asyncio.create_task(self._pass_on(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Both ways, until either side ends, or nobody is there to connect to."""
        try:
            with suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection(*self._target)
                self._writers.add(far_writer)
                await asyncio.gather(
                    self._pump(reader, far_writer, is_reply=False),
                    self._pump(far_reader, writer, is_reply=True),
                )
        finally:
            self._end(writer)

    async def _pump(
        self, source: asyncio.StreamReader, to: asyncio.StreamWriter, *, is_reply: bool
    ) -> None:
        with suppress(OSError):
            while received := await source.read(1 << 16):
                if self.passes_replies or not is_reply:
                    to.write(received)
                    await to.drain()
        self._end(to)

    def _end(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        writer.transport.abort()


@asynccontextmanager
async def cutting_proxy(address: str = "") -> AsyncIterator[CuttingProxy]:
    """A proxy that listens; before `address`, or where `stand_before` says."""
    proxy = CuttingProxy()
    await proxy.listen()
    if address:
        proxy.stand_before(address)
    try:
        yield proxy
    finally:
        await proxy.close()
