"""The example with pictures: both of its runs, cut short."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from integration.run_process import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "count_shapes.py"
CONFIG = REPOSITORY / "configs" / "count_shapes.yaml"
SHORT = (
    *("total_steps=3", "task.sft_steps=25", "task.num_rows=400", "task.num_held_out=16"),
    *("rollout.train_batch_groups=4", "rollout.group_size=4"),
)


def test_demonstrations_then_answers_to_pictures(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--config", CONFIG, *SHORT],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    shown, learned = tmp_path / "runs/count_shapes-shown", tmp_path / "runs/count_shapes"
    losses = [it["train"]["loss"] for it in _steps(shown)]
    assert losses[-1] < losses[0] / 2
    steps = _steps(learned)
    assert [it["num_rows"] for it in steps] == [16] * 3
    # the sampler and the trainer see the same pictures: of the first policy they agree
    assert abs(steps[0]["train"]["behavior_kl"]) < 1e-6
    assert (learned / "model" / "preprocessor_config.json").is_file()


def _steps(run_dir: Path) -> list[dict[str, object]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [it for line in lines if "step" in (it := json.loads(line)) and "train" in it]
