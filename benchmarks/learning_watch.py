"""What a run says of its learning: nothing where it learns, and the cause where it does not.

    python benchmarks/learning_watch.py [--quick] [--json FILE] [--seeds 3] [--only NAME ...]
    python benchmarks/learning_watch.py --part small [--quick] [--seeds 3] [--sound 50]

`--part small` is of the runs in learning_watch_runs.py: each kind with some seeds, and how many of
two kinds of sound runs hear anything. A run is right when the rule that stands alone at its end is
one of those that its case allows, and, where the case is sound, when nothing was told at all.

`--part examples`: healthy runs are four examples as they are shipped. Sick ones are letter-sort
with a learning rate 25 times too large, and the first project with a reward that is always 0, and
with one that pays 0.2 for any digit and nothing more. `complaints` is how many rules of
trainer/learning_rules.py told of the run, `told_at_step` when the first of them did.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import report
from learning_watch_runs import CASES, Case, history_of
from preferences import accuracy

from areal_sc import DPOTrainer
from areal_sc.records.metrics_log import History
from areal_sc.trainer.learning_rules import LearningHealth

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S: Final = 900.0
WARM_START: Final = "actor.path=warm_start"
SICK_REWARD: Final = """\
import sys

import first_project
from areal_sc import run_script


def reward(prompt, completion):
    return {paid}


if __name__ == "__main__":
    first_project.reward = reward
    sys.exit(run_script(first_project.main))
"""
HEALTHY: Final = ("letter_sort", "first_project", "tool_use", "dpo")
SICK: Final = ("letter_sort_lr", "always_zero", "format_alone")
EXAMPLES: Final[dict[str, tuple[str, ...]]] = {
    "letter_sort": ("letter_sort", WARM_START, "total_steps=80"),
    "first_project": ("first_project",),
    "tool_use": ("tool_use",),
    "letter_sort_lr": ("letter_sort", WARM_START, "total_steps=40", "actor.optimizer.lr=1e-2"),
    "always_zero": ("first_project", "total_steps=40"),
    "format_alone": ("first_project", "total_steps=40"),
}
PAID: Final = {"always_zero": "0.0", "format_alone": "0.2 * completion.isdigit()"}


def run_dir_of(name: str, seed: int, folder: Path, steps: int | None) -> Path:
    """The folder of a run, once it has ended."""
    if name == "dpo":
        accuracy(DPOTrainer, seed, steps or 40, folder)
        return folder / f"DPOTrainer-{seed}"
    example, *settings = EXAMPLES[name]
    script = ROOT / "examples" / f"{example}.py"
    if name in PAID:
        script = folder / f"{name}.py"
        script.write_text(SICK_REWARD.format(paid=PAID[name]))
    settings += [f"run_dir={name}-{seed}", f"seed={seed}"]
    settings += [] if steps is None else [f"total_steps={steps}"]
    config = str(ROOT / "configs" / f"{example}.yaml")
    done = subprocess.run(
        [sys.executable, str(script), "--config", config, *settings],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise SystemExit(f"{name}, seed {seed}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return folder / f"{name}-{seed}"


def told_of(whole: History) -> tuple[list[tuple[int, str, str]], str | None]:
    """What the watch says first of each rule: (step, rule, text); and the rule at the end."""
    health, told = LearningHealth(), list[tuple[int, str, str]]()
    for number, metrics in enumerate(whole.steps, start=1):
        evaluations = [result for result in whole.evaluations if result.step <= metrics.step]
        health.remember(History(whole.steps[:number], evaluations))
        for name, text in health.complaints.items():
            if name not in [rule for _, rule, _ in told]:
                told.append((metrics.step, name, text))
    return told, next(iter(health.complaints), None)


def judged(run_dir: Path) -> report.Metrics:
    """What the run's records make the watch say."""
    whole = History.read(run_dir / "metrics.jsonl")
    told, _ = told_of(whole)
    for step, name, text in told:
        report.say(f"{run_dir.name} step={step} {name}: {text}")
    return {
        "steps": len(whole.steps),
        "complaints": len(told),
        **({"told_at_step": told[0][0]} if told else {}),
    }


def is_right(case: Case, told: list[tuple[int, str, str]], at_end: str | None) -> bool:
    return at_end in case.causes if case.causes else not told


def watch_small_runs(seeds: int, num_sound: int) -> report.Metrics:
    """Prints what is told of each case, and returns how much of it is right."""
    rows, metrics = [], report.Metrics()
    for case in CASES:
        for seed in range(seeds):
            told, at_end = told_of(history_of(case, seed))
            right = is_right(case, told, at_end)
            said = ", ".join(f"{step}: {name}" for step, name, _ in told) or "-"
            rows.append((case.name, seed, said, at_end or "-", "yes" if right else "no"))
            report.say(" | ".join(map(str, rows[-1])))
            metrics[f"{case.name.replace(' ', '_')}_{seed}_is_right"] = float(right)
    columns = ("run", "seed", "told (step: cause)", "at the end", "right")
    report.print_table("What small runs hear", {"seeds": seeds}, columns, rows)
    heard = 0
    for case in CASES[-2:]:
        for seed in range(seeds, seeds + num_sound):
            told, _ = told_of(history_of(case, seed))
            heard += bool(told)
            for step, name, text in told:
                report.say(f"{case.name}, seed {seed}, step {step}, {name}: {text}")
    metrics |= {"sound_runs": 2.0 * num_sound, "sound_runs_told": heard}
    report.print_metrics("Sound runs", {"each": num_sound}, {"sound_runs_told": heard})
    return metrics


def main() -> None:
    parser = report.make_parser(__doc__)
    names = (*HEALTHY, *SICK)
    parser.add_argument("--part", choices=("examples", "small"), default="examples")
    parser.add_argument("--sound", type=int, default=50, help="sound small runs of each kind")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--steps", type=int, help="of each run (default: those of the example)")
    arguments = report.parse(parser, seeds=1, only=("always_zero",), steps=12, sound=0)
    if arguments.part == "small":
        report.write(watch_small_runs(arguments.seeds, arguments.sound), arguments.json)
        return
    records: dict[tuple[str | int, ...], report.Metrics] = {}
    with TemporaryDirectory(prefix="areal-sc-benchmark-") as name:
        for seed in range(arguments.seeds):
            for case in arguments.only:
                run_dir = run_dir_of(case, seed, Path(name), arguments.steps)
                records[case, seed] = judged(run_dir)
    report.print_records(
        "What runs say of their learning", {"seeds": arguments.seeds}, ("run", "seed"), records
    )
    report.write(report.flat(records), arguments.json)


if __name__ == "__main__":
    main()
