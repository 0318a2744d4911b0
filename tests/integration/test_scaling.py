"""Rollout workers come and go while a run of real processes trains, and some are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from integration.run_process import SCRIPTS, RunProcess, tiny_run

from areal_sc.run.run_status import read_status

ROWS_A_STEP = 4 * 2
TOTAL_STEPS = 24
Order = Callable[[int, int], None]
"""Called with a number of workers, and of steps."""


def test_a_run_goes_from_one_worker_to_three_and_back_and_loses_nothing(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    memory, orders = tmp_path / "memory", tmp_path / "orders"

    def order(num_workers: int, num_steps: int) -> None:
        (tmp_path / "next").write_text(f"{num_workers} {num_steps}")
        (tmp_path / "next").replace(orders)  # the file is always whole

    settings = (
        *(f"total_steps={TOTAL_STEPS}", f"+task.orders={orders}", "scheduler.orphan_timeout_s=600"),
        *(f"transport.shared_memory={memory}", "checkpoint.every_steps=4"),
    )
    script = SCRIPTS / "scaled_run.py"
    order(1, 2)
    with tiny_run(tmp_path / "run", tiny_model_folder, *settings, script=script) as run:
        more(run, order)
        run.send(signal.SIGKILL)
        run.wait()
        with tiny_run(tmp_path / "run", tiny_model_folder, *settings, script=script) as second:
            order(3, 10)
            second.wait_for_step(10)
            second.wait_until(lambda: len(ready(second)) == 3, "the three workers that it finds")
            fewer(second, order)
            order(2, TOTAL_STEPS)  # the last change ends with the run
            second.finish()
        assert second.steps() == list(range(1, TOTAL_STEPS + 1))
        summary = second.summary()
        assert summary["num_rows_trained"] == TOTAL_STEPS * ROWS_A_STEP
        assert summary["num_rows_trained_twice"] == 0
        for record in second.records("step"):
            assert record["num_rows"] == ROWS_A_STEP
            assert record["num_rejected_groups"] == 0
        changes = [(event["before"], event["num_workers"]) for event in second.events("scaled")]
        assert changes == [(1, 3), (3, 1), (1, 2)]
        run.wait_until_gone()
    assert not list(memory.iterdir())


def more(run: RunProcess, order: Order) -> None:
    """Two further workers, one of which dies before it may even have its weights."""
    run.wait_for_step(2)
    run.wait_until(lambda: set(ready(run)) == {"rollout/0"}, "one worker that is ready")
    order(3, 4)
    run.wait_until(lambda: "worker=rollout/2 pid=" in log_of(run), "a third worker")
    victim = run.worker_pid("rollout/2")
    os.kill(victim, signal.SIGKILL)
    run.wait_until(lambda: run.worker_pid("rollout/2") != victim, "its next life")
    run.wait_until(lambda: len(ready(run)) == 3, "three workers that are ready")
    order(3, 8)
    run.wait_for_step(8)


def fewer(run: RunProcess, order: Order) -> None:
    """Two of them leave, one of which is killed if it is there yet after a step."""
    pids = [run.worker_pid(f"rollout/{number}") for number in (1, 2)]
    order(1, 14)
    run.wait_for_step(11)
    if "worker=rollout/1 has left" not in log_of(run):
        with suppress(ProcessLookupError):  # it has left since
            os.kill(run.worker_pid("rollout/1"), signal.SIGKILL)
    order(1, 20)
    for number in (1, 2):
        left = f"worker=rollout/{number} has left"
        run.wait_until(lambda left=left: left in log_of(run), left)
    run.wait_until(lambda: not set(pids) & run.processes().keys(), "the ends of processes")
    run.wait_until(lambda: set(workers(run)) == {"rollout/0"}, "the status to say so")


def log_of(run: RunProcess) -> str:
    return (run.run_dir / "logs" / "controller.log").read_text()


def workers(run: RunProcess) -> dict[str, str]:
    """Name -> state of the rollout workers, as the status says."""
    status = read_status(run.run_dir / "status.json")
    role = status.roles.get("rollout") if status else None
    return {worker.name: worker.state for worker in role.workers} if role else {}


def ready(run: RunProcess) -> list[str]:
    return [name for name, state in workers(run).items() if state == "ready"]
