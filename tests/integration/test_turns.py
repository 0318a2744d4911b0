"""The main job with `placement: turns`: it learns, and workers die at any time of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from integration.run_process import LETTER_SORT, SMALL_JOB, started


def test_the_main_job_learns_in_turns_and_outlives_deaths(tmp_path: Path) -> None:
    arguments = (
        *(*SMALL_JOB, f"actor.path={tmp_path / 'model'}", "placement=turns"),
        *("evaluation.every_steps=5", "rollout.max_staleness=2", "rollout.over_bound=wait"),
    )
    with started(tmp_path / "run", LETTER_SORT, *arguments) as run:
        run.wait_for_step(6)
        os.kill(run.worker_pid("train/0"), signal.SIGKILL)
        run.wait_for_step(11)
        os.kill(run.worker_pid("rollout/0"), signal.SIGKILL)
        run.finish()
        summary = run.summary()
        assert summary["num_steps"] == 20
        assert summary["num_worker_restarts"] == 2
        assert summary["num_rows_trained_twice"] == 0
        assert summary["max_group_staleness"] <= 2
        assert summary["accuracy_after"] > summary["accuracy_before"] + 0.2, summary
        steps = run.records("step")
        # about the same weights, after every turn, both sides agree
        assert max(step["train"].get("mismatch", 0.0) for step in steps) < 1e-3
        assert run.output.count("placement=turns") == 1
