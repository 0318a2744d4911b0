"""A server of RPC in another process, and what it costs the machine."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from integration.rpc_methods import named

from areal_sc.transport.rpc.client import RpcClient
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.transport.security.curve import CurveClient
from areal_sc.transport.security.keys import RunKeys

PROGRAM = Path(__file__).with_name("rpc_program.py")


@dataclass
class ServerProcess:
    """`rpc_program.py serve`, and the keys that it admits."""

    process: subprocess.Popen[str]
    address: str
    keys: RunKeys
    keys_path: Path
    log_path: Path

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def memory_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    @property
    def cpu_s(self) -> float:
        """Of all its threads."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / 100

    @property
    def num_open_files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    @property
    def num_connections(self) -> int:
        """Established ones at its port, as the kernel sees them."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return sum(row[1].endswith(f":{self.port:04X}") and row[3] == "01" for row in rows)

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def member(self) -> CurveClient:
        return CurveClient.of_controller(self.keys)

    def connect(self, transport: ZmqTransport) -> RpcClient:
        return transport.connect(self.address, "train/2", "life1")

    def is_idle(self, for_s: float = 0.5) -> bool:
        """Whether it computes next to nothing for a while."""
        before = self.cpu_s
        time.sleep(for_s)
        return self.cpu_s - before < 0.1 * for_s


@contextmanager
def server_process(folder: Path, keys: RunKeys | None = None) -> Iterator[ServerProcess]:
    """A server that lives at most as long as the block; its log and its keys lie in `folder`."""
    keys = keys or RunKeys.create()
    keys_path, log_path = folder / "keys", folder / f"server-{uuid4().hex}.log"
    keys.write(keys_path)
    with (
        log_path.open("w") as log,
        subprocess.Popen(
            [sys.executable, str(PROGRAM), "serve", str(keys_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},  # what it frees is given back
        ) as process,
    ):
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            assert address, log_path.read_text()
            yield ServerProcess(process, address, keys, keys_path, log_path)
        finally:
            process.kill()


async def held_bytes(client: RpcClient) -> int:
    """Memory that the server holds once the allocator gave back all that is free.

    A small piece at the end of the heap keeps tens of megabytes of free memory resident below it.
    """
    answer = await client.call(named("held_bytes"), {}, timeout_s=30)
    assert isinstance(answer, int)
    return answer


async def counters(client: RpcClient) -> dict[str, Any]:
    answer = await client.call(named("counters"), {}, timeout_s=30)
    assert isinstance(answer, dict)
    return answer
