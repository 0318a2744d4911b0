"""What every worker process does beside its engine: serve RPC, keep a store, send heartbeats.

consumes     calls of the controllers, and of other workers that pull from its store
waits for    `shutdown`, or the word of its heartbeat thread that no controller is there any more
unblocked by the controllers, who by asking for heartbeats also renew the lease on its life
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
from areal_sc.transport.arena.folder import ArenaFolder
from areal_sc.transport.beat_board import BeatBoard, this_node
from areal_sc.transport.beats import BeatServer
from areal_sc.transport.curve import CurveAuthenticator
from areal_sc.transport.interface import Interface
from areal_sc.transport.keys import RunKeys
from areal_sc.transport.plane import DataPlane
from areal_sc.transport.rpc.server import Handler, RpcServer
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.workers.run_memory import OFF, beats_folder
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
        self.keys = RunKeys.from_environment(os.environ) or RunKeys.read(spec.keys_path)
        self.transport = ZmqTransport(authenticator=CurveAuthenticator(self.keys, spec.name))
        self._interface = Interface.of(self.transport_config.bind)
        self._run_memory = ArenaFolder(Path(spec.memory_root), spec.run_id)
        self.plane = DataPlane(
            spec.name,
            spec.incarnation,
            self.transport_config,
            store_bytes=spec.store_bytes,
            transport=self.transport,
            interface=self._interface,
            arenas=None if self.transport_config.shared_memory == OFF else self._run_memory,
        )
        self._control_guard = CurveAuthenticator(self.keys, spec.name)
        self._beats_guard = CurveAuthenticator(self.keys, spec.name)
        self._server: RpcServer | None = None
        self.address = ""
        self._engine_thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._done = asyncio.Event()

    def methods(self) -> dict[str, Method]:
        """RPC methods by name; subclasses add theirs."""
        return {
            "ping": self.ping,
            "sweep": self.sweep,
            "stats": self.stats,
            "shutdown": self.shutdown,
        }

    async def serve(self) -> None:
        """Binds the sockets, reports, and serves until the end."""
        handlers: dict[str, Handler] = {**self.methods(), **await self.plane.start()}
        server = self._server = RpcServer(
            handlers,
            node_id=self.spec.name,
            incarnation=self.spec.incarnation,
            bind=self._interface.bind,
            authenticator=self._control_guard,
        )
        beats = BeatServer(
            BeatBoard(beats_folder(self._run_memory)),
            name=self.spec.name,
            incarnation=self.spec.incarnation,
            bind=self._interface.bind,
            authenticator=self._beats_guard,
            interval_s=self.spec.heartbeat_interval_s,
            orphan_timeout_s=self.spec.orphan_timeout_s,
            on_orphaned=self._done.set,
        )
        try:
            self.address = self._interface.reachable(await server.start())
            self._report(self._interface.reachable(await beats.start()))
            logger.info("serving address=%s incarnation=%s", self.address, self.spec.incarnation)
            await self._done.wait()
        finally:
            await self.close()
            await server.close()
            await self.plane.close()
            await self.transport.close()
            self._engine_thread.shutdown(wait=False, cancel_futures=True)
            # Last: until then the worker is alive, and a clean-up that hangs is noticed.
            await beats.close()
            self._run_memory.close()

    async def close(self) -> None:
        """Ends the engine."""

    async def compute(self, function: Callable[[], T]) -> T:
        """Result of a function that runs in the engine's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._engine_thread, function)

    async def ping(self, args: dict[str, Any]) -> None:
        """Tells that the worker answers calls."""

    async def sweep(self, args: dict[str, Any]) -> dict[str, int]:
        """Forgets the shards in `dead`, and those up to `acknowledged` that are not in `live`.

        Of the shards adopted from an earlier life of the worker those in `adopted_live` are kept;
        all of them while there is no such list.
        """
        live, dead = ([int(n) for n in args.get(name, ())] for name in ("live", "dead"))
        adopted = args.get("adopted_live")
        self.plane.store.sweep(
            live,
            int(args["acknowledged"]),
            dead,
            adopted_live=None if adopted is None else set(map(str, adopted)),
        )
        return {"last_sequence": self.plane.store.last_sequence}

    async def stats(self, args: dict[str, Any]) -> dict[str, float]:
        """Counters of both planes; see `PlaneStats`.

        `control_refused` counts connections without the run's keys, and messages that no member
        of the run sends, on the control and heartbeat sockets.
        """
        refused = self._control_guard.num_refused + self._beats_guard.num_refused
        if self._server is not None:
            refused += self._server.num_malformed
        return {**asdict(self.plane.stats()), "control_refused": refused}

    async def shutdown(self, args: dict[str, Any]) -> None:
        """Ends the worker after the reply."""
        asyncio.get_running_loop().call_later(0.05, self._done.set)

    def _report(self, beat_address: str) -> None:
        report = WorkerReport(
            name=self.spec.name,
            incarnation=self.spec.incarnation,
            address=self.address,
            beat_address=beat_address,
            pid=os.getpid(),
            node=this_node(),
            store_room_bytes=self.plane.room_bytes,
        )
        path = self.spec.report_path
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{self.spec.incarnation}")
        temporary.write_text(json.dumps(asdict(report)))
        temporary.rename(path)
