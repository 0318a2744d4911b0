"""The real controllers on virtual time, with workers that take the time that costs say."""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from msgspec.structs import replace
from scale_costs import Costs, Server, Spans
from simulation.behavior import Behavior
from simulation.cluster import SimulatedCluster
from simulation.disk import SimulatedDisk
from simulation.settings import Settings, configs
from simulation.train_worker import SimulatedTrainWorker
from simulation.workers import SimulatedRolloutWorker

from areal_sc.controller.rollout.rollout_controller import RolloutController
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.engines.handles import FSDPPPOActor, LocalGenerator
from areal_sc.fleet.runtime import Runtime
from areal_sc.metadata import BatchMetadata, RowMetadata
from areal_sc.sizing.store_room import trajectory_bytes
from areal_sc.weights.published import WeightsReference
from areal_sc.workers import calls, rank_methods


class CostedCluster(SimulatedCluster):
    """Workers whose calls take as long as `costs` say.

    Attributes:
        servers: of each rollout worker.
        training_devices: of all ranks together.
        all_servers: of all rollout workers.
        num_groups, groups_s: that have ended, and what they took together.
    """

    costs: Costs
    servers: int
    training_devices: int
    num_groups: int = 0
    groups_s: float = 0.0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.all_servers: list[Server] = []

    def counters(self) -> dict[str, float]:
        """As engines and rollout workers count."""
        for server in self.all_servers:
            server.busy.note_running(server.num_running)
        return {
            "answer_s": sum(server.busy.answer_s for server in self.all_servers),
            "busy_s": sum(server.busy.busy_s for server in self.all_servers),
            "generated_tokens": sum(server.num_tokens for server in self.all_servers),
            "weight_updates": sum(server.num_updates for server in self.all_servers),
            "recomputed_tokens": sum(server.num_recomputed_tokens for server in self.all_servers),
            "update_stall_s": sum(server.load_s for server in self.all_servers),
            "recompute_s": sum(server.recompute_s for server in self.all_servers),
            "finished_groups": self.num_groups,
            "group_s": self.groups_s,
        }


class CostedRolloutWorker(SimulatedRolloutWorker):
    """Its answers take the time that its servers take for them."""

    cluster: CostedCluster

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.servers = [Server(self.cluster.costs) for _ in range(self.cluster.servers)]
        self.cluster.all_servers.extend(self.servers)

    async def _play_group(self, run: calls.GroupAttempt, group: calls.RunGroup) -> calls.GroupReply:
        costs, began_s = self.cluster.costs, self.cluster.now_s
        rng = random.Random(group.group_id)  # the same lengths in all runs
        ended: list[tuple[int, Spans]] = []
        done = asyncio.Event()

        def end(num_tokens: int, spans: Spans) -> None:
            ended.append((num_tokens, spans))
            if len(ended) == group.group_size:
                done.set()

        for _ in range(group.group_size):
            num_tokens = costs.draw_length(rng)
            server = min(self.servers, key=lambda server: server.num_answers)
            server.add(num_tokens, partial(end, num_tokens))
        await done.wait()
        self.cluster.num_groups += 1
        self.cluster.groups_s += self.cluster.now_s - began_s
        sealed = {}
        for number, (num_tokens, spans) in enumerate(ended):
            row = RowMetadata(
                group_id=group.group_id,
                attempt=group.attempt,
                sequence_length=costs.prompt_tokens + num_tokens,
                reward=float(number % 2),
                admitted_version=group.admitted_version,
                version_spans=tuple(spans),
                episode=number,
            )
            num_bytes = trajectory_bytes(row.sequence_length)
            sealed[number] = self.store.put(num_bytes, calls.FinishedEpisode(run, number, (row,)))
        num_waiting = sum(server.num_answers - server.num_running for server in self.servers)
        return replace(self._close_group(run, group, sealed), num_waiting=num_waiting)

    async def _update(self, weights: WeightsReference) -> None:
        await self.spend(self.cluster.costs.publish_s)
        for server in self.servers:
            server.update(weights.version)
        self.version = weights.version
        self.history.append((self.cluster.now_s, self.version))


class CostedTrainWorker(SimulatedTrainWorker):
    """Stands for all ranks."""

    cluster: CostedCluster

    async def read_shards(self, batch: BatchMetadata, duration: Any = 0.0) -> None:
        await self.spend(duration)

    async def update(self, args: rank_methods.Update) -> dict[str, float]:
        num_tokens = sum(batch.num_tokens for batch in args.batches)
        costs, devices = self.cluster.costs, self.cluster.training_devices
        self.cluster.behavior.training_s = costs.training_s(num_tokens, devices)
        return await super().update(args)


@asynccontextmanager
async def costed_run(
    costs: Costs, servers: int, training_devices: int, *, num_nodes: int = 0, **settings: Any
) -> AsyncIterator[tuple[TrainController, RolloutController, CostedCluster]]:
    """A started run, whose generation goes on until it is left.

    Args:
        servers: of each rollout worker.
        training_devices: of all ranks together.
        num_nodes: as many rollout workers as there may be; 0: those of the start.
        settings: further ones of `Settings`.
    """
    of_run = Settings(
        batch_groups=costs.prompts,
        group_size=costs.answers,
        num_minibatches=1,
        max_concurrent_groups=1 << 30,
        store_groups=1 << 20,
        max_context_tokens=costs.prompt_tokens + costs.max_tokens,
        group_timeout_s=1e6,
        num_prompts=1 << 20,
        behavior=Behavior(sealing_s=0.0, publication_s=0.0, latency_s=0.0005),
        **settings,
    )
    with tempfile.TemporaryDirectory(prefix="simulated-run-") as folder:
        cluster = CostedCluster(Path(folder), of_run.behavior)
        cluster.costs, cluster.servers = costs, servers
        cluster.training_devices = training_devices
        cluster.rollout_class, cluster.train_class = CostedRolloutWorker, CostedTrainWorker
        cluster.num_nodes = num_nodes or of_run.num_rollout_workers
        # nobody dies, and beats of hundreds of workers through simulated days are the most work
        cluster.config.heartbeat_interval_s = 60.0
        runtime = Runtime(cluster.transport(), cluster.new_id, SimulatedDisk())
        actor_config, rollout_config = configs(of_run)
        actor = TrainController(FSDPPPOActor(actor_config), cluster, runtime=runtime)
        rollout = RolloutController(LocalGenerator(rollout_config), cluster, runtime=runtime)
        rollout.groups.admission.total_steps = None
        await asyncio.gather(actor.start_async(), rollout.start_async())
        try:
            yield actor, rollout, cluster
        finally:
            await asyncio.gather(actor.close_async(), rollout.close_async())
