"""Start of many workers on SLURM nodes, over plain `srun` of as many processes with their imports.

    salloc -N 3 --exclusive python benchmarks/slurm_start.py [--quick] [--json FILE] [--workers N]

It measures within an allocation, so nothing of the time before the grant counts. The two sides take
turns, so other work on the machine hits both.

- workers: from the scheduler's first command until every worker serves calls: agents are started by
  `srun`, join, and start the workers. Engines are not built.
- plain: `srun` of as many processes, which import what the workers do, until all have ended.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import report

from areal_sc.config.loading.plain import to_plain
from areal_sc.config.schema import Device, RolloutConfig, SchedulerConfig, SchedulerType
from areal_sc.config.slurm_settings import SlurmConfig
from areal_sc.fleet.fleet import Fleet
from areal_sc.fleet.runtime import Runtime
from areal_sc.nodes.agent import PRELOAD
from areal_sc.nodes.spec import ROLLOUT_ROLE, WorkerOrder
from areal_sc.schedulers.factory import make_scheduler

LIMIT_S = 1800.0
IMPORTS = "; ".join(f"import {name}" for name in PRELOAD if ":" not in name)


def start_workers(num_workers: int, run_dir: str) -> tuple[float, float]:
    """Seconds until all agents have joined, and until all workers serve."""
    nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
    config = SchedulerConfig(
        type=SchedulerType.slurm,
        run_dir=run_dir,
        startup_timeout_s=LIMIT_S,
        slurm=SlurmConfig(nodes=nodes),
    )
    began_s = time.perf_counter()
    scheduler = make_scheduler(config)

    async def launch() -> tuple[float, float]:
        runtime = Runtime.create(scheduler.keys, scheduler.term)
        fleet = Fleet(scheduler, runtime, lambda event: None)
        engine_config = to_plain(RolloutConfig(path="/no/model", num_workers=num_workers))
        order = WorkerOrder(ROLLOUT_ROLE, 0, "LocalGenerator", engine_config, Device.cpu, 1 << 20)
        await scheduler.nodes()
        joined_s = time.perf_counter() - began_s
        try:
            await fleet.launch([replace(order, index=index) for index in range(num_workers)])
            return joined_s, time.perf_counter() - began_s
        finally:
            await fleet.close()
            await runtime.transport.close()

    try:
        return asyncio.run(launch())
    finally:
        scheduler.close()


def start_plain(num_workers: int) -> float:
    """Seconds until as many processes have made the imports of a worker, and ended."""
    began_s = time.perf_counter()
    subprocess.run(
        [
            "srun",
            "--overlap",
            "--overcommit",
            "-n",
            str(num_workers),
            sys.executable,
            "-c",
            IMPORTS,
        ],
        check=True,
        timeout=LIMIT_S,
    )
    return time.perf_counter() - began_s


def measure(arguments: argparse.Namespace) -> report.Metrics:
    joined, started, plain = [], [], []
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory(prefix="slurm-start-", dir=arguments.folder) as folder:
            joined_s, started_s = start_workers(arguments.workers, folder)
        joined.append(joined_s)
        started.append(started_s)
        plain.append(start_plain(arguments.plain or arguments.workers))
    ratios = [ours / theirs for ours, theirs in zip(started, plain, strict=True)]
    return {
        "start_over_plain_srun": statistics.median(ratios),
        "agents_joined_s": statistics.median(joined),
        "workers_started_s": statistics.median(started),
        "plain_srun_s": statistics.median(plain),
    }


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--workers", type=int, default=64, help="on all nodes together")
    parser.add_argument(
        "--plain",
        type=int,
        default=0,
        help="processes of the plain side, 0: as many; each takes 270 MB, so fewer may be all that "
        "a machine holds, and the ratio is an upper bound",
    )
    parser.add_argument("--rounds", type=int, default=3, help="of both sides")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="that all nodes see")
    arguments = report.parse(parser, workers=3, rounds=1)
    if "SLURM_JOB_NUM_NODES" not in os.environ:
        parser.error("start it within an allocation: salloc -N 3 --exclusive python ...")
    metrics = measure(arguments)
    report.print_metrics(
        "Start on SLURM nodes",
        {"nodes": os.environ["SLURM_JOB_NUM_NODES"], "workers": arguments.workers},
        metrics,
    )
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
