"""What every worker process does beside its engine: serve RPC, keep a store, notice orphanhood.

consumes     calls of the controllers, and of other workers that pull from its store
waits for    `shutdown`, or `orphan_timeout_s` without a `ping`
unblocked by the controllers' heartbeat, which is the worker's lease on life
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from areal_sc.config.schema import TransportConfig
from areal_sc.engines.base import EngineHandle
from areal_sc.engines.handles import handle_from_plain
from areal_sc.transport.pull import Puller, pull_handlers
from areal_sc.transport.rpc import ZmqTransport
from areal_sc.transport.rpc_server import Handler, RpcServer
from areal_sc.transport.tensor_store import TensorStore
from areal_sc.workers.spec import WorkerReport, WorkerSpec
from areal_sc.workflows.sources import SourceReader

logger = logging.getLogger(__name__)

T = TypeVar("T")
Method = Callable[[dict[str, Any]], Awaitable[Any]]


class Worker:
    """Base of train and rollout workers.

    The engine computes in one thread of its own, one call after the other, so the event loop
    answers heartbeats and pulls during a long step.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.transport_config = TransportConfig(**spec.transport)
        self.sources = SourceReader(Path(spec.run_dir))
        self.handle: EngineHandle = handle_from_plain(spec.engine, spec.engine_config)
        self.store = TensorStore(spec.name, spec.incarnation, max_bytes=spec.store_bytes)
        self.transport = ZmqTransport()
        self.puller = Puller(
            self.transport,
            local_store=self.store,
            chunk_bytes=self.transport_config.chunk_bytes,
            max_inflight_chunks=self.transport_config.max_inflight_chunks,
            timeout_s=self.transport_config.pull_timeout_s,
        )
        self.address = ""
        self._engine_thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._done = asyncio.Event()
        self._last_ping_s = 0.0

    def methods(self) -> dict[str, Method]:
        """RPC methods by name; subclasses add theirs."""
        return {
            "ping": self.ping,
            "sweep": self.sweep,
            "stats": self.stats,
            "shutdown": self.shutdown,
        }

    async def serve(self) -> None:
        """Binds the socket, reports, and serves until the end."""
        handlers: dict[str, Handler] = {
            name: _without_frames(method) for name, method in self.methods().items()
        }
        handlers.update(pull_handlers(self.store))
        server = RpcServer(
            handlers,
            node_id=self.spec.name,
            incarnation=self.spec.incarnation,
            bind=f"tcp://{self.transport_config.bind}",
        )
        self.address = await server.start()
        self._report()
        self._last_ping_s = asyncio.get_running_loop().time()
        logger.info("serving address=%s incarnation=%s", self.address, self.spec.incarnation)
        try:
            await self._wait_for_end()
        finally:
            await self.close()
            await server.close()
            await self.puller.close()
            await self.transport.close()
            self._engine_thread.shutdown(wait=False, cancel_futures=True)

    async def close(self) -> None:
        """Ends the engine."""

    async def compute(self, function: Callable[[], T]) -> T:
        """Result of a function that runs in the engine's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._engine_thread, function)

    async def ping(self, args: dict[str, Any]) -> None:
        """Renews the worker's lease on life."""
        self._last_ping_s = asyncio.get_running_loop().time()

    async def sweep(self, args: dict[str, Any]) -> dict[str, int]:
        """Forgets the shards in `dead`, and those up to `acknowledged` that are not in `live`."""
        live, dead = ([int(n) for n in args.get(name, ())] for name in ("live", "dead"))
        self.store.sweep(live, int(args["acknowledged"]), dead)
        return {"last_sequence": self.store.last_sequence}

    async def stats(self, args: dict[str, Any]) -> dict[str, float]:
        """Counters of the store and the plane."""
        return {
            "store_bytes": self.store.num_bytes,
            "store_shards": self.store.num_shards,
            "pulled_bytes": self.puller.pulled_bytes,
            "local_bytes": self.puller.local_bytes,
        }

    async def shutdown(self, args: dict[str, Any]) -> None:
        """Ends the worker after the reply."""
        asyncio.get_running_loop().call_later(0.05, self._done.set)

    def _report(self) -> None:
        report = WorkerReport(self.spec.name, self.spec.incarnation, self.address, os.getpid())
        path = self.spec.report_path
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{self.spec.incarnation}")
        temporary.write_text(json.dumps(asdict(report)))
        temporary.rename(path)

    async def _wait_for_end(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._done.is_set():
            left_s = self._last_ping_s + self.spec.orphan_timeout_s - loop.time()
            if left_s <= 0:
                logger.error("no controller was heard for %g s; ending", self.spec.orphan_timeout_s)
                return
            try:
                async with asyncio.timeout(left_s):
                    await self._done.wait()
            except TimeoutError:
                continue


def _without_frames(method: Method) -> Handler:
    async def handler(args: dict[str, Any], frames: list[Any]) -> Any:
        return await method(args)

    return handler
