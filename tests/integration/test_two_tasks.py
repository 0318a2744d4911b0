"""The example with two tasks: both are learned, and each has its curve."""

from __future__ import annotations

import json
from pathlib import Path

from integration.run_process import run_example


def test_both_tasks_are_learned(tmp_path: Path) -> None:
    """In two runs the first one rose by 0.65 and 0.7, the second by 0.95."""
    run_example("two_tasks", tmp_path, "total_steps=40", "actor.optimizer.lr=2e-3")
    lines = (tmp_path / "runs" / "two_tasks" / "metrics.jsonl").read_text().splitlines()
    evaluations = [json.loads(line) for line in lines if '"kind":"evaluation"' in line]
    (before,) = (it["workflow"] for it in evaluations if it["name"] == "before")
    (after,) = (it["workflow"] for it in evaluations if it["name"] == "after")
    for task in ("larger", "equal"):
        assert after[f"reward/{task}"] - before[f"reward/{task}"] > 0.3
    mean = (after["reward/larger"] + after["reward/equal"]) / 2
    assert abs(after["accuracy"] - mean) < 1e-9, "as many held-out rows of each"
