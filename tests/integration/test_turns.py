"""`placement: turns` changes when something is computed, and not what, whoever dies meanwhile."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from integration.ranks import loaded_weights
from integration.run_process import PATIENT, tiny_run

from areal_sc.__main__ import main

SETTINGS = (
    *PATIENT,
    *("rollout.max_staleness=0", "checkpoint.every_steps=4", "checkpoint.keep=2"),
    "actor.optimizer.lr=1e-2",
)
NUM_COMPARED = 4
"""Steps; whoever takes the place of a dead rollout worker samples by another seed."""


def test_turns_give_the_weights_of_a_run_beside_and_outlive_deaths(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    settings = (*SETTINGS, f"total_steps={NUM_COMPARED}", "placement=beside")
    with tiny_run(tmp_path / "beside", tiny_model_folder, *settings) as run:
        run.finish()
    settings = (*SETTINGS, "total_steps=8", "placement=turns")
    settings += ("task.num_free_episodes=40",)  # those of five steps; a worker begins so many
    with tiny_run(tmp_path / "turns", tiny_model_folder, *settings) as run:
        run.wait_for_step(2)
        os.kill(run.worker_pid("train/0"), signal.SIGKILL)
        run.wait_for_step(NUM_COMPARED + 1)
        os.kill(run.worker_pid("rollout/0"), signal.SIGKILL)
        run.finish()
        summary, steps = run.summary(), run.records("step")
        told = run.output.count("placement=turns")
    main(["export", str(run.run_dir), str(tmp_path / "model"), f"--step={NUM_COMPARED}"])
    beside = loaded_weights(tmp_path / "beside" / "model")
    for name, values in loaded_weights(tmp_path / "model").items():
        if "k_proj.bias" not in name:  # attention hardly feels it: Adam trains it by rounding
            torch.testing.assert_close(values, beside[name], rtol=0, atol=1e-4, msg=name)
    assert summary["num_steps"] == 8
    assert summary["num_worker_restarts"] == 2
    assert summary["num_rows_trained_twice"] == 0
    assert summary["max_group_staleness"] == 0
    # about the same weights both sides agree, after every turn
    assert max(step["train"].get("mismatch", 0.0) for step in steps) < 1e-3
    assert told == 1
