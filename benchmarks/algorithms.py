"""What each preset of configs/algorithms learns of sorting letters, in few steps.

    python benchmarks/algorithms.py [--quick] [--json FILE] [--only NAME ...] [--seeds 3]
        [--staleness 8]

The quickstart's job for 80 steps, from one warm start a seed, which sorts about one prompt in
seven; nothing is tuned to a preset. Values are accuracies on 256 held-out prompts at temperature 1.
`ppo` has a critic, and is told how much of the returns' variance that explains, in the mean of the
steps 11 to 40. `distillation` sees no reward: its teacher is what decoupled_ppo has learned.
With `--staleness` rows may be so many versions old.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Final

import report

ROOT = Path(__file__).resolve().parents[1]
DISTILLED: Final = "distillation"
PRESETS: Final = (
    *("decoupled_ppo", "grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo", "cispo", "sapo"),
    *("lite_ppo", "tis", "icepop", "m2po", "dppo", "a3po", "ppo", DISTILLED),
)
TEACHER: Final = PRESETS[0]
CRITIC: Final = ("critic.path=${actor.path}", "critic.optimizer.lr=1e-3")
LIMIT_S: Final = 900.0


def run(preset: str, seed: int, folder: Path, steps: int, staleness: int | None) -> report.Metrics:
    """Accuracies before and after, and seconds; of a run that failed what it said is shown."""
    teacher = folder / f"{TEACHER}-{seed}" / "model"
    models = {"ppo": CRITIC, DISTILLED: (f"teacher.path={teacher}",)}
    settings = [
        f"run_dir={folder / f'{preset}-{seed}'}",
        f"actor.path={folder / f'warm-{seed}'}",
        f"actor.algorithm={preset}",
        f"seed={seed}",
        f"total_steps={steps}",
        *models.get(preset, ()),
        *([] if staleness is None else [f"rollout.max_staleness={staleness}"]),
    ]
    command = ["examples/letter_sort.py", "--config", "configs/letter_sort.yaml", *settings]
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{preset}, seed {seed}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    summary = json.loads((folder / f"{preset}-{seed}" / "summary.json").read_text())
    names = ("accuracy_before", "accuracy_after", "greedy_accuracy_after")
    found = {**{name: float(summary[name]) for name in names}, "run_s": seconds}
    if preset == "ppo":
        found["explained_variance"] = explained_variance(folder / f"{preset}-{seed}", steps)
    return found


def explained_variance(run_dir: Path, steps: int) -> float:
    """The critic's, in the mean of the steps 11 to 40; of a shorter run, of its newer half."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "step"]
    chosen = records[min(10, steps // 2) : 40]
    return fmean(record["train"]["critic_explained_variance"] for record in chosen)


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=PRESETS, default=PRESETS, metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each preset")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--staleness", type=int, help="rollout.max_staleness (default: the job's)")
    arguments = report.parse(parser, only=PRESETS[:1], seeds=1, steps=4)
    records: dict[tuple[str, int], report.Metrics] = {}
    with TemporaryDirectory(prefix="areal-sc-benchmark-") as folder:
        for seed in range(arguments.seeds):
            needed = [TEACHER] if DISTILLED in arguments.only else []
            for preset in dict.fromkeys([*needed, *arguments.only]):
                found = run(preset, seed, Path(folder), arguments.steps, arguments.staleness)
                records[preset, seed] = found
                report.say(f"{preset} seed={seed} accuracy_after={found['accuracy_after']:.3f}")
    settings = {"steps": arguments.steps, "staleness": arguments.staleness or "4, the job's"}
    report.print_records("Presets", settings, ("preset", "seed"), records)
    report.write(report.flat(records), arguments.json)


if __name__ == "__main__":
    main()
