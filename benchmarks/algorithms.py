"""What each preset of configs/algorithms learns of sorting letters, in few steps.

    python benchmarks/algorithms.py [--quick] [--json FILE] [--only NAME ...] [--seeds 3]
        [--staleness 8] [--folder FOLDER] [KEY=VALUE ...]

The quickstart's job for 80 steps, from one warm start a seed, which sorts about one prompt in
seven. Values are accuracies on 256 held-out prompts at temperature 1. Nothing is tuned to a preset
but the learning rate of `ppo`, which has a critic: how much of the returns' variance that explains
is told, in the mean of the steps 11 to 40. `distillation` sees no reward: its teacher is what
decoupled_ppo has learned. With `--staleness` rows are about so many versions old: generation runs
ahead as far as it may. On a busy machine that takes a second worker, `rollout.num_workers=2`: the
mean staleness is told.
Where there is a KL to a reference, its mean over the last 10 steps is told. `--folder` keeps the
runs: the same command goes on with what it has not played yet; one with other settings is refused.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Final

import report

ROOT = Path(__file__).resolve().parents[1]
DISTILLED: Final = "distillation"
PRESETS: Final = (
    *("decoupled_ppo", "grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo", "cispo", "sapo"),
    *("lite_ppo", "tis", "icepop", "m2po", "dppo", "a3po", "gdpo", "ppo", DISTILLED),
)
TEACHER: Final = PRESETS[0]
WITH_CRITIC: Final = (
    *("actor.optimizer.lr=1.5e-4", "actor.optimizer.schedule=constant"),
    *("actor.optimizer.warmup_steps=60", "critic.optimizer.warmup_steps=0"),
    *("critic.path=${actor.path}", "critic.optimizer.lr=1e-3"),
)
"""A policy that moves no faster than a critic can follow."""
LIMIT_S: Final = 900.0


def play(preset: str, seed: int, folder: Path, steps: int, settings: Sequence[str]) -> None:
    """One run, in a folder of its own; of one that failed what it said is shown."""
    teacher = folder / f"{TEACHER}-{seed}" / "model"
    models = {"ppo": WITH_CRITIC, DISTILLED: (f"teacher.path={teacher}",)}
    arguments = [
        f"run_dir={folder / f'{preset}-{seed}'}",
        f"actor.path={folder / f'warm-{seed}'}",
        f"actor.algorithm={preset}",
        f"seed={seed}",
        f"total_steps={steps}",
        *models.get(preset, ()),
        *settings,
    ]
    command = ["examples/letter_sort.py", "--config", "configs/letter_sort.yaml", *arguments]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise SystemExit(f"{preset}, seed {seed}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def measured(run_dir: Path, steps: int) -> report.Metrics:
    """Accuracies before and after, and what the steps of a run that has ended say."""
    summary = json.loads((run_dir / "summary.json").read_text())
    names = ("accuracy_before", "accuracy_after", "greedy_accuracy_after")
    found = {name: float(summary[name]) for name in names} | {"run_s": summary["wall_time_s"]}
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "step"]
    found["token_staleness_mean"] = fmean(record["token_staleness_mean"] for record in records)
    for name, key, chosen in (
        ("explained_variance", "critic_explained_variance", records[min(10, steps // 2) : 40]),
        ("reference_kl", "reference_kl", records[-10:]),
    ):
        if key in records[-1]["train"]:
            found[name] = fmean(record["train"][key] for record in chosen)
    return found


def is_of(folder: Path, settings: dict[str, object]) -> bool:
    """Whether the runs of a folder have these settings; an empty one gets them."""
    path = folder / "settings.json"
    if not path.exists() and not any(folder.glob("*")):
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))
    return path.exists() and json.loads(path.read_text()) == settings


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=PRESETS, default=PRESETS, metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each preset")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--staleness", type=int, help="rollout.max_staleness (default: the job's)")
    parser.add_argument("--folder", type=Path, help="of runs that are kept (default: none is)")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="of each run")
    arguments = report.parse(parser, only=PRESETS[:1], seeds=1, steps=4)
    given: list[str] = arguments.settings
    if arguments.staleness is not None:
        given += ["rollout.admission=eager", f"rollout.max_staleness={arguments.staleness}"]
    settings = {"steps": arguments.steps, "settings": " ".join(given) or "the job's"}
    if arguments.folder and not is_of(arguments.folder, settings):
        parser.error(f"--folder {arguments.folder}: its runs have other settings than {settings}")
    records: dict[tuple[str | int, ...], report.Metrics] = {}
    kept = arguments.folder and nullcontext(str(arguments.folder.absolute()))
    with kept or TemporaryDirectory(prefix="areal-sc-benchmark-") as name:
        for seed in range(arguments.seeds):
            needed = [TEACHER] if DISTILLED in arguments.only else []
            for preset in dict.fromkeys([*needed, *arguments.only]):
                run_dir = Path(name) / f"{preset}-{seed}"
                if not (run_dir / "summary.json").exists():
                    play(preset, seed, Path(name), arguments.steps, given)
                records[preset, seed] = found = measured(run_dir, arguments.steps)
                report.say(f"{preset} seed={seed} accuracy_after={found['accuracy_after']:.3f}")
                report.write(report.flat(records), arguments.json)
    report.print_records("Presets", settings, ("preset", "seed"), records)


if __name__ == "__main__":
    main()
