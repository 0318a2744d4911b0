"""The first minutes: a project made by a command is run, tested, and its model read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from integration.agent_forks import environment_of_scripts
from integration.test_own_loop import unexpected_steps

from areal_sc.records.samples import read_samples

NUM_STEPS = 4


def python(folder: Path, *words: str, **environment: str) -> str:
    """What a Python command in that folder shows."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment_of_scripts() | environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_new_project_runs_is_tested_and_is_read(tmp_path: Path) -> None:
    project = tmp_path / "my_task"
    told = python(tmp_path, "-m", "areal_sc", "new", "my_task")
    assert "cd my_task" in told

    told = python(project, "train.py", "--config", "train.yaml", f"total_steps={NUM_STEPS}")
    assert f"step={NUM_STEPS}/{NUM_STEPS} " in told
    assert "evaluation=greedy" in told
    left = {path.name for path in (project / "runs" / "train").iterdir()}
    assert left >= {"model", "learning_curve.png", "summary.json", "checkpoints"}

    run_dir = project / "runs" / "train"
    lines = (run_dir / "samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    known = read_samples(run_dir / "samples.jsonl")
    assert unexpected_steps(run_dir, range(1, NUM_STEPS + 1), known) == set()
    for sample in samples:
        given, larger = sample["prompt"], max(sample["prompt"][0], sample["prompt"][2])
        assert given == f"{given[0]},{given[2]}>"
        assert sample["reward"] == float(sample["answer"] == larger)
        assert sample["metrics"]["accuracy"] == sample["reward"]
        assert sample["num_tokens"] == 5
        assert 0 <= sample["first_version"] <= sample["last_version"] < sample["step"]
    for width in (60, 100, 200):
        words = ("samples", "runs/train", "--last", "100")
        shown = python(project, "-m", "areal_sc", *words, COLUMNS=str(width))
        assert max(map(len, shown.splitlines())) <= width
        assert shown.count("reward") >= len(samples)
        for sample in samples:
            assert f"  {sample['place']:<6}  {sample['answer']}" in shown

    assert "Ran 3 tests" in python(project, "-m", "unittest", "test_train.py")
