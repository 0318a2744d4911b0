"""areal_sc's data plane and control plane as the benchmarks use them.

Only `worker` imports torch; controllers, which never call it, do without.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING

from areal_sc.config.schema import Device, SchedulerConfig, TransportConfig
from areal_sc.fleet.member import FoundWorkers
from areal_sc.fleet.node_workers import NodeWorkers
from areal_sc.fleet.runtime import Runtime
from areal_sc.fleet.worker_life import Died, LifeEvent, Lives, Wished
from areal_sc.ids import random_id
from areal_sc.metadata import BatchMetadata, Columns, RowMetadata, RowRun, ShardMetadata
from areal_sc.nodes.spec import (
    LAUNCH,
    STOP,
    WATCH,
    Beat,
    Launch,
    Launched,
    News,
    NodeFacts,
    Stop,
    Watch,
    WorkerOrder,
    WorkerReport,
)
from areal_sc.run.run_owner import RunTerm
from areal_sc.run.status_board import StatusBoard
from areal_sc.schedulers.base import Node
from areal_sc.transport.rpc.method import Method, Served
from areal_sc.transport.rpc.server import RpcServer
from areal_sc.transport.rpc.transport import Connection, ZmqTransport
from areal_sc.transport.security.curve import CurveClient, CurveServer
from areal_sc.transport.security.keys import RunKeys
from areal_sc.transport.security.passes import Caller, Passes, WorkerKeys
from areal_sc.transport.shards.memory_folder import ArenaFolder, clean_leftovers, memory_root

if TYPE_CHECKING:
    import torch

    from areal_sc.transport.plane import DataPlane

CALL_TIMEOUT_S = 60.0
NOOP = Method("noop", NoneType, NoneType)
STORE_BYTES = 4 << 30


@contextmanager
def run() -> Iterator[Path]:
    """The folder of a run, which all roles are given; nothing of it is left afterwards."""
    with tempfile.TemporaryDirectory(prefix="areal-sc-planes-") as name:
        folder = Path(name)
        RunKeys.create().write(folder / "keys.json")
        clean_leftovers(_arena_root(folder))
        arenas = _arenas(folder)
        try:
            yield folder
        finally:
            arenas.remove()


def controller(folder: Path) -> CurveClient:
    return CurveClient.of_controller(RunKeys.read(folder / "keys.json"))


def keys_of(name: str, folder: Path) -> WorkerKeys:
    """Those of a worker."""
    return Passes(RunKeys.read(folder / "keys.json")).issue(name, Caller.rollout)


def _arenas(folder: Path) -> ArenaFolder:
    return ArenaFolder(_arena_root(folder), folder.name)


def _arena_root(folder: Path) -> Path:
    return memory_root("auto", folder, node_folder=folder, needed_bytes=2 * STORE_BYTES)


@dataclass(frozen=True)
class Worker:
    """A worker's data plane, and the address of its control socket."""

    node_id: str
    plane: DataPlane
    address: str

    def seal(
        self, shards: Sequence[Mapping[str, torch.Tensor]], lengths: Sequence[Sequence[int]]
    ) -> BatchMetadata:
        """Puts the shards, each of packed rows, and describes them as one batch."""
        sealed: list[ShardMetadata] = []
        rows: list[RowMetadata] = []
        for fields, row_lengths in zip(shards, lengths, strict=True):
            shard_id = self.plane.store.put(fields, row_lengths)
            runs = (RowRun(len(rows), 0, len(row_lengths)),)
            sealed.append(ShardMetadata(self.node_id, self.address, shard_id, runs))
            rows += [RowMetadata(0, 0, length, 0.0, 0, ((0, length),), 0) for length in row_lengths]
        dtypes = {n: str(v.dtype).removeprefix("torch.") for n, v in shards[0].items()}
        return BatchMetadata(random_id(), 0, (Columns(dtypes, tuple(sealed)),), tuple(rows))


@asynccontextmanager
async def worker(
    node_id: str, folder: Path, *, encrypt: bool, shares_memory: bool, pools: bool = True
) -> AsyncIterator[Worker]:
    """A worker as a run starts it.

    Args:
        shares_memory: with the workers on this node; else every pull goes over TCP.
        pools: destinations are used again.
    """
    from areal_sc.transport.plane import DataPlane

    gc.collect()
    gc.freeze()  # as the fork server does it after its imports
    incarnation = random_id()
    async with AsyncExitStack() as stack:
        keys = keys_of(node_id, folder)
        transport = ZmqTransport(client=CurveClient.of_worker(keys))
        stack.push_async_callback(transport.close)
        arenas = None
        if shares_memory:
            arenas = _arenas(folder)
            stack.callback(arenas.close)
        plane = DataPlane(
            node_id,
            incarnation,
            TransportConfig(encrypt=encrypt),
            store_bytes=STORE_BYTES,
            transport=transport,
            arenas=arenas,
            idle_buffer_bytes=(1 << 30) if pools else 0,
        )
        stack.push_async_callback(plane.close)
        server = rpc_server(node_id, incarnation, folder, await plane.start())
        address = await server.start()
        stack.push_async_callback(server.close)
        yield Worker(node_id, plane, address)


