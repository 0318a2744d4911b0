"""Workers without engines: rows are numbers of tokens, stores hold names of shards.

Generation, training and transfers are pauses of random length. Whoever reads a shard that was
swept fails, as with real workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from simulation.behavior import Number

from areal_sc.batch_wire import batch_from_wire, batch_to_wire
from areal_sc.config.store_room import trajectory_bytes
from areal_sc.errors import ShardGone, StoreFull, TransportError
from areal_sc.metadata import (
    TRAJECTORY_FIELDS,
    BatchMetadata,
    RowMetadata,
    ShardMetadata,
    TensorMetadata,
)
from areal_sc.schedulers.base import LaunchRequest
from areal_sc.transport.beat_board import Beat
from areal_sc.transport.shard_ids import make_shard_id, parse_shard_id

if TYPE_CHECKING:
    from simulation.cluster import SimulatedCluster
    from simulation.connection import SimulatedConnection

PROMPT_TOKENS = 4
WEIGHTS_BYTES = 1
WORKERS_OF_A_ROLE_A_NODE = 2


class SimulatedStore:
    """Names and sizes of sealed shards.

    Attributes:
        group_of: sequence number -> the group whose rows the shard holds; weights have none.
    """

    def __init__(self, node_id: str, incarnation: str, max_bytes: int) -> None:
        self.node_id = node_id
        self.incarnation = incarnation
        self.max_bytes = max_bytes
        self.last_sequence = 0
        self.sizes: dict[int, int] = {}
        self.group_of: dict[int, int] = {}

    def put(self, num_bytes: int, group_id: int | None = None) -> str:
        if sum(self.sizes.values()) + num_bytes > self.max_bytes:
            raise StoreFull(
                f"{self.node_id}: {num_bytes} bytes beside {sum(self.sizes.values())}, "
                f"the limit is {self.max_bytes}"
            )
        self.last_sequence += 1
        self.sizes[self.last_sequence] = num_bytes
        if group_id is not None:
            self.group_of[self.last_sequence] = group_id
        return make_shard_id(self.incarnation, self.last_sequence)

    def require(self, shard_id: str) -> None:
        incarnation, sequence = parse_shard_id(shard_id)
        if incarnation != self.incarnation or sequence not in self.sizes:
            raise ShardGone(f"shard {shard_id} on {self.node_id} is gone")

    def sweep(self, args: dict[str, Any]) -> None:
        live, dead = set(args.get("live", ())), set(args.get("dead", ()))
        for n in list(self.sizes):
            if n in dead or (n <= args["acknowledged"] and n not in live):
                del self.sizes[n]
                self.group_of.pop(n, None)


Handler = Callable[[dict[str, Any]], Awaitable[Any]]


class SimulatedWorker:
    """Base of both kinds: a store, a life, and methods by name.

    Attributes:
        exit_status: how its process ended; None while it lives.
        is_hung: it lives, and does nothing, as when it is stopped.
        is_blocked: its heartbeat thread lives, and its event loop does not turn.
    """

    def __init__(self, cluster: SimulatedCluster, request: LaunchRequest, incarnation: str) -> None:
        self.cluster = cluster
        self.config = request.engine_config
        self.name = f"{request.role}/{request.index}"
        self.incarnation = incarnation
        self.node = f"node-{request.index // WORKERS_OF_A_ROLE_A_NODE}"
        self.address = f"sim://{self.name}/{incarnation}"
        self.beat_address = f"sim-beats://{self.name}/{incarnation}"
        self.store = SimulatedStore(self.name, incarnation, request.store_bytes)
        self.version = 0
        self.exit_status: str | None = None
        self._last_beat_s: float | None = None
        self._last_turn_s: float | None = None
        self.connections: list[SimulatedConnection] = []
        self.methods: dict[str, Handler] = {
            "ping": self.ping,
            "initialize": self.initialize,
            "shutdown": self.shutdown,
            "sweep": self.sweep,
            "stats": self.stats,
        }

    @property
    def is_hung(self) -> bool:
        return self._last_beat_s is not None

    @is_hung.setter
    def is_hung(self, is_hung: bool) -> None:
        self._last_beat_s = self.cluster.now_s if is_hung else None

    @property
    def is_blocked(self) -> bool:
        return self._last_turn_s is not None

    @is_blocked.setter
    def is_blocked(self, is_blocked: bool) -> None:
        self._last_turn_s = self.cluster.now_s if is_blocked else None

    @property
    def beat(self) -> Beat:
        """What it has on the board of its node."""
        now_s = self.cluster.now_s
        beat_s = now_s if self._last_beat_s is None else self._last_beat_s
        turn_s = beat_s if self._last_turn_s is None else self._last_turn_s
        return Beat(self.name, self.incarnation, 1, now_s - beat_s, now_s - turn_s)

    async def beats_of_node(self, args: dict[str, Any]) -> list[list[Any]]:
        return [worker.beat.to_wire() for worker in self.cluster.workers_on(self.node)]

    async def ping(self, args: dict[str, Any]) -> None:
        return None

    async def initialize(self, args: dict[str, Any]) -> None:
        await self.cluster.spend(self.cluster.behavior.publication_s)

    async def shutdown(self, args: dict[str, Any]) -> None:
        asyncio.get_running_loop().call_later(0.05, self.end, "exit code 0")

    async def sweep(self, args: dict[str, Any]) -> dict[str, int]:
        self.store.sweep(args)
        return {"last_sequence": self.store.last_sequence}

    async def stats(self, args: dict[str, Any]) -> dict[str, float]:
        return {"store_bytes": sum(self.store.sizes.values())}

    def end(self, exit_status: str) -> None:
        """The process ends: nothing that it still did is ever answered."""
        if self.exit_status is None:
            self.exit_status = exit_status
            self.is_hung = True
            for connection in self.connections:
                connection.lose_peer()

    async def read_shards(self, batch: BatchMetadata, duration: Number = 0.0) -> None:
        """Reads all rows of a batch from their owners; every shard must last until the end."""
        for _ in range(2):
            for shard in batch.shards:
                self.cluster.owner(shard.node_id, shard.node_addr).require(shard.shard_id)
            await self.cluster.spend(duration)

    def shard_reply(self, shard_id: str) -> dict[str, Any]:
        return {
            "node_id": self.name,
            "node_addr": self.address,
            "shard_id": shard_id,
            "sequence": self.store.last_sequence,
        }


class SimulatedRolloutWorker(SimulatedWorker):
    """Generates rows of random length in random time.

    Attributes:
        running: (group id, attempt) of the groups that run now.
        history: (time, policy version held from then on), ascending.
    """

    def __init__(self, cluster: SimulatedCluster, request: LaunchRequest, incarnation: str) -> None:
        super().__init__(cluster, request, incarnation)
        self.running: set[tuple[int, int]] = set()
        self.history: list[tuple[float, int]] = [(cluster.now_s, 0)]
        self.num_evaluations = 0
        self.is_updating = False
        self.is_awake = asyncio.Event()
        self.is_awake.set()
        self.methods |= {
            "run_group": self.run_group,
            "run_evaluation": self.run_evaluation,
            "update_weights": self.update_weights,
            "pause": self.fall_asleep,
            "resume": self.wake_up,
        }

    async def fall_asleep(self, args: dict[str, Any]) -> None:
        self.is_awake.clear()

    async def wake_up(self, args: dict[str, Any]) -> None:
        self.is_awake.set()

    async def run_group(self, args: dict[str, Any]) -> dict[str, Any]:
        behavior, rng = self.cluster.behavior, self.cluster.rng
        self.cluster.note_start(self, args)
        key = (args["group_id"], args["attempt"])
        self.running.add(key)
        try:
            began = self.cluster.now_s
            await self.cluster.spend(behavior.generation_s)
            await self.is_awake.wait()
        finally:
            self.running.discard(key)
        num_rows = args["group_size"]
        num_kept = sum(rng.random() >= behavior.row_rejection for _ in range(num_rows))
        if rng.random() < behavior.group_rejection:
            num_kept = 0
        num_rejected = num_rows - num_kept
        rejected = {"reward_error": [num_rejected, "it raised"]} if num_rejected else {}
        if not num_kept:
            return {"batch": None, "rejected": rejected, "metrics": {}}
        rows = tuple(self._row(args, began) for _ in range(num_kept))
        rewards = sum(row.reward for row in rows)
        return {
            "batch": batch_to_wire(self._seal(args, rows)),
            "rejected": rejected,
            "metrics": {"accuracy": [rewards, num_kept]},
        }

    async def run_evaluation(self, args: dict[str, Any]) -> dict[str, Any]:
        self.num_evaluations += 1
        try:
            began = self.cluster.now_s
            await self.cluster.spend(self.cluster.behavior.evaluation_s)
        finally:
            self.num_evaluations -= 1
        versions = self._versions(began, 100)
        return {
            "reward": 1.0,
            "metrics": {"accuracy": 1.0},
            "versions": [versions[0], versions[-1]],
        }

    async def update_weights(self, args: dict[str, Any]) -> None:
        assert not self.is_updating, f"{self.name} was given weights while it pulls others"
        self.is_updating = True
        try:
            for _ in range(2):
                for node_id, address, shard_id in args["shards"]:
                    self.cluster.owner(node_id, address).require(shard_id)
                await self.cluster.spend(self.cluster.behavior.publication_s)
        finally:
            self.is_updating = False
        self.version = args["version"]
        self.history.append((self.cluster.now_s, self.version))

    def _versions(self, began_s: float, num_tokens: int) -> list[int]:
        """The version that sampled each of the tokens, which come at a steady pace until now."""
        pace = (self.cluster.now_s - began_s) / num_tokens
        return [
            next(v for t, v in reversed(self.history) if t <= began_s + pace * (i + 1))
            for i in range(num_tokens)
        ]

    def _row(self, args: dict[str, Any], began_s: float) -> RowMetadata:
        num_tokens = int(self.cluster.draw(self.cluster.behavior.completion_tokens))
        # versions ascend: a few tokens tell where they change, and then stand for their share
        samples = self._versions(began_s, min(num_tokens, 50))
        counts = {v: samples.count(v) * num_tokens // len(samples) for v in samples}
        counts[samples[0]] += num_tokens - sum(counts.values())
        return RowMetadata(
            group_id=args["group_id"],
            attempt=args["attempt"],
            sequence_length=PROMPT_TOKENS + num_tokens,
            reward=float(self.cluster.rng.random() < 0.5),
            admitted_version=args["admitted_version"],
            version_spans=tuple(sorted(counts.items())),
        )

    def _seal(self, args: dict[str, Any], rows: tuple[RowMetadata, ...]) -> BatchMetadata:
        num_tokens = sum(row.sequence_length for row in rows)
        group_id = args["group_id"]
        shard = ShardMetadata(
            node_id=self.name,
            node_addr=self.address,
            shard_id=self.store.put(trajectory_bytes(num_tokens), group_id),
            batch_size=len(rows),
            offset=0,
            fields={
                n: TensorMetadata((num_tokens,), dtype) for n, dtype in TRAJECTORY_FIELDS.items()
            },
            shard_rows=tuple(range(len(rows))),
        )
        batch_id = f"g{group_id}.{args['attempt']}"
        return BatchMetadata(batch_id, args["admitted_version"], len(rows), (shard,), rows)


class SimulatedTrainWorker(SimulatedWorker):
    """One rank: checks that it can read what it is given, and notes it."""

    def __init__(self, cluster: SimulatedCluster, request: LaunchRequest, incarnation: str) -> None:
        super().__init__(cluster, request, incarnation)
        self.operations: dict[str, Any] = {}
        self.methods |= {
            "create_rendezvous": self.create_rendezvous,
            "compute_logprobs": self.compute_logprobs,
            "ppo_update": self.ppo_update,
            "seal_weights": self.seal_weights,
            "load_snapshot": self.load_snapshot,
        }

    async def create_rendezvous(self, args: dict[str, Any]) -> str:
        return "sim://rendezvous"

    async def compute_logprobs(self, args: dict[str, Any]) -> dict[str, Any]:
        batch = batch_from_wire(args["batch"])
        assert batch.fields in (("input_ids", "temperatures"), ())
        await self.read_shards(batch, self.cluster.behavior.training_s)
        return self.shard_reply(self.store.put(4 * batch.num_tokens) if batch.rows else "")

    async def ppo_update(self, args: dict[str, Any]) -> dict[str, float]:
        if args["operation"] in self.operations:
            return dict(self.operations[args["operation"]])
        if args["expected_version"] != self.version:
            raise TransportError(
                f"expected {args['expected_version']}, {self.name} is at {self.version}"
            )
        for wire in args["minibatches"]:
            batch = batch_from_wire(wire)
            await self.read_shards(batch)
            self.cluster.note_trained(self.version, batch)
        await self.cluster.spend(self.cluster.behavior.training_s)
        self.operations[args["operation"]] = {"loss": 0.0}
        return {"loss": 0.0}

    async def load_snapshot(self, args: dict[str, Any]) -> None:
        self.version = args["step"]

    async def seal_weights(self, args: dict[str, Any]) -> dict[str, Any]:
        await self.cluster.spend(self.cluster.behavior.sealing_s)
        shard_id = self.store.put(WEIGHTS_BYTES)
        self.version = args["version"]
        self.cluster.sealed_versions.append((self.cluster.now_s, self.version))
        return self.shard_reply(shard_id)
