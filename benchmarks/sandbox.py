"""Programs of a model a second, for each layer that works here, and what a call of a reward costs.

programs    `print(1)` in a `LocalSandbox` of two places, its server warm: how many a second, and
            the CPU time of all processes and the server's start, which a busy machine tells, too
calls       of an empty reward, in a process that nothing keeps apart (bare) and in one that is
            (apart); the two take turns, in rounds
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import report

from areal_sc.config.sandbox_settings import SandboxConfig
from areal_sc.errors import SandboxError
from areal_sc.rewards.answers import ExactMatch
from areal_sc.rewards.pool import RewardPool
from areal_sc.rewards.running import CodeRunner
from areal_sc.system.fork_server import ForkServer
from areal_sc.system.sandbox.isolation import LAYERS
from areal_sc.system.sandbox.local import LocalSandbox
from areal_sc.system.sandbox.program import Limits, Program

REWARD = ExactMatch()
ROW = {"answer": "7"}


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--programs", type=int, default=1000, help="of each layer")
    parser.add_argument("--calls", type=int, default=2000, help="of the reward, a round")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = report.parse(parser, programs=20, calls=50, rounds=3)
    metrics: dict[str, float] = {}
    for layer in LAYERS:
        try:
            begun_s = cpu_s()
            rate = asyncio.run(programs_per_s(layer, arguments.programs))
            metrics[f"{layer}_programs_per_s"] = rate
            metrics[f"{layer}_program_cpu_ms"] = 1e3 * (cpu_s() - begun_s) / arguments.programs
        except SandboxError as error:
            report.say(f"{layer} is left out: {error}")
    if not metrics:
        raise SystemExit("no layer works here")  # an exit code of 1: it measured nothing
    metrics["strongest_programs_per_s"] = next(iter(metrics.values()))
    with TemporaryDirectory(prefix="areal-sc-benchmark-") as folder:
        metrics |= asyncio.run(calls(Path(folder), arguments.calls, arguments.rounds))
    settings = {"programs": arguments.programs, "calls": arguments.calls}
    report.print_metrics("Isolation", settings, metrics)
    report.write(metrics, arguments.json)


def cpu_s() -> float:
    """CPU seconds of this process, and of those that have ended below it."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


async def programs_per_s(layer: str, num_programs: int) -> float:
    sandbox = LocalSandbox(2, layer, environment={"PATH": os.environ["PATH"]})
    try:
        await sandbox.layer()
        begun_s = time.perf_counter()
        program, limits = Program(source="print(1)"), Limits()
        done = await asyncio.gather(*(sandbox.run(program, limits) for _ in range(num_programs)))
        took_s = time.perf_counter() - begun_s
    finally:
        await sandbox.close()
    assert all(ended.stdout == b"1\n" for ended in done)
    return num_programs / took_s


async def calls(folder: Path, num_calls: int, num_rounds: int) -> dict[str, float]:
    """Microseconds of a call, one at a time: medians of the rounds."""
    server = ForkServer("areal_sc.rewards.process:run_reward_process")
    (folder / "sources").mkdir()
    pools = {
        "bare": make_pool(server, folder),
        "apart": make_pool(server, folder, isolation="auto", hides=[folder]),
    }
    times: dict[str, list[float]] = {name: [] for name in pools}
    try:
        for pool in pools.values():
            await pool.score(REWARD, ROW, "7")
        for number in range(num_rounds):
            for name in sorted(pools, reverse=bool(number % 2)):
                begun_s = time.perf_counter()
                for _ in range(num_calls):
                    await pools[name].score(REWARD, ROW, "7")
                times[name].append((time.perf_counter() - begun_s) / num_calls)
    finally:
        for pool in pools.values():
            await pool.close()
        await server.close()
    report.say(f"rewards are kept apart by {pools['apart'].isolation or 'nothing'}")
    ratios = [apart / bare for apart, bare in zip(times["apart"], times["bare"], strict=True)]
    medians = {f"{name}_call_us": 1e6 * statistics.median(took) for name, took in times.items()}
    return {**medians, "apart_over_bare": statistics.median(ratios)}


def make_pool(server: ForkServer, folder: Path, **apart: Any) -> RewardPool:
    return RewardPool(
        server,
        num_processes=1,
        timeout_s=60.0,
        log_path=folder / "reward.log",
        sources=folder / "sources",
        run_code=CodeRunner(SandboxConfig()),
        **apart,
    )


if __name__ == "__main__":
    main()
