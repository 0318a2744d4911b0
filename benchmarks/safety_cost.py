"""What the journal and the snapshots cost: paired runs of the letter-sorting job, with and without.

bare      nothing is written: no journal, no snapshots
journal   the journal alone, synced before every act that depends on it
all       the journal, a snapshot a step in memory, and one every five steps on the disk

The three runs of a seed begin with the same model and the same prompts, one after the other; from
seed to seed their order turns. The first steps of a run, which warm up, are left out.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import report
from letter_sort import Config, warm_start
from letter_sort_task import LetterSortPrompts, letter_sort_reward

from areal_sc import PPOTrainer, SingleTurnWorkflow, load_config
from areal_sc.controller.ledger.journal import Journal
from areal_sc.records.metrics_log import History

ROOT = Path(__file__).resolve().parents[1]

NO_SNAPSHOTS = (
    "checkpoint.every_steps=0",
    "checkpoint.every_minutes=0",
    "checkpoint.memory_snapshots=false",
)
CASES: dict[str, Sequence[str]] = {
    "bare": NO_SNAPSHOTS,
    "journal": NO_SNAPSHOTS,
    "all": ("checkpoint.every_steps=5", "checkpoint.memory_snapshots=true"),
}


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=6, help="runs of each case, one a seed")
    parser.add_argument("--steps", type=int, default=45, help="training steps of a run")
    parser.add_argument("--skip", type=int, default=5, help="first steps that do not count")
    arguments = report.parse(parser, repeats=1, steps=3, skip=1)
    times: dict[str, list[float]] = {case: [] for case in CASES}
    with TemporaryDirectory(prefix="areal-sc-benchmark-") as folder:
        for seed in range(arguments.repeats):
            names = list(CASES)
            for case in names[seed % 3 :] + names[: seed % 3]:
                steps = run(folder, case, seed, arguments.steps, is_quick=arguments.quick)
                times[case].append(statistics.median(steps[arguments.skip :]))
                print(f"seed={seed} {case} step_s={times[case][-1]:.4f}", file=sys.stderr)
    metrics = {f"{case}_s_per_step": statistics.median(values) for case, values in times.items()}
    for case in ("journal", "all"):
        metrics[f"{case}_over_bare"] = statistics.median(
            value / bare for value, bare in zip(times[case], times["bare"], strict=True)
        )
    settings = {"repeats": arguments.repeats, "steps": arguments.steps}
    report.print_metrics("What safety costs", settings, metrics)
    report.write(metrics, arguments.json)


def run(folder: str, case: str, seed: int, num_steps: int, *, is_quick: bool) -> list[float]:
    """Seconds of each step of a run."""
    settings = [
        f"run_dir={folder}/{case}-{seed}",
        f"actor.path={folder}/model",
        f"seed={seed}",
        f"total_steps={num_steps}",
        *CASES[case],
        *(["task.warm_start.steps=10"] if is_quick else []),
    ]
    arguments = ["--config", str(ROOT / "configs" / "letter_sort.yaml"), *settings]
    config = load_config(arguments, Config, makes_model=True)
    with (
        redirect_stdout(sys.stderr),
        no_journal(is_off=case == "bare"),
        PPOTrainer(config) as trainer,
    ):
        warm_start(config, trainer)
        trainer.fit(SingleTurnWorkflow(letter_sort_reward), LetterSortPrompts(seed))
    history = History.read(Path(config.run_dir) / "metrics.jsonl")
    return [step.step_time_s for step in history.steps]


@contextmanager
def no_journal(*, is_off: bool) -> Iterator[None]:
    """Nothing is written, and nothing is waited for, while it is open."""

    async def at_once(self: Journal) -> None:
        pass

    def nothing(self: Journal, record: Any) -> None:
        pass

    if not is_off:
        yield
        return
    with (
        patch.object(Journal, "begin", nothing),
        patch.object(Journal, "append", nothing),
        patch.object(Journal, "durable", at_once),
        patch.object(Journal, "close", at_once),
    ):
        yield


if __name__ == "__main__":
    main()
