"""A worker process without an engine: the sockets of a real one, and an event loop to block.

python beating_worker.py <spec as JSON>
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from areal_sc.transport.beat_board import BeatBoard, this_node
from areal_sc.transport.beats import BeatServer

from areal_sc.errors import ModelError
from areal_sc.log import setup_logging
from areal_sc.transport import beats
from areal_sc.transport.curve import CurveAuthenticator
from areal_sc.transport.keys import RunKeys
from areal_sc.transport.rpc.transport import RpcServer
from areal_sc.workers.spec import WorkerReport, WorkerSpec


async def serve(spec: WorkerSpec) -> None:
    done = asyncio.Event()

    async def ping(args: dict[str, Any]) -> None: ...

    async def block(args: dict[str, Any]) -> str:
        time.sleep(args["seconds"])  # noqa: ASYNC251 - that is what it is for
        return "done"

    async def wait(args: dict[str, Any]) -> None:
        logging.getLogger(__name__).info("the wait began")
        try:
            await asyncio.sleep(args["seconds"])
        except asyncio.CancelledError:
            logging.getLogger(__name__).info("the wait was cancelled")
            raise

    async def fail(args: dict[str, Any]) -> None:
        if args["seconds"]:
            return await wait(args)
        while not (Path(spec.run_dir) / "fail_now").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        raise ModelError("no weights")

    async def shutdown(args: dict[str, Any]) -> None:
        asyncio.get_running_loop().call_later(0.05, done.set)

    keys = RunKeys.read(spec.keys_path)
    server = RpcServer(
        {"ping": ping, "block": block, "wait": wait, "fail": fail, "shutdown": shutdown},
        node_id=spec.name,
        incarnation=spec.incarnation,
        authenticator=CurveAuthenticator(keys, spec.name),
    )
    beat_server = BeatServer(
        BeatBoard(Path(spec.run_dir) / "beats"),
        name=spec.name,
        incarnation=spec.incarnation,
        bind="tcp://127.0.0.1",
        authenticator=CurveAuthenticator(keys, spec.name),
        interval_s=spec.heartbeat_interval_s,
        orphan_timeout_s=spec.orphan_timeout_s,
        on_orphaned=done.set,
    )
    report = WorkerReport(
        name=spec.name,
        incarnation=spec.incarnation,
        address=await server.start(),
        beat_address=await beat_server.start(),
        pid=os.getpid(),
        node=this_node(),
    )
    partial = spec.report_path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(report)))
    partial.rename(spec.report_path)
    await done.wait()
    await server.close()
    await beat_server.close()


if __name__ == "__main__":
    setup_logging("worker")
    beats.ORPHAN_GRACE_S = 1.0  # type: ignore[misc]
    asyncio.run(serve(WorkerSpec(**json.loads(sys.argv[1]))))
