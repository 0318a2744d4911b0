"""This checkout against another one: CPU seconds and seconds a step of the same job, in pairs.

    git worktree add /tmp/before COMMIT
    python benchmarks/against_checkout.py --other /tmp/before

The two runs of a pair begin with the same model and seed, one after the other; the order turns from
pair to pair. CPU seconds are those of all processes of a run, also of those that end meanwhile.
Each checkout runs its own example and settings, by its path in PYTHONPATH; the first steps, which
warm up, are left out. The interval of the median comes from the order of the ratios alone.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import report
from processes import process_tree

ROOT = Path(__file__).resolve().parents[1]
PR_SET_CHILD_SUBREAPER: Final = 36
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_POLL_S = 0.005
_LIMIT_S = 900.0
"""A run takes less than a minute; one that hangs ends the benchmark."""


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--other", type=Path, default=ROOT, help="folder of the other checkout")
    parser.add_argument("--pairs", type=int, default=12, help="runs of each checkout")
    parser.add_argument("--steps", type=int, default=60, help="training steps that count")
    parser.add_argument("--skip", type=int, default=10, help="first steps that do not count")
    arguments = report.parse(parser, pairs=1, steps=5, skip=1)
    adopt_orphans()
    checkouts = {"this": ROOT, "other": arguments.other.resolve()}
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in checkouts}
    with TemporaryDirectory(prefix="areal-sc-benchmark-") as folder:
        for pair in range(arguments.pairs):
            for name in sorted(checkouts, reverse=bool(pair % 2)):
                used = run(checkouts[name], Path(folder), pair, arguments.skip, arguments.steps)
                results[name].append(used)
                report.say(f"pair={pair} {name} cpu_s={used[0]:.4f} s={used[1]:.4f}")
    metrics: report.Metrics = {}
    for index, what in enumerate(("cpu_s", "s")):
        values = {name: [used[index] for used in results[name]] for name in checkouts}
        for name in checkouts:
            metrics[f"{name}_{what}_per_step"] = statistics.median(values[name])
        metrics |= ratio_metrics(what, values["this"], values["other"])
    settings = {"pairs": arguments.pairs, "steps": arguments.steps}
    report.print_metrics("This checkout over the other", settings, metrics)
    report.write(metrics, arguments.json)


def adopt_orphans() -> None:
    """What a run leaves to the first process of the machine is left to this one, and counted."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run(checkout: Path, folder: Path, seed: int, skip: int, steps: int) -> tuple[float, float]:
    """(CPU seconds, seconds) of a step, of the steps `skip` to `skip + steps`."""
    run_dir = folder / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    settings = {
        "run_dir": run_dir,
        "actor.path": folder / "model",
        "total_steps": skip + steps + 5,
        "seed": seed,
    }
    command = [sys.executable, "examples/letter_sort.py", "--config", "configs/letter_sort.yaml"]
    command += [f"{key}={value}" for key, value in settings.items()]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    with open(folder / "out.txt", "w") as out:
        script = subprocess.Popen(command, cwd=checkout, env=environment, stdout=out, stderr=out)
    begin = used_at_step(script, run_dir, skip)
    end = used_at_step(script, run_dir, skip + steps)
    if script.wait(timeout=_LIMIT_S) != 0:
        raise RuntimeError((folder / "out.txt").read_text())
    return (end[0] - begin[0]) / steps, (end[1] - begin[1]) / steps


def used_at_step(script: subprocess.Popen[bytes], run_dir: Path, step: int) -> tuple[float, float]:
    """CPU seconds of all processes of the run so far, and the time, when `step` is recorded."""
    metrics = run_dir / "metrics.jsonl"
    limit = time.monotonic() + _LIMIT_S
    while not metrics.exists() or metrics.read_text().count('"kind":"step"') < step:
        if script.poll() is not None or time.monotonic() > limit:
            raise RuntimeError(f"the run ended, or stood still, before step {step}")
        time.sleep(_POLL_S)
    reap_all_but(script.pid)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    living = sum(map(cpu_seconds, process_tree(os.getpid())))
    own = sum(os.times()[:4])
    return living - own + ended.ru_utime + ended.ru_stime, time.monotonic()


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process, and of the children that it has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS_PER_S


def reap_all_but(pid: int) -> None:
    """Waits for ended processes that were left to this one, so that their CPU time is counted."""
    left = (child for child in children() if child != pid)
    for child in left:
        os.waitpid(child, os.WNOHANG)


def children() -> list[int]:
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(word) for word in path.read_text().split()]


def ratio_metrics(name: str, ours: list[float], others: list[float]) -> report.Metrics:
    """Median of the pairs' ratios, and its 95 % interval."""
    ratios = [our / other for our, other in zip(ours, others, strict=True)]
    low, high = median_interval(ratios)
    return {
        f"{name}_ratio": statistics.median(ratios),
        f"{name}_ratio_low": low,
        f"{name}_ratio_high": high,
    }


def median_interval(values: list[float]) -> tuple[float, float]:
    """95 % interval of the median: the order statistics between which it lies as often."""
    ordered, count = sorted(values), len(values)
    tail, cut = 0.0, 0
    while cut < count // 2:
        tail += math.comb(count, cut) / 2**count
        if tail > 0.025:
            break
        cut += 1
    cut = max(cut, 1)
    return ordered[cut - 1], ordered[count - cut]


if __name__ == "__main__":
    main()
