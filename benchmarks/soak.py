"""Does anything grow? The main job for minutes on end, watched from outside.

    python benchmarks/soak.py --minutes 10 --json soak.json

Samples the resident memory of the script and of every process below it, and the tensor stores'
bytes from `metrics.jsonl`. What is reported is growth: the mean of the last quarter of the run over
that of the second quarter; the first one is warm-up.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import report
from processes import process_tree

SAMPLE_EVERY_S = 2.0
STEPS_A_MINUTE = 400
"""More than the job makes: the time ends it, not the number of steps."""


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of training")
    arguments = report.parse(parser, minutes=0.1)
    with tempfile.TemporaryDirectory() as folder:
        megabytes = _run(Path(folder) / "run", arguments.minutes, quick=arguments.quick)
        steps = _steps(Path(folder) / "run" / "metrics.jsonl")
    resident_growth = max(map(_growth, megabytes.values()))
    stores = [step["counters"]["store_bytes"] / 1e6 for step in steps]
    megabytes["tensor stores"] = stores
    num_rows = sum(step["num_rows"] for step in steps)
    report.print_table(
        "Memory over a long run",
        {"minutes": arguments.minutes, "steps": len(steps), "rows": num_rows},
        ["what (MB)", "first", "most", "last", "last quarter over the second"],
        [(name, s[0], max(s), s[-1], _growth(s)) for name, s in megabytes.items()],
    )
    metrics = {
        "rows": num_rows,
        "store_growth": _growth(stores),
        "resident_growth": resident_growth,
        "bulk_refused_frames": steps[-1]["counters"]["bulk_refused"],
    }
    report.write(metrics, arguments.json)


def _run(run_dir: Path, minutes: float, *, quick: bool) -> dict[str, list[float]]:
    """Resident megabytes of each process of the job, by role, over time."""
    root = Path(__file__).resolve().parents[1]
    command = [
        *(sys.executable, str(root / "examples" / "letter_sort.py")),
        *("--config", str(root / "configs" / "letter_sort.yaml")),
        *(f"run_dir={run_dir}", f"total_steps={round(minutes * STEPS_A_MINUTE)}"),
    ]
    if quick:
        command += ["task.warm_start.steps=20", "evaluation.num_prompts=16"]
    samples: dict[str, list[float]] = {}
    with subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL) as job:
        try:
            _wait_for_first_step(job, run_dir / "metrics.jsonl")
            ends = time.monotonic() + minutes * 60
            while time.monotonic() < ends and job.poll() is None:
                for name, size in _resident_megabytes(job.pid).items():
                    samples.setdefault(name, []).append(size)
                time.sleep(min(SAMPLE_EVERY_S, minutes * 60 / 8))
        finally:
            job.terminate()
    lasted = max(map(len, samples.values()))
    return {name: sizes for name, sizes in samples.items() if len(sizes) > lasted / 2}


def _wait_for_first_step(job: subprocess.Popen[bytes], metrics: Path) -> None:
    give_up = time.monotonic() + 300
    while not (metrics.exists() and metrics.stat().st_size):
        if job.poll() is not None or time.monotonic() > give_up:
            raise RuntimeError(f"the job made no step; exit code {job.poll()}")
        time.sleep(0.2)


def _resident_megabytes(pid: int) -> Mapping[str, float]:
    """Private and shared resident memory of the process tree's members."""
    sizes = {}
    for member in process_tree(pid):
        try:
            pages = int(Path(f"/proc/{member}/statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        name = "script" if member == pid else f"process {member}"
        sizes[name] = pages * os.sysconf("SC_PAGESIZE") / 1e6
    return sizes


def _steps(path: Path) -> list[dict[str, Any]]:
    records = (json.loads(line) for line in path.read_text().splitlines())
    return [record for record in records if record["kind"] == "step"]


def _growth(sizes: Sequence[float]) -> float:
    quarter = max(1, len(sizes) // 4)
    early = statistics.mean(sizes[quarter : 2 * quarter] or sizes)
    return statistics.mean(sizes[-quarter:]) / early if early else 1.0


if __name__ == "__main__":
    main()
