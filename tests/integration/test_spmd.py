"""The example without controllers: two ranks that torchrun starts learn what one process learns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from integration.run_process import REPOSITORY
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

EXAMPLES = REPOSITORY / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
NUM_STEPS = 12


def shown_steps(text: str) -> list[list[float]]:
    """Step, loss and probability of each line."""
    lines = [line for line in text.splitlines() if line.startswith("step=")]
    return [[float(part.split("=")[1]) for part in line.split()] for line in lines]


def test_two_ranks_learn_as_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    import minimal
    import spmd

    torch.manual_seed(2)  # the model was another one in each run, and one in many passed the bound
    minimal.make_model(minimal.MODEL)
    arguments = ["--config", str(REPOSITORY / "configs/minimal.yaml"), f"total_steps={NUM_STEPS}"]
    spmd.main([*arguments, "run_dir=alone"])
    alone = shown_steps(capsys.readouterr().out)
    done = subprocess.run(
        [*TORCHRUN, EXAMPLES / "spmd.py", *arguments, "run_dir=both", "actor.parallel.data=2"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    both = shown_steps(done.stdout)
    assert len(alone) == len(both) == NUM_STEPS  # one rank speaks
    for line, expected in zip(both, alone, strict=True):
        assert line == pytest.approx(expected, abs=2e-6)
    assert alone[-1][1] < alone[0][1] / 2  # the loss; and so the weights have moved
    weights, expected_weights = (
        load_file(Path(run_dir, "spmd_model", "model.safetensors")) for run_dir in ("both", "alone")
    )
    assert weights.keys() == expected_weights.keys()
    # as a whole: Adam moves a single weight by up to lr where its gradient is all rounding
    for name, values in weights.items():
        expected_values = expected_weights[name]
        assert float((values - expected_values).norm() / expected_values.norm()) <= 1e-5
    AutoModelForCausalLM.from_pretrained("both/spmd_model")
