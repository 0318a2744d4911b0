"""An agent whose workers have no engine: the sockets of real ones, and an event loop to block.

python beating_agent.py <run id> <SchedulerConfig as JSON> [<address to join at>]
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from pathlib import Path
from types import NoneType
from typing import Any

import msgspec
from msgspec import msgpack

sys.path.insert(0, str(Path(__file__).parents[1]))

from areal_sc.errors import ModelError
from areal_sc.log import setup_logging
from areal_sc.nodes import agent
from areal_sc.nodes.beats import Beats
from areal_sc.nodes.spec import WorkerReport, WorkerSpec
from areal_sc.transport.rpc.method import Method
from areal_sc.transport.rpc.server import RpcServer
from areal_sc.transport.security.curve import CurveServer
from areal_sc.transport.security.passes import WorkerKeys
from areal_sc.transport.sockets.interface import Interface
from areal_sc.workers.calls import PING, SHUTDOWN

BLOCK = Method("block", float, str)
"""Its argument, as that of the others, are seconds."""
WAIT = Method("wait", float, NoneType)


def run_worker(spec_dict: dict[str, Any]) -> int:
    agent_fd = spec_dict.pop("fd")
    spec = msgspec.convert(spec_dict, WorkerSpec)
    keys = msgpack.decode(os.read(agent_fd, 4096), type=WorkerKeys)
    setup_logging(spec.name)
    if spec.order.engine == "broken":
        raise ModelError("no weights")
    if spec.order.engine == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    asyncio.run(serve(spec, keys, agent_fd))
    return 0


async def serve(spec: WorkerSpec, keys: WorkerKeys, agent_fd: int) -> None:
    done = asyncio.Event()

    async def ping(_: None) -> None: ...

    async def block(seconds: float) -> str:
        time.sleep(seconds)  # noqa: ASYNC251 - that is what it is for
        return "done"

    async def wait(seconds: float) -> None:
        logging.getLogger(__name__).info("the wait began")
        await asyncio.sleep(seconds)

    async def shutdown(_: None) -> None:
        asyncio.get_running_loop().call_later(0.05, done.set)

    server = RpcServer(
        [
            PING.served_by(ping),
            BLOCK.served_by(block),
            WAIT.served_by(wait),
            SHUTDOWN.served_by(shutdown),
        ],
        node_id=spec.name,
        incarnation=spec.order.incarnation,
        bind=f"{Interface.of(spec.run.transport.bind).bind}:{spec.order.port}",
        security=CurveServer.of_worker(keys, spec.name),
    )
    address = await server.start()
    beats = Beats(agent_fd, spec.run.heartbeat_interval_s)
    if "mute" not in spec.order.engine:
        report = WorkerReport(spec.name, spec.order.incarnation, address, os.getpid(), "node")
        os.write(agent_fd, msgpack.encode(report))
    await done.wait()
    await server.close()
    await beats.close()


if __name__ == "__main__":
    sys.exit(agent.main(target="integration.beating_agent:run_worker", preload=()))
