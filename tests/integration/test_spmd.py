"""The example without controllers: ranks that torchrun starts generate, train and agree."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from integration.run_process import REPOSITORY
from transformers import AutoModelForCausalLM

EXAMPLES = REPOSITORY / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
NUM_STEPS = 20


def test_two_ranks_answer_their_own_prompts_and_learn_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    import minimal

    torch.manual_seed(2)  # the model is the same in each run
    minimal.make_model(minimal.MODEL)
    settings = ("actor.parallel.data=2", "actor.optimizer.lr=2e-3", f"total_steps={NUM_STEPS}")
    script = [EXAMPLES / "spmd.py", "--config", REPOSITORY / "configs/minimal.yaml"]
    done = subprocess.run(
        [*TORCHRUN, *script, *settings, "run_dir=both"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    accuracies = [float(value) for value in re.findall(r"accuracy=(\S+)", done.stdout)]
    assert len(accuracies) == NUM_STEPS  # one rank speaks
    assert sum(accuracies[-3:]) / 3 > sum(accuracies[:3]) / 3 + 0.14
    AutoModelForCausalLM.from_pretrained("both/spmd_model")
