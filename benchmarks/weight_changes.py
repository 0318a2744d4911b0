"""Publication of what has changed in the weights, against the whole.

    python benchmarks/weight_changes.py [--quick] [--json FILE] [--nodes N] [--model-mb N]

The real controllers publish bfloat16 weights to simulated rollout nodes, a process each
(changed_nodes.py): real data planes, and shared memory of its own for each node, so that weights
cross nodes over bulk sockets alone. Every worker compares what it has read. Versions are published
in turn by their changes and whole, in one run, each after a share of all values has changed.

- bytes: what the trainers' bulk servers send of a version, over what they send of the whole one.
- seconds: from the publication until all workers hold the version, over the same of the whole one;
  medians. What the trainers take to compare is in it, and all nodes share the machine.
- seal: the part of it in which training waits, likewise.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import planes_ours
import report
from changed_nodes import WHOLE_EVERY_STEPS
from planes_role import Role
from weight_nodes import NUM_PARAMETERS, STORE_BYTES

from areal_sc import RolloutController, TrainController, start
from areal_sc.config.parallel_settings import ParallelConfig
from areal_sc.config.schema import ActorConfig, RolloutConfig, SchedulerConfig, WeightUpdateConfig
from areal_sc.engines.handles import FSDPPPOActor, LocalGenerator
from areal_sc.transport.security.keys import RunKeys

NUM_RANKS = 2
SHARES = (0.01, 0.05, 0.2, 0.5, 1.0)


def measure(arguments: argparse.Namespace) -> report.Metrics:
    """Ratios for each share of changed values."""
    numel = arguments.model_mb * 1_000_000 // (2 * NUM_PARAMETERS * NUM_RANKS)
    metrics = {}
    with planes_ours.run() as folder, ExitStack() as stack:

        def role() -> Role:
            path = Path(__file__).with_name("changed_nodes.py")
            return stack.enter_context(Role("changed_nodes.py", path, [str(folder)]))

        given = {"numel": numel, "num_ranks": NUM_RANKS}
        trainers = role()
        ranks = trainers.call("start", role="train", node=0, first=0, count=NUM_RANKS, **given)
        workers = []
        for node in range(arguments.nodes):
            workers += role().call("start", role="rollout", node=node, first=node, count=1, **given)
        actor, rollout = _controllers(folder, ranks, workers)
        with start(actor, rollout):

            def publish(share: float) -> tuple[float, float, float]:
                """Bytes, seconds, and those of sealing."""
                trainers.call("change", version=actor.version + 1, share=share)
                sent, stats = trainers.call("served_bytes"), actor.publication_stats
                began_s = time.perf_counter()
                actor.publish_weights(rollout)
                rollout.wait_for_weights()
                spent_s = time.perf_counter() - began_s
                sealed_s = actor.publication_stats["publish_seal_s"] - stats["publish_seal_s"]
                return trainers.call("served_bytes") - sent, spent_s, sealed_s

            while actor.version < 2 * WHOLE_EVERY_STEPS:  # so that memory is there
                publish(1.0)
            for share in SHARES:
                taken = defaultdict(list)
                for _ in range(WHOLE_EVERY_STEPS * arguments.rounds):
                    measured = publish(share)
                    taken[actor.version % WHOLE_EVERY_STEPS == 0].append(measured)
                changed, whole = (
                    [statistics.median(column) for column in zip(*taken[is_whole], strict=True)]
                    for is_whole in (False, True)
                )
                for what, one, other in zip(("bytes", "s", "seal"), changed, whole, strict=True):
                    metrics[f"changed_{share * 100:g}_{what}_vs_whole"] = one / other
                metrics[f"whole_{share * 100:g}_publication_s"] = whole[1]
    return metrics


def _controllers(
    folder: Path, ranks: list[dict[str, str]], workers: list[dict[str, str]]
) -> tuple[TrainController, RolloutController]:
    update = WeightUpdateConfig(whole_every_steps=WHOLE_EVERY_STEPS)
    actor = ActorConfig(
        path="/no/model",
        parallel=ParallelConfig(data=NUM_RANKS),
        weight_update=update,
        memory_snapshots=False,
    )
    rollout = RolloutConfig(
        path="/no/model",
        num_workers=len(workers),
        train_batch_groups=len(workers),
        max_context_tokens=64,
        store_bytes=STORE_BYTES,
        weight_update=update,
    )
    config = SchedulerConfig(run_dir=str(folder), heartbeat_interval_s=20.0)
    keys = RunKeys.read(folder / "keys.json")
    train_nodes, rollout_nodes = map(planes_ours.agents_of, (ranks, workers))
    return (
        TrainController(FSDPPPOActor(actor), planes_ours.Nodes(config, keys, train_nodes)),
        RolloutController(LocalGenerator(rollout), planes_ours.Nodes(config, keys, rollout_nodes)),
    )


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--nodes", type=int, default=3, help="that weights are published to")
    parser.add_argument("--model-mb", type=int, default=256, help="size of the model")
    parser.add_argument("--rounds", type=int, default=5, help="versions of either kind")
    arguments = report.parse(parser, model_mb=4, rounds=1)
    metrics = measure(arguments)
    report.print_metrics(
        "Changed weights",
        {
            "nodes": f"{arguments.nodes} with a worker each",
            "model": f"{arguments.model_mb} MB of bfloat16 on {NUM_RANKS} ranks",
        },
        metrics,
    )
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
