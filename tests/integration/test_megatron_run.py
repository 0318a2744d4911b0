"""Whole runs with `actor.engine: megatron`, as a user starts them, and the death of a rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from integration.run_process import (
    LETTER_SORT,
    SMALL_JOB,
    RunProcess,
    assert_nothing_was_started,
    open_gate,
    started,
    tiny_run,
)
from transformers import AutoModelForCausalLM


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_ON_CPU", "1")


def test_the_main_job_learns_with_another_engine(tmp_path: Path) -> None:
    """Warm start and reinforcement learning, and a killed rank; script and all else are as ever."""
    arguments = (*SMALL_JOB, "actor.engine=megatron", f"actor.path={tmp_path / 'model'}")
    with started(tmp_path / "run", LETTER_SORT, *arguments) as run:
        run.wait_for_step(8)
        os.kill(run.worker_pid("train/0"), signal.SIGKILL)
        run.finish()
        summary = run.summary()
        assert summary["num_steps"] == 20
        assert summary["num_worker_restarts"] == 1
        assert summary["accuracy_after"] > summary["accuracy_before"] + 0.2, summary
        AutoModelForCausalLM.from_pretrained(run.run_dir / "model")


def test_a_run_goes_on_after_a_rank_is_killed(tiny_model_folder: Path, tmp_path: Path) -> None:
    with tiny_run(
        tmp_path / "run",
        tiny_model_folder,
        "actor.engine=megatron",
        "actor.parallel={pipeline: 2}",
        "total_steps=4",
        "task.num_free_episodes=16",  # of two steps: it cannot end before the rank is killed
        "weight_update.method=collective",
    ) as run:
        run.wait_for_step(1)
        killed = run.worker_pid("train/1")
        os.kill(killed, signal.SIGKILL)
        open_gate(run.run_dir)
        run.finish()
        assert run.worker_pid("train/1") != killed
        assert run.steps() == list(range(1, 5))
        assert run.summary()["num_rows_trained_twice"] == 0
        assert_trained(run, tiny_model_folder)


def assert_trained(run: RunProcess, source: Path) -> None:
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (source, run.run_dir / "model")
    )
    moved = max(float((after[name] - values).abs().max()) for name, values in before.items())
    assert 1e-5 < moved < 1.0


def test_without_the_tests_shim_a_cpu_is_refused(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGATRON_ON_CPU")
    with tiny_run(tmp_path / "run", tiny_model_folder, "actor.engine=megatron") as run:
        assert run.wait() == 2
        assert "megatron needs GPUs" in run.output
        assert_nothing_was_started(run)


def test_a_mesh_that_does_not_fit_ends_the_script(tiny_model_folder: Path, tmp_path: Path) -> None:
    mesh = "actor.parallel={pipeline: 7}"
    with tiny_run(tmp_path / "run", tiny_model_folder, "actor.engine=megatron", mesh) as run:
        assert run.wait() == 2
        assert "actor.parallel.pipeline: expected a divisor of the model's" in run.output
        assert_nothing_was_started(run)