def rpc_server(
    node_id: str, incarnation: str, folder: Path, methods: Sequence[Served]
) -> RpcServer:
    """A worker's control socket, which also answers `NOOP`."""
    return RpcServer(
        [NOOP.served_by(_noop), *methods],
        node_id=node_id,
        incarnation=incarnation,
        security=CurveServer.of_worker(keys_of(node_id, folder), node_id),
    )


async def _noop(_: None) -> None:
    pass


def agent_server(
    node: str, workers: Sequence[WorkerReport], folder: Path, launch_s: float = 0.0
) -> RpcServer:
    """The agent of a node whose workers serve already, and are well.

    Args:
        launch_s: a launch takes so long.
    """

    async def launch(launch: Launch) -> Launched:
        await asyncio.sleep(launch_s)
        by_name = {worker.name: worker for worker in workers}
        return Launched([by_name[order.name] for order in launch.orders])

    async def watch(watch: Watch) -> News:
        await asyncio.sleep(watch.hold_s)
        return News([Beat(w.name, w.incarnation, 0.1, 0.2) for w in workers], [], 0)

    async def stop(stop: Stop) -> None:
        """They end with their host."""

    methods = [LAUNCH.served_by(launch), WATCH.served_by(watch), STOP.served_by(stop)]
    security = CurveServer.of_worker(keys_of(node, folder), node)
    return RpcServer(methods, node_id=node, incarnation=node, security=security)


class Nodes:
    """A scheduler whose nodes are there already.

    Args:
        agents: address of each node's agent, by the node's name.
    """

    def __init__(self, config: SchedulerConfig, keys: RunKeys, agents: Mapping[str, str]) -> None:
        self.config = config
        self.keys = keys
        self.passes = Passes(keys)
        self.status = StatusBoard()
        self.term: RunTerm | None = None
        self._nodes = [
            Node(NodeFacts(name, name, 0, "", address, name), Path("agent.log"))
            for name, address in agents.items()
        ]

    async def nodes(self) -> list[Node]:
        return self._nodes

    async def ended_nodes(self) -> dict[Node, str]:
        return {}

    async def renew(self, node: Node, incarnation: str) -> None:
        """The agents live as long as the benchmark."""

    def close(self) -> None:
        """Nothing is left to close."""


def agents_of(workers: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Address of each node's agent, by the node's name; see `heartbeats`."""
    return {worker["node"]: worker["agent"] for worker in workers}


async def heartbeats(
    transport: ZmqTransport,
    workers: Sequence[Mapping[str, str]],
    lost: list[str],
) -> None:
    """A controller's watch over the workers, until it is cancelled.

    Args:
        lost: gets the cause of each loss.
        workers: of each `name`, `incarnation`, `address`, `node` and `agent`.
    """

    def note(event: LifeEvent | Wished) -> None:
        if isinstance(event, Died):
            lost.append(str(event.cause))

    scheduler = Nodes(SchedulerConfig(), RunKeys.create(), agents_of(workers))
    watches = {}
    for node in await scheduler.nodes():
        orders = [WorkerOrder("rollout", 0, "", {}, Device.cpu, 0)]
        watches[node.name] = NodeWorkers(
            *(node, "rollout", orders, FoundWorkers(), scheduler, Runtime(transport)),
            *(Lives(scheduler.config.max_deaths), note),
        )
    for worker in workers:
        watch = watches[worker["node"]]
        order = WorkerOrder("rollout", 0, "", {}, Device.cpu, 0)
        watch.add(order, report_of(worker), watch.agent.connection)  # nobody calls it
    async with asyncio.TaskGroup() as tasks:
        for number, watch in enumerate(watches.values(), start=1):
            hold_s = scheduler.config.heartbeat_interval_s * number / len(watches)
            tasks.create_task(watch.run(hold_s))


def report_of(worker: Mapping[str, str]) -> WorkerReport:
    return WorkerReport(worker["name"], worker["incarnation"], worker["address"], 1, worker["node"])


async def noop_all(transport: ZmqTransport, connections: Sequence[Connection]) -> None:
    """Calls all at once; raises the first failure."""
    outcomes = await transport.call_all(
        [(connection, None) for connection in connections], NOOP, timeout_s=CALL_TIMEOUT_S
    )
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
