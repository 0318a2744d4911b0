"""Workers without engines: rows are numbers of tokens, stores hold names of shards.

Generation, training and transfers are pauses of random length. Whoever reads a shard that was
swept fails, as with real workers, and so does whoever seals one that the store has no room for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from simulation.behavior import Number

from areal_sc.batch_wire import batch_from_wire, batch_to_wire
from areal_sc.config.store_room import trajectory_bytes
from areal_sc.controller.train import LOGPROB_FIELDS
from areal_sc.errors import ShardGone, StoreFull
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
from areal_sc.workers.operations import Operation, Operations

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

    def sweep(self, args: dict[str, Any]) -> dict[str, int]:
        """Drops what the call names; returns the groups whose shards went, by their ids."""
        live, dead = set(args.get("live", ())), set(args.get("dead", ()))
        dropped: dict[str, int] = {}
        for n in list(self.sizes):
            if n in dead or (n <= args["acknowledged"] and n not in live):
                del self.sizes[n]
                if n in self.group_of:
                    dropped[make_shard_id(self.incarnation, n)] = self.group_of.pop(n)
        return dropped


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
        for shard_id, group_id in self.store.sweep(args).items():
            self.cluster.on_forgotten(shard_id, group_id)
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
        running: (group id, attempt) of the groups that run now -> set when it is given up.
        history: (time, policy version held from then on), ascending.
    """

    def __init__(self, cluster: SimulatedCluster, request: LaunchRequest, incarnation: str) -> None:
        super().__init__(cluster, request, incarnation)
        self.running: dict[tuple[int, int], asyncio.Event] = {}
        self.history: list[tuple[float, int]] = [(cluster.now_s, 0)]
        self.num_evaluations = 0
        self.is_updating = False
        self.is_awake = asyncio.Event()
        self.is_awake.set()
        self.methods |= {
            "run_group": self.run_group,
            "give_up_group": self.give_up_group,
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
        self.check_room()
        given_up = self.running[key] = asyncio.Event()
        try:
            began = self.cluster.now_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.cluster.draw(behavior.generation_s)):
                    await given_up.wait()
            if given_up.is_set():
                await self.cluster.spend(behavior.give_up_s)
                return {"batch": None, "rejected": {}, "metrics": {}}
            await self.is_awake.wait()
        finally:
            del self.running[key]
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

    def check_room(self) -> None:
        """Whatever runs here may fill its rows, and one more group is about to begin."""
        config, num_groups = self.config, len(self.running) + len(self.store.group_of) + 1
        group_bytes = trajectory_bytes(config["group_size"] * config["max_context_tokens"])
        if num_groups * group_bytes > self.store.max_bytes:
            raise StoreFull(f"{self.name} was given {num_groups} groups of {group_bytes} bytes")

    async def give_up_group(self, args: dict[str, Any]) -> None:
        run = self.running.get((args["group_id"], args["attempt"]))
        if run is not None:
            run.set()

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
        self.operations = Operations(self.name)
        self.data_rank, model_rank = divmod(request.index, self.config["parallel"]["model"])
        self.is_head = model_rank == 0
        self.methods |= {
            "create_rendezvous": self.create_rendezvous,
            "compute_logprobs": self.compute_logprobs,
            "ppo_update": self.ppo_update,
            "seal_weights": self.seal_weights,
            "save_weights": self.save_weights,
            "load_snapshot": self.load_snapshot,
        }

    async def initialize(self, args: dict[str, Any]) -> dict[str, Any]:
        await super().initialize(args)
        self.operations.lineage = args["lineage"]
        return {"data_rank": self.data_rank, "is_head": self.is_head}

    async def create_rendezvous(self, args: dict[str, Any]) -> str:
        return "sim://rendezvous"

    async def compute_logprobs(self, args: dict[str, Any]) -> dict[str, Any]:
        batch = batch_from_wire(args["batch"])
        assert batch.fields in (LOGPROB_FIELDS, ())
        await self.read_shards(batch, self.cluster.behavior.training_s)
        is_sealed = bool(batch.rows) and self.is_head
        return self.shard_reply(self.store.put(4 * batch.num_tokens) if is_sealed else "")

    async def ppo_update(self, args: dict[str, Any]) -> dict[str, float]:
        async def read() -> None:
            for wire in args["minibatches"]:
                await self.read_shards(batch_from_wire(wire))

        async def update(_: None) -> dict[str, float]:
            for wire in args["minibatches"]:
                if self.is_head:
                    self.cluster.note_trained(self.version, batch_from_wire(wire))
            await self.cluster.spend(self.cluster.behavior.training_s)
            return {"loss": 0.0}

        operation = Operation.from_wire(args["operation"])
        return dict(await self.operations.join(operation, read, update))

    async def load_snapshot(self, args: dict[str, Any]) -> None:
        async def load() -> None:
            self.version = operation.version

        operation = Operation.from_wire(args["operation"])
        await self.operations.join(
            operation, load, next_version=operation.version, begins_lineage=True
        )

    async def seal_weights(self, args: dict[str, Any]) -> dict[str, Any]:
        async def seal() -> dict[str, Any]:
            await self._make_version(version)
            return self.shard_reply(self.store.put(WEIGHTS_BYTES))

        version = int(args["version"])
        operation = Operation.from_wire(args["operation"])
        return dict(await self.operations.join(operation, seal, next_version=version))

    async def save_weights(self, args: dict[str, Any]) -> dict[str, Any]:
        async def save() -> dict[str, Any]:
            await self._make_version(version)
            return {"folder": f"version-{version}", "sequence": self.store.last_sequence}

        version = int(args["version"])
        operation = Operation.from_wire(args["operation"])
        return dict(await self.operations.join(operation, save, next_version=version))

    async def _make_version(self, version: int) -> None:
        await self.cluster.spend(self.cluster.behavior.sealing_s)
        self.version = version
        self.cluster.sealed_versions.append((self.cluster.now_s, version))
