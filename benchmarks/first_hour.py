"""What a huge set of prompts, and broken trackers, add to a step: nothing that can be seen.

    python benchmarks/first_hour.py --repeats 5 --json first_hour.json

Runs of the task of `examples/minimal.py`, each with workers of its own, interleaved:

plain     1,000 prompts behind `__len__` and `__getitem__`
huge      10^9 prompts
trackers  1,000 prompts, one tracker that hangs, one that always raises

A first step is counted from the call of `prepare_batch`, with workers that have just started.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import minimal
import report

from areal_sc import GRPOConfig, PPOTrainer, SingleTurnWorkflow, Tracker, load_config
from areal_sc.records.metrics_log import History
from areal_sc.records.trackers.background import BackgroundTracker, Event

ROOT = Path(__file__).resolve().parents[1]


class Rows:
    """A map-style set of prompts."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, str]:
        prompts: list[dict[str, str]] = minimal.PROMPTS
        return prompts[index % len(prompts)]


class Hangs(Tracker):
    def on_step(self, metrics: object) -> None:
        threading.Event().wait()


class Raises(Tracker):
    def on_step(self, metrics: object) -> None:
        raise OSError("the tracker's server is away")


CASES: dict[str, tuple[int, Sequence[type[Tracker]]]] = {
    "plain": (1_000, ()),
    "huge": (10**9, ()),
    "trackers": (1_000, (Hangs, Raises)),
}


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each case, one a seed")
    parser.add_argument("--steps", type=int, default=40, help="training steps of a run")
    arguments = report.parse(parser, repeats=1, steps=2)
    steps: dict[str, list[list[float]]] = {case: [] for case in CASES}
    calls: list[float] = []
    with TemporaryDirectory(prefix="areal-sc-benchmark-") as folder:
        minimal.make_model(f"{folder}/model")
        for seed in range(arguments.repeats):
            for case in sorted(CASES, reverse=bool(seed % 2)):
                config = _config(folder, f"{case}-{seed}", seed, arguments.steps)
                with _time_of_calls() as spent:
                    steps[case].append(_steps_s(config, *CASES[case]))
                calls += spent
    first = {case: [run[0] for run in runs] for case, runs in steps.items()}
    whole = {case: [sum(run) for run in runs] for case, runs in steps.items()}
    metrics = {
        "plain_first_step_s": statistics.median(first["plain"]),
        "huge_first_step_s": statistics.median(first["huge"]),
        "huge_over_plain_first_step": _median_ratio(first["huge"], first["plain"]),
        "trackers_over_plain_steps": _median_ratio(whole["trackers"], whole["plain"]),
        "trackers_calls_percent": 100 * sum(calls) / sum(whole["trackers"]),
    }
    settings = {"repeats": arguments.repeats, "steps": arguments.steps}
    report.print_metrics("First hour", settings, metrics)
    report.write(metrics, arguments.json)


def _config(folder: str, name: str, seed: int, num_steps: int) -> GRPOConfig:
    settings = {
        "run_dir": f"{folder}/{name}",
        "actor.path": f"{folder}/model",
        "seed": seed,
        "total_steps": num_steps,
        "checkpoint.every_steps": 0,
    }
    overrides = (f"{key}={value}" for key, value in settings.items())
    return load_config(ROOT / "configs" / "minimal.yaml", *overrides)


def _steps_s(config: GRPOConfig, num_rows: int, trackers: Sequence[type[Tracker]]) -> list[float]:
    """Seconds of each step of a run."""
    trainer = PPOTrainer(config, trackers=[kind() for kind in trackers])
    with redirect_stdout(sys.stderr):
        trainer.fit(SingleTurnWorkflow(minimal.reward), Rows(num_rows))
    history = History.read(Path(config.run_dir) / "metrics.jsonl")
    return [step.step_time_s for step in history.steps]


@contextmanager
def _time_of_calls() -> Iterator[list[float]]:
    """Seconds that the thread of the run spends in each call of a tracker, while it is open."""
    spent: list[float] = []
    tell: Any = BackgroundTracker.tell

    def timed(self: BackgroundTracker, event: Event) -> None:
        began = time.perf_counter()
        tell(self, event)
        spent.append(time.perf_counter() - began)

    with patch.object(BackgroundTracker, "tell", timed):
        yield spent


def _median_ratio(values: Sequence[float], references: Sequence[float]) -> float:
    """Of runs with the same seed."""
    return statistics.median(a / b for a, b in zip(values, references, strict=True))


if __name__ == "__main__":
    main()
