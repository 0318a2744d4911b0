"""The example with two tasks: both are learned, and each has its curve."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from integration.agent_forks import environment_of_scripts
from integration.run_process import REPOSITORY


def test_both_tasks_are_learned(tmp_path: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "examples" / "two_tasks.py")]
    command += ["--config", str(REPOSITORY / "configs" / "two_tasks.yaml"), "total_steps=80"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment_of_scripts(),
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "runs" / "two_tasks" / "metrics.jsonl").read_text().splitlines()
    evaluations = [json.loads(line) for line in lines if '"kind":"evaluation"' in line]
    (before,) = (it["workflow"] for it in evaluations if it["name"] == "before")
    (after,) = (it["workflow"] for it in evaluations if it["name"] == "after")
    for task in ("larger", "equal"):
        assert after[f"reward/{task}"] - before[f"reward/{task}"] > 0.3
    mean = (after["reward/larger"] + after["reward/equal"]) / 2
    assert abs(after["accuracy"] - mean) < 1e-9, "as many held-out rows of each"
