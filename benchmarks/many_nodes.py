"""What many nodes cost: the trainers' network at a publication, the controller at each heartbeat.

    python benchmarks/many_nodes.py [--quick] [--json FILE] [--nodes N] [--model-mb N]

Publication: the real controllers publish to rollout nodes that are simulated in a few processes
(weight_nodes.py): real data planes, and shared memory of its own for each node, so that weights
cross nodes over bulk sockets alone. Every worker compares what it has read.

- sent: what the bulk servers of the trainers send for one version, over the size of the model.
- seconds: from the publication until all workers hold the version. All nodes share the machine.

Heartbeats: the watch of the real controller over nodes of 8 workers that are well, as CPU of its
process over wall time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import planes_ours
import report
from planes_role import Role
from simulated_workers import WORKERS_PER_NODE
from weight_nodes import NUM_PARAMETERS, STORE_BYTES

from areal_sc import RolloutController, TrainController, start
from areal_sc.config.parallel_settings import ParallelConfig
from areal_sc.config.schema import ActorConfig, RolloutConfig, SchedulerConfig
from areal_sc.engines.handles import FSDPPPOActor, LocalGenerator
from areal_sc.transport.security.keys import RunKeys

NUM_HOSTS = 4
NUM_BEAT_HOSTS = 8
NUM_RANKS = 2
HEARTBEAT_S = 20.0
"""Longer than usual: simulated nodes share the cores of the controllers."""


def measure_publication(size: argparse.Namespace) -> report.Metrics:
    """Bytes and seconds of publications to all nodes."""
    numel = size.model_mb * 1_000_000 // (4 * NUM_PARAMETERS * NUM_RANKS)
    model_bytes = 4 * NUM_PARAMETERS * NUM_RANKS * numel
    with planes_ours.run() as folder, ExitStack() as stack:
        trainers = _host(stack, folder)
        given = {"numel": numel, "num_ranks": NUM_RANKS}
        ranks = trainers.call("start", role="train", node=0, first=0, count=NUM_RANKS, **given)
        hosts = [_host(stack, folder) for _ in range(NUM_HOSTS)]
        workers = []
        for node in range(size.nodes):
            first = node * size.workers_per_node
            workers += hosts[node % NUM_HOSTS].call(
                "start",
                role="rollout",
                node=node,
                first=first,
                count=size.workers_per_node,
                **given,
            )
        actor, rollout = _controllers(folder, ranks, workers)
        sent, seconds, others = [], [], []
        with start(actor, rollout):
            for _ in range(size.versions):
                before = trainers.call("served_bytes")
                between = sum(host.call("served_bytes") for host in hosts)
                began_s = time.perf_counter()
                actor.publish_weights(rollout)
                rollout.wait_for_weights()
                seconds.append(time.perf_counter() - began_s)
                sent.append((trainers.call("served_bytes") - before) / model_bytes)
                now = sum(host.call("served_bytes") for host in hosts)
                others.append((now - between) / model_bytes)
    return {
        "sent_by_trainers_vs_model": max(sent),
        "sent_by_nodes_vs_model": max(others),
        "publication_s": statistics.median(seconds),
    }


def measure_heartbeats(size: argparse.Namespace) -> report.Metrics:
    """CPU of a controller that watches all nodes."""
    num_workers = size.beat_nodes * WORKERS_PER_NODE
    share = num_workers // NUM_BEAT_HOSTS
    with planes_ours.run() as folder, ExitStack() as stack:
        controller = _role(stack, folder, "planes_controller.py")
        hosts = [_role(stack, folder, "simulated_workers.py") for _ in range(NUM_BEAT_HOSTS)]
        for number, host in enumerate(hosts):
            host.begin("start", role="rollout", first=number * share, count=share)
        workers = [worker for host in hosts for worker in host.finish()]
        controller.call("connect", workers=workers)
        watched = controller.call("watch", seconds=size.watch_s, num_fan_outs=0)
    return {"heartbeats_cpu_percent": 100 * watched["cpu_share"]}


def _controllers(
    folder: Path, ranks: list[dict[str, str]], workers: list[dict[str, str]]
) -> tuple[TrainController, RolloutController]:
    actor = ActorConfig(
        path="/no/model", parallel=ParallelConfig(data=NUM_RANKS), memory_snapshots=False
    )
    rollout = RolloutConfig(
        path="/no/model",
        num_workers=len(workers),
        train_batch_groups=len(workers),
        max_context_tokens=64,
        store_bytes=STORE_BYTES,
    )
    config = SchedulerConfig(run_dir=str(folder), heartbeat_interval_s=HEARTBEAT_S)
    keys = RunKeys.read(folder / "keys.json")
    train_nodes, rollout_nodes = map(planes_ours.agents_of, (ranks, workers))
    return (
        TrainController(FSDPPPOActor(actor), planes_ours.Nodes(config, keys, train_nodes)),
        RolloutController(LocalGenerator(rollout), planes_ours.Nodes(config, keys, rollout_nodes)),
    )


def _host(stack: ExitStack, folder: Path) -> Role:
    return _role(stack, folder, "weight_nodes.py")


def _role(stack: ExitStack, folder: Path, script: str) -> Role:
    path = Path(__file__).with_name(script)
    return stack.enter_context(Role(script, path, [str(folder)]))


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--nodes", type=int, default=64, help="that weights are published to")
    parser.add_argument("--workers-per-node", type=int, default=2, help="of those nodes")
    parser.add_argument("--model-mb", type=int, default=32, help="size of the model")
    parser.add_argument("--versions", type=int, default=5, help="that are published")
    parser.add_argument("--beat-nodes", type=int, default=512, help="with 8 workers each")
    parser.add_argument("--watch-s", type=float, default=20.0, help="of the heartbeats")
    arguments = report.parse(parser, nodes=6, model_mb=4, versions=2, beat_nodes=32, watch_s=3.0)
    metrics = measure_publication(arguments) | measure_heartbeats(arguments)
    report.print_metrics(
        "Many nodes",
        {
            "nodes": f"{arguments.nodes} with {arguments.workers_per_node} workers each",
            "model": f"{arguments.model_mb} MB on {NUM_RANKS} ranks",
            "heartbeats": f"{arguments.beat_nodes} nodes with {WORKERS_PER_NODE} workers each",
        },
        metrics,
    )
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
