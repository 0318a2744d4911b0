"""Runs in jobs that SLURM sends signals, starts again or ends."""

from __future__ import annotations

import json
import signal
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from integration.agent_forks import Fork
from integration.run_process import LETTER_SORT, REPOSITORY, open_gate, tiny_run
from integration.slurm.conftest import Cluster, running_script
from waiting import until


@pytest.mark.slow
def test_a_run_whose_job_is_requeued_goes_on_from_where_it_was(
    cluster: Cluster, tmp_path: Path, tiny_model_folder: Path
) -> None:
    words = (
        *("scheduler.type=slurm", "scheduler.slurm.nodes=2", "scheduler.slurm.requeue=true"),
        *("scheduler.orphan_timeout_s=30", "scheduler.heartbeat_interval_s=2"),
        *("checkpoint.every_steps=9999", "total_steps=8"),
        "task.num_free_episodes=16",  # two steps a byte
    )
    with tiny_run(tmp_path / "run", tiny_model_folder, *words) as run:
        run.wait_for_step(2)
        [job] = cluster.jobs()
        cluster.run("scontrol", "requeue", job)
        open_gate(run.run_dir)
        run.wait_until(lambda: run.events("snapshot"), "a snapshot")
        run.wait_until(lambda: len(run.events("workers_restarted")) >= 2, "the job's next start")
        for _ in range(8):
            open_gate(run.run_dir)
        run.finish()
        # those that went on after the snapshot are made again, of other rows
        assert list(dict.fromkeys(run.steps())) == list(range(1, 9))
        assert run.summary()["num_rows_trained_twice"] == 0
        logs = [path.name for path in (run.run_dir / "logs").glob("agent-*")]
        assert sum(name.endswith("-1.log") for name in logs) == 2, logs
    cluster.wait_until_idle()
    assert cluster.left_overs() == []


class Run:
    """The example on a partition whose jobs make way for others, as often as it is started."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        self._words = [
            *("--config", str(REPOSITORY / "configs" / "letter_sort.yaml"), "scheduler.type=slurm"),
            *("scheduler.slurm.nodes=2", "scheduler.slurm.partition=low", "total_steps=9999"),
            "scheduler.slurm.cpus_per_node=4",
            *(f"run_dir={self.run_dir}", f"actor.path={folder / 'warm'}"),
            *("task.warm_start.steps=1", "evaluation.num_prompts=4", "checkpoint.every_steps=9999"),
            *("rollout.train_batch_groups=4", "generation.max_new_tokens=8"),
        ]

    def started(self) -> AbstractContextManager[Fork | subprocess.Popen[bytes]]:
        words = [str(LETTER_SORT), *self._words]
        return running_script(words, REPOSITORY, self.run_dir.with_name("output.txt"))

    def told(self, kind: str, name: str = "") -> list[int]:
        """Steps of what the metrics file has of a kind."""
        path = self.run_dir / "metrics.jsonl"
        whole = path.read_text().split("\n")[:-1] if path.exists() else []
        told = [json.loads(line) for line in whole]
        return [it["step"] for it in told if it["kind"] == kind and it.get("name", "") == name]


@pytest.mark.slow
async def test_a_run_is_saved_killed_taken_over_and_preempted(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = Run(tmp_path)
    with run.started() as script:
        await until(lambda: len(run.told("step")) > 1)
        [job] = cluster.jobs()
        cluster.run("scancel", "--signal=USR1", job)
        await until(lambda: run.told("event", "snapshot"))
        num_steps = len(run.told("step"))
        await until(lambda: len(run.told("step")) > num_steps)
        assert script.poll() is None
    with run.started() as script:
        await until(lambda: run.told("event", "reattached"))
        num_steps = len(run.told("step"))
        await until(lambda: len(run.told("step")) > num_steps)
        assert cluster.jobs() == [job]
        cluster.run("sbatch", "-phigh", "-N3", "--exclusive", "-o/dev/null", "--wrap=true")
        await until(lambda: script.poll() is not None)
        assert script.returncode == 128 + signal.SIGTERM
    assert not run.told("event", "resumed")
    assert run.told("event", "snapshot")[-1] == run.told("step")[-1], "no step is lost"
    await until(lambda: cluster.jobs() == [])
    assert cluster.left_overs() == []
