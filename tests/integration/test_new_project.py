"""The first minutes: a project made by a command is run, tested, and its model read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from integration.agent_forks import environment_of_scripts, start_script

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

    words = ("train.py", "--config", "train.yaml", f"total_steps={NUM_STEPS}")
    with (tmp_path / "told.txt").open("w+b") as output:
        script = start_script([sys.executable, *words], project, environment_of_scripts(), output)
        code = script.wait(200)
        output.seek(0)
        told = output.read().decode()
    assert code == 0, told
    assert f"step={NUM_STEPS}/{NUM_STEPS} " in told
    assert "evaluation=greedy" in told
    left = {path.name for path in (project / "runs" / "train").iterdir()}
    assert left >= {"model", "learning_curve.png", "summary.json", "checkpoints"}

    for width in (60, 200):
        words = ("samples", "runs/train", "--last", "100")
        shown = python(project, "-m", "areal_sc", *words, COLUMNS=str(width))
        assert max(map(len, shown.splitlines())) <= width
        groups = re.findall(r"^step (\d+), group \d+: .*((?:\n  .*)+)", shown, re.MULTILINE)
        assert {int(step) for step, _ in groups} == {*range(1, NUM_STEPS + 1)}
        assert len(groups) == 2 * NUM_STEPS
        for _, group in groups:
            prompt = re.findall(r"^  prompt  (\d),(\d)>$", group, re.MULTILINE)
            rows = re.findall(r"  (?:best|worst|equal) +(\S+)\n +reward (\d)", group)
            assert rows
            for answer, reward in rows:
                assert reward == str(int(answer == max(prompt[0]))), group

    assert "Ran 3 tests" in python(project, "-m", "unittest", "test_train.py")
