"""What every worker process does beside its engine: serve RPC, keep a store, send heartbeats.

consumes     calls of the controllers, and of other workers that pull from its store
waits for    `shutdown`
unblocked by the controllers; where there are none any more, its agent ends it
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

from msgspec import msgpack
from msgspec.structs import replace

from areal_sc.config.schema import RolloutConfig, WeightUpdateMethod
from areal_sc.engines.handle_names import handle_from_plain
from areal_sc.log import take_warnings
from areal_sc.nodes.beats import Beats
from areal_sc.nodes.node_folder import WorkerFiles
from areal_sc.nodes.spec import WorkerReport, WorkerSpec
from areal_sc.records.recorder import RANK_BYTES, Recorder
from areal_sc.transport.bulk.session import OWNER_ABSENCE_S
from areal_sc.transport.plane import DataPlane
from areal_sc.transport.rpc.method import Served
from areal_sc.transport.rpc.server import RpcServer
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.transport.security.curve import CurveClient, CurveServer
from areal_sc.transport.security.passes import WorkerKeys
from areal_sc.transport.shards.ids import parse_shard_id
from areal_sc.transport.shards.memory_folder import OFF, ArenaFolder
from areal_sc.transport.sockets.interface import Interface
from areal_sc.weights.group import tell_nccl
from areal_sc.workers import calls
from areal_sc.workflows.registry import SourceReader

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MESSAGE_BYTES: Final = 64 << 10


class Worker:
    """Base of train and rollout workers.

    The engine computes in one thread of its own, one call after the other, so the event loop
    answers calls and pulls during a long step.

    Args:
        agent: socket to the agent of the node, a file descriptor; the keys come first.

    Attributes:
        keys: of this life of the worker.
        order: what it is to do, with paths of this machine.
        recorder: of what it does when.
    """

    def __init__(self, spec: WorkerSpec, agent: int) -> None:
        self.spec = spec
        self.keys = msgpack.decode(os.read(agent, _MESSAGE_BYTES), type=WorkerKeys)
        self._agent = agent
        self.transport_config = spec.run.transport
        self.transport = ZmqTransport(client=CurveClient.of_worker(self.keys))
        self.files = _files_of(spec, self.transport)
        self.order = self.files.placed(spec.order)
        sys.path[:0] = [it for it in self.order.code_folders if it not in sys.path]
        self.handle: Any = handle_from_plain(self.order.engine, self.order.engine_config)
        self.recorder = _recorder_of(spec, self.handle.config, self.files)
        self.sources = SourceReader(Path(spec.run.run_dir), self.files.place)
        self._interface = Interface.of(self.transport_config.bind)
        self._run_memory = ArenaFolder(Path(spec.memory_root), spec.run_id)
        self.node = self._run_memory.node_token()
        self.plane = DataPlane(
            spec.name,
            spec.order.incarnation,
            self.transport_config,
            store_bytes=spec.order.store_bytes,
            transport=self.transport,
            interface=self._interface,
            arenas=None if self.transport_config.shared_memory == OFF else self._run_memory,
            absence_s=OWNER_ABSENCE_S if spec.run.max_deaths else 0.0,
        )
        self._security = CurveServer.of_worker(self.keys, spec.name)
        self._security.callers.note_replaced(spec.replaced)
        self._server: RpcServer | None = None
        self.address = ""
        self._engine_thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        if self.handle.config.weight_update.method == WeightUpdateMethod.collective:
            tell_nccl()  # its servers get this process's environment
        self._done = asyncio.Event()

    def methods(self) -> list[Served]:
        """What is served; subclasses add theirs."""
        return [
            calls.PING.served_by(self.ping),
            calls.SWEEP.served_by(self.sweep),
            calls.ADOPTED_SHARDS.served_by(self.adopted_shards),
            calls.STATS.served_by(self.stats),
            calls.SHUTDOWN.served_by(self.shutdown),
        ]

    async def serve(self) -> None:
        """Binds the sockets, reports, and serves until the end."""
        self.files.loop.set_result(asyncio.get_running_loop())
        server = self._server = RpcServer(
            [*self.methods(), *await self.plane.start()],
            node_id=self.spec.name,
            incarnation=self.spec.order.incarnation,
            bind=f"{self._interface.bind}:{self.spec.order.port}",
            security=self._security,
            term=self.spec.term,
        )
        beats = Beats(self._agent, self.spec.run.heartbeat_interval_s)
        try:
            self.address = self._interface.reachable(await server.start())
            asyncio.get_running_loop().add_reader(self._agent, self._on_word)
            self._report()
            self.recorder.add_event("serving")
            logger.info(
                "serving address=%s incarnation=%s", self.address, self.spec.order.incarnation
            )
            await self._done.wait()
        finally:
            await self.close()
            await server.close()
            await self.plane.close()
            self._engine_thread.shutdown(wait=False, cancel_futures=True)
            self.recorder.add_event("ending")
            await asyncio.to_thread(self.recorder.close)
            await self.transport.close()  # by which records may go
            # Last: until then the worker is alive, and a clean-up that hangs is noticed.
            await beats.close()
            self._run_memory.close()

    def memory_folder(self, name: str) -> Path:
        """A folder in the run's shared memory on this node: it outlives the worker, not the run."""
        return self._run_memory.path / name

    async def close(self) -> None:
        """Ends the engine."""

    async def compute(self, function: Callable[[], T]) -> T:
        """Result of a function that runs in the engine's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._engine_thread, function)

    async def ping(self, _: None) -> None:
        """Tells that the worker answers calls."""

    async def sweep(self, sweep: calls.Sweep) -> int:
        adopted = None if sweep.adopted_live is None else set(sweep.adopted_live)
        self.plane.store.sweep(sweep.live, sweep.acknowledged, sweep.dead, adopted_live=adopted)
        return self.plane.store.last_sequence

    async def adopted_shards(self, groups: tuple[int, ...]) -> tuple[calls.HeldShard, ...]:
        own = self.spec.order.incarnation
        held = self.held_shards(groups)
        return tuple(it for it in held if parse_shard_id(it.shard_id)[0] != own)

    def held_shards(self, groups: Collection[int]) -> tuple[calls.HeldShard, ...]:
        """All shards in the store; of episodes of other groups than these the names alone."""
        wanted = frozenset(groups)
        held = []
        for shard_id, note in self.plane.store.notes.items():
            episode = msgpack.decode(note, type=calls.FinishedEpisode) if note else None
            if episode is not None and episode.run.group_id not in wanted:
                run, number, session = episode.run, episode.number, episode.session
                episode = calls.FinishedEpisode(run, number, session=session)
            elif episode is not None:  # its text stays here, and is long
                episode = replace(episode, answer="")
            held.append(calls.HeldShard(shard_id, episode))
        return tuple(held)

    async def stats(self, _: None) -> calls.WorkerStats:
        refused = self._security.refused.num
        if self._server is not None:
            refused += self._server.malformed.num
        return calls.WorkerStats(self.plane.stats(), refused, self.engine_stats(), take_warnings())

    def engine_stats(self) -> dict[str, float]:
        """Counters of the engine, if it has any."""
        return {}

    async def shutdown(self, _: None) -> None:
        """Ends the worker after the reply."""
        asyncio.get_running_loop().call_later(0.05, self._done.set)

    def _on_word(self) -> None:
        """The agent tells which workers of the run have been started again."""
        told = os.read(self._agent, _MESSAGE_BYTES)
        if told:
            self._security.callers.note_replaced(msgpack.decode(told, type=dict[str, int]))
            self.plane.end_sessions(self._security.callers.known)
        else:  # the agent has ended, and this process ends with it
            asyncio.get_running_loop().remove_reader(self._agent)

    def _report(self) -> None:
        report = WorkerReport(
            name=self.spec.name,
            incarnation=self.spec.order.incarnation,
            address=self.address,
            pid=os.getpid(),
            node=self.node,
            store_room_bytes=self.plane.room_bytes,
        )
        os.write(self._agent, msgpack.encode(report))


def _recorder_of(spec: WorkerSpec, config: Any, files: WorkerFiles) -> Recorder:
    settings = spec.run.records
    if not isinstance(config, RolloutConfig):
        return Recorder(files.record_store(spec.name, RANK_BYTES), spec.name, settings)
    store = files.record_store(spec.name, settings.max_bytes // config.most_workers)
    return Recorder(store, spec.name, settings, config.train_batch_groups)


def _files_of(spec: WorkerSpec, transport: ZmqTransport) -> WorkerFiles:
    if spec.shipped is None:
        return WorkerFiles(spec.run.run_dir)
    from areal_sc.shipping.worker_side import ShippedFiles

    return ShippedFiles(spec.shipped, spec.run, transport)
