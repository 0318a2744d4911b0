"""One end of RPC in a process of its own.

    python rpc_program.py serve KEYS        prints its address; serves until its input closes
    python rpc_program.py call KEYS ADDRESS calls `blob` all the time; prints a line at first

KEYS is the key file of a run, or "-": then nobody is kept out.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import resource
import sys
from pathlib import Path
from typing import Any

from areal_sc.transport.rpc.method import Method
from areal_sc.transport.rpc.server import RpcServer
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.transport.security.curve import CurveClient, CurveServer
from areal_sc.transport.security.keys import RunKeys
from areal_sc.transport.security.passes import Caller, Passes
from areal_sc.transport.sockets import zmq_socket

LIFE = "life1"


def named(name: str) -> Method[Any, Any]:
    """A method of any arguments and any reply."""
    return Method(name, Any, Any)


def client_of(keys: str) -> CurveClient | None:
    return None if keys == "-" else CurveClient.of_controller(RunKeys.read(Path(keys)))


def security_of(keys: str, name: str) -> CurveServer | None:
    if keys == "-":
        return None
    passes = Passes(RunKeys.read(Path(keys)))
    return CurveServer.of_worker(passes.issue(name, Caller.train), name)


def print_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


async def serve(keys: str) -> None:
    zmq_socket.UNSENT_TIMEOUT_MS = 1000  # type: ignore[misc]  # a test does not wait for long
    security = security_of(keys, "train/2")
    num_calls = 0

    def count(_: Any) -> int:
        nonlocal num_calls
        num_calls += 1
        return num_calls

    def blob(args: dict[str, Any]) -> bytes:
        return bytes(args["size"])

    async def echo(args: dict[str, Any]) -> Any:
        return args

    def counters(args: dict[str, Any]) -> dict[str, int]:
        return {
            "num_calls": num_calls,
            "num_malformed": server.malformed.num,
            "num_refused": security.refused.num if security else 0,
        }

    def held_bytes(args: dict[str, Any]) -> int:
        ctypes.CDLL(None).malloc_trim(0)
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    server = RpcServer(
        [
            named("count").served_by(count),
            named("blob").served_by(blob),
            named("echo").served_by(echo),
            named("counters").served_by(counters),
            named("held_bytes").served_by(held_bytes),
        ],
        node_id="train/2",
        incarnation=LIFE,
        security=security,
    )
    print_line(await server.start())
    await asyncio.to_thread(sys.stdin.read)
    await server.close()


async def call(keys: str, address: str) -> None:
    transport = ZmqTransport(client=client_of(keys))
    connection = transport.connect(address, "train/2", LIFE)
    await connection.call(named("blob"), {"size": 100_000}, timeout_s=30)
    print_line("calling")
    while True:
        calls = [
            connection.call(named("blob"), {"size": 1_000_000}, timeout_s=30) for _ in range(150)
        ]
        await asyncio.gather(*calls, return_exceptions=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    asyncio.run(serve(sys.argv[2]) if sys.argv[1] == "serve" else call(*sys.argv[2:]))
