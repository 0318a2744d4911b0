"""Weights published as what has changed: a hundred versions, while workers and trainers die.

Real data planes on several nodes, the real publication and its tree of sources; engines are tensors
of this test, which knows each version by itself.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from areal_sc.config.schema import (
    ActorConfig,
    RolloutConfig,
    SchedulerConfig,
    TransportConfig,
    WeightUpdateConfig,
)
from areal_sc.controller.background import Background
from areal_sc.controller.rollout.worker_set import RolloutWorkerState
from areal_sc.engines.handles import make_generator
from areal_sc.fleet.worker_life import LifeState
from areal_sc.transport.plane import DataPlane
from areal_sc.transport.rpc.server import RpcServer
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.transport.shards.memory_folder import ArenaFolder
from areal_sc.weights import methods
from areal_sc.weights import updates as weight_updates
from areal_sc.weights.adopter import HeldWeights
from areal_sc.weights.channel import PullChannel
from areal_sc.weights.published import ShardReference
from areal_sc.weights.rank_weights import RankWeights
from areal_sc.weights.updates import WeightUpdates
from areal_sc.workers import calls
from areal_sc.workers.operations import Kind, Operation, Operations
from areal_sc.workers.rank import Rank

NUM_VERSIONS = 100
NUM_RANKS = 2
NUM_NODES, PER_NODE = 4, 2
SIZES = {"embed": 30_000, "layer": 8_000, "norm": 7, "empty": 0}
WHOLE_EVERY = 30

Weights = dict[str, np.ndarray]
"""name -> [numel] uint16: the bits of each parameter."""


class Process:
    """One life of a worker: its store and sockets."""

    plane: DataPlane

    def __init__(self, name: str, node: ArenaFolder, stack: AsyncExitStack, life: int) -> None:
        self.name = name
        self.incarnation = f"life{life}-{name.replace('/', '-')}"
        self._node = node
        self._stack = stack

    async def start(self) -> None:
        transport = ZmqTransport()
        self._stack.push_async_callback(transport.close)
        self.plane = DataPlane(
            self.name,
            self.incarnation,
            TransportConfig(stalled_peer_timeout_s=2, pull_timeout_s=20, chunk_bytes=4096),
            store_bytes=1 << 20,
            transport=transport,
            arenas=self._node,
        )
        served = await self.plane.start()
        self._server = RpcServer(served, node_id=self.name, incarnation=self.incarnation)
        self.address = await self._server.start()

    async def end(self) -> None:
        await self._server.close()
        await self.plane.close()


class Trainer(Process):
    """What `RankWeights` needs of a rank: it has the first or the second half of each parameter.

    Attributes:
        weights: all parameters, as they are now.
    """

    def __init__(self, number: int, weights: Weights, *own: Any) -> None:
        super().__init__(f"train/{number}", *own)
        self.number = number
        self.weights = weights
        self.operations = Operations(self.name)
        self.engine = self
        self.recorder = SimpleNamespace(span=lambda *_, **__: nullcontext())
        self.handle = SimpleNamespace(
            config=ActorConfig(weight_update=WeightUpdateConfig(whole_every_steps=WHOLE_EVERY))
        )
        rank: Any = self
        self.gives = RankWeights(rank)

    def published_parts(self) -> tuple[dict[str, torch.Tensor], Iterator[torch.Tensor]]:
        parts = {
            name: torch.from_numpy(np.array_split(bits, NUM_RANKS)[self.number].view(np.int16))
            for name, bits in self.weights.items()
        }
        parts = {name: part.view(torch.bfloat16) for name, part in parts.items()}
        return {name: part.to("meta") for name, part in parts.items()}, iter(parts.values())

    async def compute(self, function: Any) -> Any:
        return await asyncio.to_thread(function)

    sealed = Rank.sealed

    @property
    def spec(self) -> Any:
        return self


class Generator(Process):
    """A rollout worker, whose engine compares what it gets."""

    def __init__(self, *own: Any) -> None:
        super().__init__(*own)
        self.one_update = asyncio.Lock()
        self.has: tuple[int, int] | None = None

    async def start(self) -> None:
        await super().start()
        self.held = HeldWeights(self.plane)


class Run:
    """The trainers' side and the fleet of rollout workers, in place of real ones.

    Attributes:
        versions: policy -> its weights, as the test made them.
        counters: of all lives of workers.
    """

    def __init__(self, root: Path, stack: AsyncExitStack, seed: int) -> None:
        self.draw = random.Random(seed)
        self.bits = np.random.default_rng(seed)
        self.versions: dict[tuple[int, int], Weights] = {}
        self.counters: Counter[str] = Counter()
        self.served_bytes = 0
        self.lineage = 0
        self._stack = stack
        self._num_lives = 0
        self._nodes = []
        for number in range(NUM_NODES + 1):
            folder = ArenaFolder(root / f"node-{number}", "run")
            stack.callback(folder.remove)
            self._nodes.append(folder)
        update = WeightUpdateConfig(whole_every_steps=WHOLE_EVERY)
        self.config = SchedulerConfig(run_dir="unused")
        config = RolloutConfig(
            num_workers=NUM_NODES * PER_NODE,
            max_context_tokens=1,
            train_batch_groups=1,
            store_bytes=1 << 20,
            weight_update=update,
        )
        self.background = Background(60.0, lambda: "")
        fleet: Any = self
        self.updates = WeightUpdates(
            make_generator(config), fleet, self.background, lambda state: None
        )
        train_fleet: Any = SimpleNamespace(
            call_all=self._seal_all, call_each=self._sweep_each, members=[]
        )
        self.train_members = train_fleet.members
        self.channel = PullChannel(ActorConfig(weight_update=update), train_fleet, lambda: "id")
        self.ranks: list[Trainer] = []
        self.awaits_machines = False
        self.members: list[Any] = []

    async def start(self) -> None:
        first = {
            name: self.bits.integers(0, 1 << 16, size, np.uint16) for name, size in SIZES.items()
        }
        for number in range(NUM_RANKS):
            self.ranks.append(Trainer(number, first, self._nodes[0], self._stack, 0))
            await self.ranks[-1].start()
            worker = SimpleNamespace(node="node-0")
            self.train_members.append(SimpleNamespace(worker=worker, rank=number))
        for number in range(NUM_NODES * PER_NODE):
            node = 1 + number // PER_NODE
            member: Any = SimpleNamespace(
                name=f"rollout/{number}",
                life=SimpleNamespace(is_up=True, is_leaving=False, state=LifeState.serving),
                worker=SimpleNamespace(node=f"node-{node}", store_room_bytes=0, incarnation=""),
                process=await self._generator(number),
            )
            self.members.append(member)
        store: Any = None
        self.updates.states = [
            RolloutWorkerState(member, number, store) for number, member in enumerate(self.members)
        ]

    async def _generator(self, number: int) -> Generator:
        self._num_lives += 1
        node = self._nodes[1 + number // PER_NODE]
        process = Generator(f"rollout/{number}", node, self._stack, self._num_lives)
        await process.start()
        return process

    async def call(self, member: Any, method: Any, args: Any, *, timeout_s: float) -> Any:
        process: Generator = member.process
        async with process.one_update:
            if method is methods.COPY_WEIGHTS:
                ids = await process.held.copy(args)
                return tuple(ShardReference(process.name, process.address, i) for i in ids)
            assert method is methods.ADOPT_WEIGHTS
            read = dict(await process.held.read(args))
            expected = self.versions[args.policy]
            assert read.keys() == expected.keys()
            for name, tensor in read.items():
                got = tensor.view(torch.int16).numpy().view(np.uint16)
                assert np.array_equal(got, expected[name]), (args.policy, name, member.name)
            process.has = args.policy
            process.held.keep_only(args)
            return None

    def lose(self, *what: Any) -> None:
        raise AssertionError(what)

    async def lose_hung(self, error: Exception, members: Any, limit: str) -> None:
        """No worker hangs."""

    async def _seal_all(self, method: Any, args: Any) -> list[Any]:
        return [await rank.gives.seal(args) for rank in self.ranks]

    async def _sweep_each(self, method: Any, sweeps: list[calls.Sweep]) -> None:
        for rank, it in zip(self.ranks, sweeps, strict=True):
            adopted = None if it.adopted_live is None else set(it.adopted_live)
            rank.plane.store.sweep(it.live, it.acknowledged, it.dead, adopted_live=adopted)

    def train(self, share: float) -> None:
        """A share of all values changes, in their lower bits."""
        new = {name: bits.copy() for name, bits in self.ranks[0].weights.items()}
        for bits in new.values():
            changed = self.bits.random(len(bits)) < share
            bits[changed] ^= self.bits.integers(1, 8, int(changed.sum()), np.uint16)
        for rank in self.ranks:
            rank.weights = new

    async def publish(self, version: int) -> None:
        self.versions[self.lineage, version] = self.ranks[0].weights
        operation = Operation(self.lineage, version - 1, Kind.publish)
        reader: Any = SimpleNamespace(adopt_weights=self.updates.adopt)
        oldest = await self.updates.hold()
        await self.channel.send(await self.channel.seal(operation, version, reader, oldest), reader)

    async def go_back(self, version: int) -> None:
        """The run goes back to a version, in a new lineage."""
        self.updates.forget()
        weights = self.versions[self.lineage, version]
        self.lineage += 1
        self.versions[self.lineage, version] = weights
        for rank in self.ranks:
            rank.weights = weights
            rank.operations.lineage, rank.operations.version = self.lineage, version

    async def restart_rank(self, version: int, *, is_exact: bool) -> None:
        """A rank dies, and makes the version anew; not to the bit, as on a GPU, if so."""
        old = self.draw.choice(self.ranks)
        self.served_bytes += old.plane.stats().served_bytes
        await old.end()
        self._num_lives += 1
        weights = old.weights
        if not is_exact:
            weights = {name: bits.copy() for name, bits in weights.items()}
            weights["embed"][[0, -1]] ^= 1
        new = Trainer(old.number, weights, self._nodes[0], self._stack, self._num_lives)
        await new.start()
        new.operations.lineage, new.operations.version = self.lineage, version - 1
        self.ranks[old.number] = new
        for rank in self.ranks:
            rank.weights = weights
            rank.operations.version = version - 1
        self.versions[self.lineage, version] = weights
        operation = Operation(self.lineage, version - 1, Kind.publish, f"again {self._num_lives}")
        self.updates.renew(await self.channel._seal(operation, version))

    async def kill(self, number: int) -> None:
        """A rollout worker dies; what it held goes with it."""
        member, state = self.members[number], self.updates.states[number]
        member.life.is_up, member.life.state = False, LifeState.lost
        self.updates.leave_out(state)
        self._count(member.process)
        await member.process.end()

    async def bring_back(self, number: int) -> None:
        member, state = self.members[number], self.updates.states[number]
        member.process = await self._generator(number)
        member.life.is_up, member.life.state = True, LifeState.serving
        self.updates._begin(state)

    def _count(self, process: Generator) -> None:
        self.counters.update(process.held.counters)

    async def end(self) -> None:
        await self.background.close()
        for member in self.members:
            if member.life.is_up:
                self._count(member.process)
                await member.process.end()
        for rank in self.ranks:
            self.served_bytes += rank.plane.stats().served_bytes
            await rank.end()


@pytest.mark.parametrize("seed", [1, 2])
async def test_the_bits_are_those_of_the_trainers_whoever_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(weight_updates, "RETRY_S", 0.01)
    async with AsyncExitStack() as stack:
        run = Run(tmp_path, stack, seed)
        stack.push_async_callback(run.end)
        await run.start()
        version = num_published = 0
        dead: set[int] = set()
        while num_published < NUM_VERSIONS:
            run.train(run.draw.choice([0.0, 0.01, 0.01, 0.05, 0.05, 0.05, 0.2, 0.6]))
            version += 1
            num_published += 1
            await run.publish(version)
            await asyncio.sleep(run.draw.choice([0.0, 0.001, 0.003, 0.01, 0.05]))
            for number in list(dead):
                if run.draw.random() < 0.4:  # it has missed some versions by then
                    dead.remove(number)
                    await run.bring_back(number)
            if run.draw.random() < 0.25:
                alive = [n for n in range(NUM_NODES * PER_NODE) if n not in dead]
                for number in run.draw.sample(alive, min(len(alive) - 1, run.draw.randint(1, 3))):
                    dead.add(number)
                    await run.kill(number)
            if run.draw.random() < 0.06:
                await run.restart_rank(version, is_exact=True)
            await run.updates.wait_until_newest()
            for member in run.members:
                assert not member.life.is_up or member.process.has == (run.lineage, version)
            if run.draw.random() < 0.05:
                await run.restart_rank(version, is_exact=False)
            if version > 3 and run.draw.random() < 0.04:
                version -= run.draw.randint(1, 2)
                await run.go_back(version)
    assert run.counters["changed_copies"] > NUM_VERSIONS, "most were made of changes"
    assert run.counters["whole_copies"] > 20
    assert run.counters["unfit_changes"] > 0, "of versions that were made again, not to the bit"
