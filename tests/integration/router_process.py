"""The process that has a run's address, in front of servers of sessions in the test's process."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from areal_sc.agents.routes import AgentsAt, RouterStart, RouterStarted, Routes
from areal_sc.system.process import SAYS

SECRET = b"s" * 32
LIMIT_S = 60.0


@dataclass
class RouterProcess:
    """It serves at `127.0.0.1:port`."""

    process: Process
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def tell(self, up: Mapping[str, AgentsAt], lost: Mapping[str, str]) -> None:
        """Workers are elsewhere, or lost."""
        await _write(self.process, Routes(dict(up), dict(lost)))


async def _write(process: Process, words: RouterStart | Routes) -> None:
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(words) + b"\n")
    await process.stdin.drain()


async def told_by(process: Process) -> RouterStarted:
    assert process.stdout is not None
    async with asyncio.timeout(LIMIT_S):
        while not (line := await process.stdout.readline()).startswith(SAYS):
            assert line, "the process has ended"
    return msgspec.json.decode(line.removeprefix(SAYS), type=RouterStarted)


@asynccontextmanager
async def router_for(up: Mapping[str, AgentsAt], port: int = 0) -> AsyncIterator[RouterProcess]:
    """The process, until the block ends."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "areal_sc.agents.router"), stdin=PIPE, stdout=PIPE
    )
    try:
        routes = Routes(dict(up), {})
        await _write(process, RouterStart(SECRET.hex(), "127.0.0.1", port, not port, routes))
        started = await told_by(process)
        assert not started.problem
        yield RouterProcess(process, started.port)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(LIMIT_S):
            assert await process.wait() == 0
