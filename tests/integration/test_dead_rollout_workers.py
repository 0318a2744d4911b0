"""Processes of the rollout side are killed while a run goes on; the run ends as if nothing was."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from integration.run_process import RunProcess, open_gate, tiny_run

ROWS_A_STEP = 4 * 2
TOTAL_STEPS = 40
NUM_FREE_EPISODES = 60
"""Three lives of workers, two of which pass an open gate, cannot end the run with that many."""


def test_a_run_outlives_a_worker_a_reward_process_and_a_reward_fork_server(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    memory = tmp_path / "memory"
    with tiny_run(
        tmp_path / "run",
        tiny_model_folder,
        *(f"total_steps={TOTAL_STEPS}", "rollout.num_workers=2"),
        *(f"task.num_free_episodes={NUM_FREE_EPISODES}", f"transport.shared_memory={memory}"),
    ) as run:
        run.wait_for_step(1)
        kill_and_see_it_again(run, "rollout/0", run.worker_pid("rollout/0"))
        server = child_of(run, run.worker_pid("rollout/1"))
        reward = child_of(run, server)
        os.kill(reward, signal.SIGKILL)
        run.wait_until(lambda: reward not in run.processes(), "the end of a reward process")
        open_gate(run.run_dir)
        log = run.run_dir / "logs" / "rollout-1.log"
        run.wait_until(lambda: f"pid={reward} ended by itself" in log.read_text(), "its mourning")
        kill_and_see_it_again(run, "rollout/1", server)
        assert "fork server of the reward processes, has ended" in log.read_text()
        for _ in range(TOTAL_STEPS):
            open_gate(run.run_dir)
        run.finish()
        assert run.steps() == list(range(1, TOTAL_STEPS + 1))
        summary = run.summary()
        assert summary["num_rows_trained"] == TOTAL_STEPS * ROWS_A_STEP
        assert summary["num_rows_trained_twice"] == 0
        for record in run.records("step"):
            assert record["num_rows"] == ROWS_A_STEP
            assert record["num_rejected_groups"] == 0
            assert record["reward"] >= 0.5, "`partial` never gives less: a fault gave a reward"
            assert record["num_generated_tokens"] >= 0
        run.wait_until_gone()
    assert not list(memory.iterdir())


def kill_and_see_it_again(run: RunProcess, worker: str, victim: int) -> None:
    """Kills a process that the worker does not outlive, and waits for the worker's next life."""
    before = run.worker_pid(worker)
    os.kill(victim, signal.SIGKILL)
    run.wait_until(lambda: run.worker_pid(worker) != before, f"another life of {worker}")


def child_of(run: RunProcess, pid: int) -> int:
    """The first process that it has forked."""
    found: list[int] = []

    def is_found() -> bool:
        found[:] = sorted(child for child in run.processes() if parent_of(child) == pid)
        return bool(found)

    run.wait_until(is_found, f"a child of process {pid}")
    return found[0]


def parent_of(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    match = re.search(r"^PPid:\s+(\d+)", status, re.MULTILINE)
    return int(match[1]) if match else 0
