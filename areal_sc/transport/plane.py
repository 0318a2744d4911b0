"""The data plane of one worker: its store, the socket that serves it, and pulls from others.

with an arena      shards lie in shared memory; workers on this node map them
without            shards lie in the process's own memory; everybody pulls over the socket
"""

from __future__ import annotations

import os
from collections.abc import Container
from typing import Final

from areal_sc.config.transport_settings import TransportConfig
from areal_sc.transport.bulk.client import BulkClient
from areal_sc.transport.bulk.puller import Puller
from areal_sc.transport.bulk.server import BulkServer
from areal_sc.transport.plane_stats import PlaneStats
from areal_sc.transport.rpc.method import Served
from areal_sc.transport.rpc.transport import Transport
from areal_sc.transport.shards.arena_map import ArenaMap
from areal_sc.transport.shards.blocks import ArenaBackend
from areal_sc.transport.shards.memory_folder import ArenaFolder
from areal_sc.transport.shards.store import TensorStore
from areal_sc.transport.sockets.interface import Interface

ROOM_SHARE: Final = 0.8
"""Share of the free shared memory for stores: published weights and other programs live there."""


class DataPlane:
    """`start`, on the worker's event loop, comes before the first pull.

    Args:
        node_id, incarnation: of the worker.
        config: the `transport` section.
        store_bytes: limit of the store; 0: there is none.
        transport: control connections to other workers.
        interface: where the bulk socket listens.
        arenas: this run's folder in shared memory; None: every shard travels.
        idle_buffer_bytes: destinations of pulls that are kept for later ones.
        absence_s: an owner may be gone for so long while others pull from it; see `call_owner`.

    Attributes:
        store: the worker's own shards.
        puller: gets the rows and weights that lie elsewhere.
        room_bytes: what all stores of the node may take together, beside `store_bytes`; 0: there
            is no such limit.
    """

    def __init__(
        self,
        node_id: str,
        incarnation: str,
        config: TransportConfig,
        *,
        store_bytes: int,
        transport: Transport,
        interface: Interface | None = None,
        arenas: ArenaFolder | None = None,
        idle_buffer_bytes: int = 1 << 30,
        absence_s: float = 0.0,
    ) -> None:
        backend = None if arenas is None else ArenaBackend(arenas, node_id, incarnation)
        self.room_bytes = 0 if arenas is None else _room_bytes(arenas, node_id)
        self.store = TensorStore(node_id, incarnation, max_bytes=store_bytes, backend=backend)
        self._server = BulkServer(
            self.store,
            interface=interface or Interface.of(config.bind),
            is_encrypted=config.encrypt,
            reply_timeout_s=config.stalled_peer_timeout_s,
        )
        puller = f"{node_id} ({incarnation})"
        self._bulk = BulkClient(transport, puller, config, absence_s=absence_s)
        self._arena_map = None if arenas is None else ArenaMap(arenas)
        self.puller = Puller(
            self._bulk,
            local_store=self.store,
            arenas=self._arena_map,
            timeout_s=config.pull_timeout_s,
            idle_buffer_bytes=idle_buffer_bytes,
        )

    async def start(self) -> list[Served]:
        """Binds the bulk socket; returns the RPC methods by which peers get to it.

        Raises: TransportError: the interface cannot be bound.
        """
        self.store.adopt()
        await self._server.start()
        return self._server.methods()

    def end_sessions(self, known: Container[str]) -> None:
        """Ends those of callers whose public keys are not known any more."""
        self._server.end_sessions(known)

    def stats(self) -> PlaneStats:
        """What is held now, and counters since the start."""
        store, puller = self.store, self.puller
        return PlaneStats(
            store_bytes=store.num_bytes,
            store_shards=store.num_shards,
            mapped_retired_bytes=store.mapped_retired_bytes,
            pulled_bytes=puller.pulled_bytes,
            mapped_bytes=puller.mapped_bytes,
            local_bytes=puller.local_bytes,
            served_bytes=self._server.sent_bytes,
            bulk_requests=self._server.num_reads,
            bulk_refused=self._server.refused.num + self._bulk.refused.num,
        )

    async def close(self) -> None:
        """Ends pulls and serving; the worker's shards go with it."""
        await self.puller.close()
        await self._server.close()
        if self._arena_map is not None:
            self._arena_map.close()
        self.store.close()


def _room_bytes(arenas: ArenaFolder, node_id: str) -> int:
    """What the stores of this role may hold on this node, some memory left to others; at least 1.

    What they hold already, when a worker is started again, is room of theirs.
    """
    space = os.statvfs(arenas.path)
    held_bytes = arenas.held_bytes(node_id.partition("/")[0])
    return max(int(ROOM_SHARE * (space.f_bavail * space.f_frsize + held_bytes)), 1)
