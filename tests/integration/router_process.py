"""The process that has a run's address, in front of servers of sessions in the test's process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO

import msgspec

from areal_sc.agents.routes import AgentsAt, RouterStart, RouterStarted, Routes
from areal_sc.system.process import heard_from

SECRET = b"s" * 32
LIMIT_S = 60.0


class RouterProcess:
    """It serves at `url`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._write(RouterStart(SECRET.hex(), "127.0.0.1", 0, True, Routes({})))
        assert process.stdout is not None
        told = heard_from(process.stdout, LIMIT_S)
        self.port = msgspec.json.decode(told, type=RouterStarted).port
        self.url = f"http://127.0.0.1:{self.port}"

    def tell(self, up: Mapping[str, AgentsAt], *coming: str) -> None:
        """Workers are elsewhere, are being started, or, where they are not named, have left."""
        self._write(Routes(dict(up), list(coming)))

    def _write(self, words: RouterStart | Routes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(words) + b"\n")
        self._process.stdin.flush()


@contextmanager
def router_process(stderr: IO[bytes] | None = None) -> Iterator[RouterProcess]:
    """The process, which knows no worker; until the block ends."""
    command = [sys.executable, "-m", "areal_sc.agents.router"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr) as process:
        try:
            yield RouterProcess(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(LIMIT_S) == 0
