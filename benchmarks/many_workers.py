"""What thousands of workers cost the controllers: the lag of their event loop, step by step.

    python benchmarks/many_workers.py [--quick] [--json FILE] [--workers N] [--groups N]

The real controllers run the README's loop, over real sockets, with simulated workers in a few
processes (simulated_workers.py): groups end after a random while, nothing is computed. Everything
shares the machine, so on few cores lags are upper bounds: simulated workers take the CPU too.

- lag: by how much a 2 ms timer of the controllers' loop is late, from the first to the last step.
- busy: CPU of the loop's thread while that timer ran: its lag on a machine of its own.
- choose: one look for the least loaded of all workers.
"""

from __future__ import annotations

import argparse
import random
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import planes_ours
import report
from planes_role import Role, process_cpu_s
from planes_samples import LagProbe, percentiles
from simulated_workers import WORKERS_PER_NODE

from areal_sc import RolloutController, SingleTurnWorkflow, TrainController, start
from areal_sc.config.parallel_settings import ParallelConfig
from areal_sc.config.schema import ActorConfig, RolloutConfig, SchedulerConfig
from areal_sc.controller.rollout.worker_set import WorkerLoads
from areal_sc.engines.handles import FSDPPPOActor, LocalGenerator
from areal_sc.transport.security.keys import RunKeys

NUM_HOSTS = 8
NUM_RANKS = 2
GROUP_SIZE = 8
MAX_STALENESS = 2
HEARTBEAT_S = 20.0
"""Longer than usual: simulated workers share the cores of the controllers."""
ROW_TOKENS = 8_000
NUM_LOOKS = 1000
_HOST = Path(__file__).with_name("simulated_workers.py")


def never_scored(prompt: dict[str, Any], completion: str) -> float:
    """The reward of a workflow of which simulated workers only hear the number."""
    raise NotImplementedError


def controllers(
    size: argparse.Namespace,
    folder: Path,
    train_nodes: dict[str, str],
    rollout_nodes: dict[str, str],
) -> tuple[TrainController, RolloutController]:
    actor = ActorConfig(
        path="/no/model", parallel=ParallelConfig(data=NUM_RANKS), memory_snapshots=False
    )
    rollout = RolloutConfig(
        path="/no/model",
        num_workers=size.workers,
        total_steps=1 + size.steps,
        train_batch_groups=size.groups,
        group_size=GROUP_SIZE,
        max_context_tokens=4096,
        max_staleness=MAX_STALENESS,
        max_concurrent_groups=size.workers,
    )
    config = SchedulerConfig(run_dir=str(folder), heartbeat_interval_s=HEARTBEAT_S)
    keys = RunKeys.read(folder / "keys.json")
    return (
        TrainController(FSDPPPOActor(actor), planes_ours.Nodes(config, keys, train_nodes)),
        RolloutController(LocalGenerator(rollout), planes_ours.Nodes(config, keys, rollout_nodes)),
    )


def measure_steps(size: argparse.Namespace) -> report.Metrics:
    """Lags, CPU and seconds of the steps."""
    prompts = [{"prompt": str(number), "answer": ""} for number in range(1000)]
    workflow = SingleTurnWorkflow(never_scored)
    with planes_ours.run() as folder, ExitStack() as stack:
        hosts = [stack.enter_context(Role("host", _HOST, [str(folder)])) for _ in range(NUM_HOSTS)]
        share = size.workers // NUM_HOSTS
        for number, host in enumerate(hosts):
            host.begin(
                "start",
                role="rollout",
                first=number * share,
                count=share,
                group_s=size.group_s,
                row_tokens=ROW_TOKENS,
            )
        rollout_workers = [worker for host in hosts for worker in host.finish()]
        train_workers = hosts[0].call("start", role="train", first=0, count=NUM_RANKS)
        actor, rollout = controllers(
            size,
            folder,
            planes_ours.agents_of(train_workers),
            planes_ours.agents_of(rollout_workers),
        )
        probe = LagProbe()
        with start(actor, rollout):
            probing = rollout._submit(probe.run())
            for step in range(1 + size.steps):
                if step == 1:  # connections and caches are warm
                    probe.clear()
                    cpu_s, began_s = process_cpu_s(), time.perf_counter()
                batch = rollout.prepare_batch(prompts, workflow)
                batch = actor.compute_advantages(batch)
                batch = actor.compute_proximal_logprobs(batch)
                actor.ppo_update(batch)
                actor.publish_weights(rollout)
            seconds, cpu_s = time.perf_counter() - began_s, process_cpu_s() - cpu_s
            late_s, busy_s = list(probe.late_s), list(probe.busy_s)
            probing.cancel()
    lags = percentiles(late_s)
    return {
        "loop_lag_p50_ms": 1e3 * lags["p50_s"],
        "loop_lag_p99_ms": 1e3 * lags["p99_s"],
        "loop_lag_max_ms": 1e3 * max(late_s),
        "loop_busy_p99_ms": 1e3 * percentiles(busy_s)["p99_s"],
        "loop_busy_max_ms": 1e3 * max(busy_s),
        "step_s": seconds / size.steps,
        "controller_cpu_s_per_step": cpu_s / size.steps,
    }


def measure_choice(num_workers: int) -> report.Metrics:
    """Microseconds of one choice among workers that carry a few groups each."""
    rng = random.Random(0)
    nodes = [f"node-{number // WORKERS_PER_NODE}" for number in range(num_workers)]
    loads = WorkerLoads(nodes, 8, dict.fromkeys(nodes, 8 * WORKERS_PER_NODE))
    for number in range(num_workers):
        loads.note_load(
            number,
            version=rng.randint(0, 1),
            gets_newest=True,
            num_running=rng.randint(1, 4),
            num_held=0,
        )
    began_s = time.perf_counter()
    for _ in range(NUM_LOOKS):
        worker = loads.least_loaded(1)
        assert worker is not None
    return {"choose_us": 1e6 * (time.perf_counter() - began_s) / NUM_LOOKS}


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--workers", type=int, default=4096, help="a multiple of 64")
    parser.add_argument("--groups", type=int, default=512, help="a training step")
    parser.add_argument("--steps", type=int, default=6, help="that are measured")
    parser.add_argument("--group-s", type=float, nargs=2, default=(1.0, 8.0), help="of a group")
    arguments = report.parse(parser, workers=256, groups=64, steps=5, group_s=(0.2, 1.0))
    metrics = measure_choice(arguments.workers) | measure_steps(arguments)
    report.print_metrics(
        f"The controllers' loop with {arguments.workers:,} workers",
        {
            "groups a step": arguments.groups,
            "steps": arguments.steps,
            "eta": MAX_STALENESS,
            "workers": f"in {NUM_HOSTS} processes on the same cores",
        },
        metrics,
    )
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
