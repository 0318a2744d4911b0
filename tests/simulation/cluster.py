"""Workers without engines, for controllers that run in virtual time.

`SimulatedCluster` is a `Scheduler` and a `Transport`. What is real: every request and reply goes
through the codec and back, so that what cannot be sent fails and every byte is counted; errors
arrive as over the wire; a call that is given up is cancelled on the other side, one latency later.
What is simulated: generation, training and transfers are pauses of random length, and rows are
numbers of tokens. A store holds the names of its shards, so whoever reads one that was swept
fails, as with real workers. The cluster keeps its own books of what the workers were asked to do.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from areal_sc.config.schema import SchedulerConfig, TransportConfig
from areal_sc.errors import PeerLost, RpcTimeout, ShardGone, StoreFull
from areal_sc.metadata import (
    TRAJECTORY_BYTES_PER_TOKEN,
    TRAJECTORY_FIELDS,
    BatchMetadata,
    RowMetadata,
    ShardMetadata,
    TensorMetadata,
)
from areal_sc.schedulers.base import LaunchRequest, RunningWorker
from areal_sc.transport.codec import (
    Cancel,
    Failure,
    FrameLimits,
    Reply,
    Request,
    decode,
    encode,
)
from areal_sc.transport.remote_errors import error_of, failure_of
from areal_sc.transport.shard_ids import make_shard_id, parse_shard_id
from areal_sc.workers.base import StaleCall
from areal_sc.workers.spec import WorkerReport, WorkerSpec

Number = float | Callable[[random.Random], float]
"""The same one always, or one that is drawn."""

LIMITS = FrameLimits()
PROMPT_TOKENS = 4
WEIGHTS_BYTES = 1


@dataclass
class Behavior:
    """How simulated workers behave.

    Attributes:
        generation_s: of one group.
        completion_tokens: of one row.
        training_s: of one training step, and of one recomputation of log-probabilities.
        sealing_s: of one rank's seal of its weights.
        publication_s: of one worker's pull of the weights.
        evaluation_s: of one episode.
        latency_s: of one message, one way.
        reply_delay_s: what the reply of a finished group takes longer, while other messages of
            the worker overtake it.
        group_rejection: probability that all rows of a group are rejected.
        row_rejection: the same, of each row.
    """

    generation_s: Number = 1.0
    completion_tokens: Number = 8
    training_s: Number = 1.0
    sealing_s: Number = 0.01
    publication_s: Number = 0.1
    evaluation_s: Number = 1.0
    latency_s: float = 0.001
    reply_delay_s: Number = 0.0
    group_rejection: float = 0.0
    row_rejection: float = 0.0


@dataclass(frozen=True)
class GroupStart:
    """A worker was asked to run a group."""

    time_s: float
    worker: str
    worker_version: int
    group_id: int
    attempt: int
    admitted_version: int
    dataset_index: int


@dataclass
class TrainedStep:
    """What the ranks were given to train at one policy version, over all minibatches."""

    version: int
    time_s: float
    num_running_groups: int
    rows: list[RowMetadata] = field(default_factory=list)
    min_token_versions: set[int | None] = field(default_factory=set)


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
        live, dead = set(args["live"]), set(args.get("dead", ()))
        for n in list(self.sizes):
            if n in dead or (n <= args["acknowledged"] and n not in live):
                del self.sizes[n]
                self.group_of.pop(n, None)


Handler = Callable[[dict[str, Any]], Awaitable[Any]]


class SimulatedWorker:
    """Base of both kinds: a store, a life, and methods by name.

    Attributes:
        exit_status: how its process ended; None while it lives.
        is_hung: it lives, and answers nothing.
    """

    def __init__(self, cluster: SimulatedCluster, request: LaunchRequest, incarnation: str) -> None:
        self.cluster = cluster
        self.config = request.engine_config
        self.name = f"{request.role}/{request.index}"
        self.incarnation = incarnation
        self.address = f"sim://{self.name}/{incarnation}"
        self.store = SimulatedStore(self.name, incarnation, request.store_bytes)
        self.version = 0
        self.exit_status: str | None = None
        self.is_hung = False
        self.connections: list[SimulatedConnection] = []
        self.methods: dict[str, Handler] = {
            "ping": self.ping,
            "initialize": self.initialize,
            "shutdown": self.shutdown,
            "sweep": self.sweep,
            "stats": self.stats,
        }

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
            "batch": self._seal(args, rows).to_wire(),
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
            shard_id=self.store.put(num_tokens * TRAJECTORY_BYTES_PER_TOKEN, group_id),
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
        batch = BatchMetadata.from_wire(args["batch"])
        assert batch.fields in (("input_ids",), ())
        await self.read_shards(batch, self.cluster.behavior.training_s)
        return self.shard_reply(self.store.put(4 * batch.num_tokens) if batch.rows else "")

    async def ppo_update(self, args: dict[str, Any]) -> dict[str, float]:
        if args["operation"] in self.operations:
            return dict(self.operations[args["operation"]])
        if args["expected_version"] != self.version:
            raise StaleCall(
                f"expected {args['expected_version']}, {self.name} is at {self.version}"
            )
        for wire in args["minibatches"]:
            batch = BatchMetadata.from_wire(wire)
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


class SimulatedCluster:
    """Starts simulated workers and connects to them.

    Attributes:
        rollout_class, train_class: what it starts.
        workers: by name, e.g. `rollout/0`.
        starts: groups that workers were asked to run, in order.
        trained: what the ranks trained, in order.
        sealed_versions: (time, version) of each rank's publications.
    """

    def __init__(self, run_dir: Path, behavior: Behavior, seed: int = 0) -> None:
        self.run_dir = run_dir
        self.rollout_class: type[SimulatedWorker] = SimulatedRolloutWorker
        self.train_class: type[SimulatedWorker] = SimulatedTrainWorker
        self.config = SchedulerConfig(run_dir=str(run_dir), transport=TransportConfig())
        self.behavior = behavior
        self.rng = random.Random(seed)
        self.workers: dict[str, SimulatedWorker] = {}
        self.starts: list[GroupStart] = []
        self.trained: list[TrainedStep] = []
        self.sealed_versions: list[tuple[float, int]] = []
        self._ids = itertools.count()

    # ------------------------------------------------------------------ Scheduler

    async def launch(self, request: LaunchRequest) -> RunningWorker:
        await self.spend(self.rng.random())
        incarnation = f"{next(self._ids):012x}"
        kind = self.train_class if request.role == "train" else self.rollout_class
        worker = kind(self, request, incarnation)
        self.workers[worker.name] = worker
        spec = WorkerSpec(
            role=request.role,
            index=request.index,
            incarnation=incarnation,
            engine=request.engine,
            engine_config=request.engine_config,
            run_dir=self.config.run_dir,
            transport=asdict(self.config.transport),
            store_bytes=request.store_bytes,
            orphan_timeout_s=self.config.orphan_timeout_s,
        )
        report = WorkerReport(worker.name, incarnation, worker.address, 10_000 + len(self.workers))
        return RunningWorker(spec, report)

    async def exit_status(self, worker: RunningWorker) -> str | None:
        return self.workers[worker.name].exit_status

    async def stop(self, workers: list[RunningWorker]) -> None:
        for worker in workers:
            self.workers[worker.name].end("signal 9 (SIGKILL)")

    # ------------------------------------------------------------------ Transport

    def connect(self, address: str, node_id: str, incarnation: str) -> SimulatedConnection:
        worker = self.workers[node_id]
        assert worker.address == address
        connection = SimulatedConnection(worker, incarnation, self.behavior.latency_s)
        worker.connections.append(connection)
        return connection

    async def close(self) -> None:
        """Nothing is left to close: connections are closed by their users."""

    # ------------------------------------------------------------------ for workers and tests

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def rollout_workers(self) -> list[SimulatedRolloutWorker]:
        return [w for w in self.workers.values() if isinstance(w, SimulatedRolloutWorker)]

    @property
    def train_workers(self) -> list[SimulatedTrainWorker]:
        return [w for w in self.workers.values() if isinstance(w, SimulatedTrainWorker)]

    def new_id(self) -> str:
        """Deterministic, of the length of real ids."""
        return f"{next(self._ids):012x}"

    def owner(self, node_id: str, address: str) -> SimulatedStore:
        worker = self.workers[node_id]
        if worker.exit_status is not None or worker.address != address:
            raise PeerLost(f"{node_id} at {address} is lost")
        return worker.store

    def draw(self, number: Number) -> float:
        return number(self.rng) if callable(number) else number

    async def spend(self, duration: Number) -> None:
        await asyncio.sleep(self.draw(duration))

    def note_start(self, worker: SimulatedRolloutWorker, args: dict[str, Any]) -> None:
        self.starts.append(
            GroupStart(
                self.now_s,
                worker.name,
                worker.version,
                args["group_id"],
                args["attempt"],
                args["admitted_version"],
                args["index"],
            )
        )

    def note_trained(self, version: int, batch: BatchMetadata) -> None:
        if not self.trained or self.trained[-1].version != version:
            num_running = sum(len(worker.running) for worker in self.rollout_workers)
            self.trained.append(TrainedStep(version, self.now_s, num_running))
        self.trained[-1].rows += batch.rows
        self.trained[-1].min_token_versions.add(batch.min_token_version)


class SimulatedConnection:
    """One controller's connection to one worker."""

    def __init__(self, worker: SimulatedWorker, incarnation: str, latency_s: float) -> None:
        self.node_id = worker.name
        self.bytes_sent = 0
        self.bytes_received = 0
        self._worker = worker
        self._incarnation = incarnation
        self._latency_s = latency_s
        self._pending: set[asyncio.Future[Reply | Failure]] = set()
        self._executions: set[asyncio.Task[None]] = set()
        self._ids = itertools.count()

    async def call(
        self, method: str, args: dict[str, Any], *, timeout_s: float, request_id: str | None = None
    ) -> Any:
        value, _ = await self.call_frames(method, args, timeout_s=timeout_s, request_id=request_id)
        return value

    async def call_frames(
        self,
        method: str,
        args: dict[str, Any],
        *,
        timeout_s: float,
        frames: Sequence[Any] = (),
        request_id: str | None = None,
    ) -> tuple[Any, list[Any]]:
        assert not frames, "controllers send no payload"
        request_id = request_id or f"{next(self._ids):032x}"
        wire = encode(Request(request_id, self._incarnation, method, args), LIMITS)
        if self._worker.exit_status is not None:
            raise self._peer_lost()
        self.bytes_sent += sum(map(len, wire))
        answer: asyncio.Future[Reply | Failure] = asyncio.get_running_loop().create_future()
        self._pending.add(answer)
        execution = self._execute(wire, answer)
        try:
            async with asyncio.timeout(timeout_s):
                message = await answer
        except BaseException as error:
            self._cancel(request_id, execution)
            if isinstance(error, TimeoutError):
                raise RpcTimeout(
                    f"{method} on {self.node_id} gave no reply within {timeout_s:g} s"
                ) from None
            raise
        finally:
            self._pending.discard(answer)
        if isinstance(message, Failure):
            raise error_of(message, node_id=self.node_id, method=method)
        return message.value, []

    def fail_pending(self, error: Exception) -> None:
        for answer in self._pending:
            if not answer.done():
                answer.set_exception(error)

    async def close(self) -> None:
        self.lose_peer()

    def lose_peer(self) -> None:
        """The far side ends: what it executes is never answered."""
        for execution in self._executions:
            execution.cancel()
        self.fail_pending(self._peer_lost())

    def _peer_lost(self) -> PeerLost:
        return PeerLost(f"{self.node_id} is lost: the connection ended")

    def _cancel(self, request_id: str, execution: asyncio.Task[None]) -> None:
        """Tells the worker that nobody waits any more; it is still at work until that arrives."""
        if not execution.done() and self._worker.exit_status is None:
            self.bytes_sent += sum(map(len, encode(Cancel(request_id, self._incarnation), LIMITS)))
            asyncio.get_running_loop().call_later(self._latency_s, execution.cancel)

    def _execute(
        self, wire: Sequence[Any], answer: asyncio.Future[Reply | Failure]
    ) -> asyncio.Task[None]:
        execution = asyncio.create_task(self._run(wire, answer), name=f"method of {self.node_id}")
        self._executions.add(execution)
        execution.add_done_callback(self._executions.discard)
        return execution

    async def _run(self, wire: Sequence[Any], answer: asyncio.Future[Reply | Failure]) -> None:
        await asyncio.sleep(self._latency_s)
        request = decode([memoryview(frame) for frame in wire], LIMITS)
        assert isinstance(request, Request)
        if self._worker.is_hung:
            await asyncio.get_running_loop().create_future()
        reply: Reply | Failure
        try:
            handler = self._worker.methods[request.method]
            reply = Reply(request.request_id, await handler(request.args))
        except Exception as error:
            reply = failure_of(error, request.request_id)
        frames = encode(reply, LIMITS)
        cluster = self._worker.cluster
        delay_s = cluster.behavior.reply_delay_s if request.method == "run_group" else 0.0
        await asyncio.sleep(self._latency_s + cluster.draw(delay_s))
        self.bytes_received += sum(map(len, frames))
        if not answer.done():
            message = decode([memoryview(frame) for frame in frames], LIMITS)
            assert isinstance(message, Reply | Failure)
            answer.set_result(message)
