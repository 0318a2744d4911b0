"""A run on a Ray cluster: a node and the script are killed, and each row is trained once."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from integration.ray.conftest import RayHosts
from integration.run_process import open_gate, tiny_run
from integration.slurm.test_lost_hosts import ROWS_A_STEP, STEPS_A_BYTE, RunOnHosts
from waiting import until

from areal_sc.controller.ledger.ledger_account import GroupAccount, read_account
from areal_sc.records.metrics_log import History
from areal_sc.run.run_folder import RunFolder

STEPS = 10


@pytest.mark.slow
async def test_nothing_is_lost_or_doubled_when_a_node_and_the_script_are_killed(
    ray_hosts: RayHosts, tmp_path: Path, tiny_model_folder: Path
) -> None:
    run_dir = tmp_path / "run"
    words = [
        *("scheduler.type=ray", f"scheduler.ray.address={ray_hosts.address}"),
        *("scheduler.ray.nodes=2", "scheduler.orphan_timeout_s=300"),
        "scheduler.heartbeat_interval_s=2",
        *("checkpoint.every_steps=1", f"total_steps={STEPS}"),
        f"task.num_free_episodes={STEPS_A_BYTE * ROWS_A_STEP}",
    ]
    with ExitStack() as stack, tiny_run(run_dir, tiny_model_folder, *words) as killed:
        run = RunOnHosts(killed, ray_hosts.hosts)
        killed.wait_for_step(1)
        lost = run.host_of("rollout/0")
        stack.callback(ray_hosts.boot, lost)
        run.lose("kill", "rollout/0")
        run.wait_until_elsewhere("rollout/0", lost)
        run.go_on()
        living = {worker: run.host_of(worker) for worker in ("rollout/0", "train/0")}
        killed.send(signal.SIGKILL)
        killed.wait()
        last = killed.steps()[-1]
        log = run.log()
        with tiny_run(run_dir, tiny_model_folder, *words) as process:
            for _ in range(STEPS):
                open_gate(run_dir)
            process.finish()
            again = RunOnHosts(process, ray_hosts.hosts)
            assert {worker: again.host_of(worker) for worker in living} == living
            assert again.log()[len(log) :].count("goes on, with workers=1") == 2
            summary = process.summary()
    await until(lambda: ray_hosts.left_overs() == [])
    folder = RunFolder(run_dir)
    told = [step.step for step in History.read(folder.metrics_path).steps]
    assert told == sorted(set(told))
    assert {*range(1, STEPS + 1)} - {*told} <= {last + 1}, "the script may die before its record"
    assert summary["num_rows_trained"] == STEPS * ROWS_A_STEP
    assert summary["num_rows_trained_twice"] == 0
    groups: list[GroupAccount] = []
    assert read_account(folder.ledger, groups.append).trained_again == []
    assert not folder.keys_path.exists()
