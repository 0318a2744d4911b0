"""Whether both tasks of a mix are learned, and whether their rows are as many as the weights say.

    python benchmarks/task_mix.py [--quick] [--json FILE] [--seeds 3] [--steps 160]

Runs examples/two_tasks.py: weights 3 and 1. A rise is the reward on held-out prompts after the run
less that before it; the share is of all rows that were trained.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Final

import report

ROOT = Path(__file__).resolve().parents[1]
TASKS: Final = ("larger", "equal")
LIMIT_S: Final = 900.0


def run(seed: int, steps: int, folder: Path) -> list[dict[str, Any]]:
    """The records of a run's metrics.jsonl; of one that failed what it said is shown."""
    settings = [f"run_dir=run-{seed}", f"seed={seed}", f"total_steps={steps}"]
    config = str(ROOT / "configs" / "two_tasks.yaml")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "two_tasks.py"), "--config", config, *settings],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise SystemExit(f"seed {seed}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    lines = (folder / f"run-{seed}" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def measured(records: list[dict[str, Any]]) -> report.Metrics:
    evaluations = {it["name"]: it["workflow"] for it in records if it["kind"] == "evaluation"}
    steps = [it["workflow"] for it in records if it["kind"] == "step"]
    found = {}
    for task in TASKS:
        before, after = (evaluations[name][f"reward/{task}"] for name in ("before", "after"))
        found |= {f"{task}_before": before, f"{task}_after": after, f"{task}_rise": after - before}
    return {**found, "share_of_larger": fmean(step["share/larger"] for step in steps)}


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs")
    parser.add_argument("--steps", type=int, default=160)
    arguments = report.parse(parser, seeds=1, steps=8)
    records: dict[tuple[int], report.Metrics] = {}
    with TemporaryDirectory(prefix="areal-sc-benchmark-") as folder:
        for seed in range(arguments.seeds):
            records[seed,] = measured(run(seed, arguments.steps, Path(folder)))
            report.say(f"seed={seed} share_of_larger={records[seed,]['share_of_larger']:.4f}")
    report.print_records("A mix of two tasks", {"steps": arguments.steps}, ("seed",), records)
    report.write(report.flat(records), arguments.json)


if __name__ == "__main__":
    main()
