"""An engine and an optimizer of a user's own, in a file beside the script that names them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from integration.run_process import REPOSITORY

FILES = ("examples/minimal.py", "examples/muon.py", "examples/plain_engine.py")
OWN = ("rollout.engine=plain_engine:PlainGenerator", "actor.optimizer.type=muon:Muon")


def test_a_run_learns_with_both(tmp_path: Path) -> None:
    for name in (*FILES, "configs/minimal.yaml"):  # where workers would not find it by themselves
        shutil.copy(REPOSITORY / name, tmp_path)
    settings = (*OWN, "total_steps=30", "actor.optimizer.lr=2e-3")
    done = subprocess.run(
        [sys.executable, "minimal.py", "--config", "minimal.yaml", *settings],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    accuracies = [float(value) for value in re.findall(r"accuracy=(\S+)", done.stdout)]
    assert len(accuracies) == 30
    assert sum(accuracies[-5:]) / 5 > sum(accuracies[:3]) / 3 + 0.1
