"""Shared memory that is full in mid-run: it is said once, and nothing wrong comes of it.

A limit of the size of a worker's files stands in for the full memory: what does not fit fails.
"""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

from integration.run_process import RunProcess, gate_of, open_gate, tiny_run

ROWS_A_STEP = 4 * 2
NUM_STEPS = 6
SETTINGS = (
    f"total_steps={NUM_STEPS}",
    *("rollout.max_staleness=0", "checkpoint.every_steps=3"),
    f"task.num_free_episodes={ROWS_A_STEP}",
)
NO_ROOM = "no snapshot in memory"


def limit_files(pid: int, num_bytes: int) -> None:
    """No file of the process may grow beyond that."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, hard))


def train_on(run: RunProcess, num_steps: int) -> None:
    for _ in range(num_steps):
        done = len(run.steps())
        open_gate(run.run_dir)
        run.wait_for_step(done + 1)


def wait_for_worker(run: RunProcess, name: str) -> int:
    """Its process id, as soon as it has one."""
    log = run.run_dir / "logs" / "controller.log"
    run.wait_until(lambda: log.exists() and f"worker={name} pid" in log.read_text(), "the worker")
    return run.worker_pid(name)


def test_snapshots_that_do_not_fit_are_told_once_and_the_run_goes_back(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    weights_bytes = (tiny_model_folder / "model.safetensors").stat().st_size
    with tiny_run(tmp_path / "run", tiny_model_folder, *SETTINGS) as run:
        pid = wait_for_worker(run, "train/0")
        limit_files(pid, 2 * weights_bytes)  # what is sealed fits, a snapshot does not
        run.wait_for_step(1)  # its episodes are free
        train_on(run, 3)
        os.kill(pid, signal.SIGKILL)
        gate_of(run.run_dir).write_bytes(b"." * 1000)
        run.finish()
        assert run.output.count(NO_ROOM) == 1, run.story()
        assert "File too large" in run.output
        assert "snapshot of step 3 could not be written" in run.output
        assert "went back from step 4 to step 0" in run.output
        summary = run.summary()
        assert summary["num_rows_trained"] == NUM_STEPS * ROWS_A_STEP
        assert summary["num_rows_trained_twice"] == 0


def test_rows_that_do_not_fit_end_the_run_which_goes_on_later(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    run_dir, held = tmp_path / "run", "task.num_free_episodes=1"  # no group ends before the gate
    with tiny_run(run_dir, tiny_model_folder, *SETTINGS, held) as run:
        limit_files(wait_for_worker(run, "rollout/0"), 64)
        gate_of(run_dir).write_bytes(b"." * 1000)
        assert run.wait() != 0, run.story()
        assert run.output.count("cannot take") == 1, run.story()
        assert "raise that limit (ulimit -f unlimited)" in run.output
        run.wait_until_gone()
    with tiny_run(run_dir, tiny_model_folder, *SETTINGS, held) as again:
        again.finish()
        assert again.summary()["num_rows_trained"] == NUM_STEPS * ROWS_A_STEP
        assert again.summary()["num_rows_trained_twice"] == 0
