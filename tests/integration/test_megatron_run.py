"""Whole runs with `actor.engine: megatron`, as a user starts them, and the death of a rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from integration.run_process import (
    LETTER_SORT,
    SMALL_JOB,
    assert_nothing_was_started,
    started,
    tiny_run,
)
from transformers import AutoModelForCausalLM


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_ON_CPU", "1")


def test_the_main_job_runs_with_another_engine(tmp_path: Path) -> None:
    """Warm start and reinforcement learning, and a killed rank; script and all else are as ever.

    That ranks learn what FSDP's do, test_megatron_meshes.py has.
    """
    settings = ("actor.engine=megatron", "actor.parallel={pipeline: 2}", "total_steps=8")
    settings += ("task.warm_start.steps=20", "rollout.train_batch_groups=8")
    settings += ("weight_update.method=collective", f"actor.path={tmp_path / 'model'}")
    with started(tmp_path / "run", LETTER_SORT, *SMALL_JOB, *settings) as run:
        run.wait_for_step(3)
        killed = run.worker_pid("train/1")
        os.kill(killed, signal.SIGKILL)
        run.finish()
        assert run.worker_pid("train/1") != killed
        assert run.steps() == list(range(1, 9))
        assert run.summary()["num_rows_trained_twice"] == 0
        AutoModelForCausalLM.from_pretrained(run.run_dir / "model")


def test_without_the_tests_shim_a_cpu_is_refused(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGATRON_ON_CPU")
    with tiny_run(tmp_path / "run", tiny_model_folder, "actor.engine=megatron") as run:
        assert run.wait() == 2
        assert "megatron needs GPUs" in run.output
        assert_nothing_was_started(run)
