"""slurmctld does not answer, or is gone, while a run starts, trains and ends.

Outages last seconds. These of a minute, in every phase of a run, take ten minutes together:

    SLURM_OUTAGE_S=60 .venv/bin/python -m pytest -v tests/integration/slurm/test_slurm_outages.py
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Final

import pytest
from integration.run_process import RunProcess, open_gate, tiny_run
from integration.slurm.conftest import LIMIT_S, SCRIPT, Cluster
from integration.slurm.test_slurm_scheduler import config_of, is_served, opened
from integration.slurm.test_slurm_takeover import busy
from waiting import until

from areal_sc.schedulers.slurm import commands

DOWN_S: Final = float(os.environ.get("SLURM_OUTAGE_S", "12"))
"""A command gives up after 9 s without slurmctld, and after 10 s with one that is stopped."""
BACK: Final = {"STOP": "CONT", "KILL": "start"}
PHASES: Final = ("before the start", "while agents start", "training", "the end")
TO_THE_END: Final = "training, and the end"
CASES: Final = (
    list(product(BACK, PHASES)) if "SLURM_OUTAGE_S" in os.environ else [("KILL", TO_THE_END)]
)
NUM_STEPS: Final = 12
ROWS_A_STEP: Final = 4 * 2
STEPS_A_BYTE: Final = 2


def begin_outage(cluster: Cluster, how: str) -> threading.Timer:
    """It ends with the timer, which is yet to be started."""
    cluster.run(str(SCRIPT), "ctld", how)
    return threading.Timer(DOWN_S, cluster.run, (str(SCRIPT), "ctld", BACK[how]))


def jobs_ever(cluster: Cluster) -> set[str]:
    return set(cluster.run("squeue", "-h", "-t", "all", "-o", "%A").split())


def go_on(run: RunProcess, num_steps: int) -> None:
    while len(run.steps()) < num_steps:
        open_gate(run.run_dir)
        count = len(run.steps())
        run.wait_until(lambda count=count: len(run.steps()) > count, "a step")


@pytest.mark.slow
@pytest.mark.parametrize(("how", "phase"), CASES)
def test_a_run_does_not_mind_that_slurmctld_is_away(
    cluster: Cluster, tmp_path: Path, tiny_model_folder: Path, how: str, phase: str
) -> None:
    before = jobs_ever(cluster)
    words = (
        *("scheduler.type=slurm", "scheduler.slurm.nodes=2", "scheduler.orphan_timeout_s=30"),
        "scheduler.heartbeat_interval_s=2",
        *(f"total_steps={NUM_STEPS}", f"task.num_free_episodes={STEPS_A_BYTE * ROWS_A_STEP}"),
    )
    with ExitStack() as stack:

        def away_in(
            its: str, meanwhile: Callable[[], None] = lambda: None
        ) -> threading.Timer | None:
            if its not in phase.split(", and ")[:1]:
                meanwhile()
                return None
            timer = begin_outage(cluster, how)
            stack.callback(timer.join)
            try:
                meanwhile()
            finally:
                timer.start()
            return timer

        away_in("before the start")
        run = stack.enter_context(tiny_run(tmp_path / "run", tiny_model_folder, *words))
        jobs_file = run.run_dir / ".jobs"
        run.wait_until(lambda: jobs_file.exists() and has_id(jobs_file), "a job")
        away_in("while agents start")
        run.wait_for_step(1)
        timer = away_in("training", lambda: go_on(run, NUM_STEPS - 4))
        if timer is not None and phase != TO_THE_END:
            timer.join()
        go_on(run, NUM_STEPS - 2)
        away_in("the end")
        open_gate(run.run_dir)
        run.finish()
        summary = run.summary()
        assert (summary["num_steps"], summary["num_worker_restarts"]) == (NUM_STEPS, 0)
        assert summary["num_rows_trained"] == NUM_STEPS * ROWS_A_STEP
        assert " lost=" not in (run.run_dir / "logs" / "controller.log").read_text()
    cluster.wait_until_idle()
    assert cluster.left_overs() == []
    assert len(jobs_ever(cluster) - before) == 1


def has_id(jobs_file: Path) -> bool:
    return all(job["job_id"] for job in json.loads(jobs_file.read_text())["jobs"])


@pytest.mark.usefixtures("idle_agents")
async def test_a_job_that_a_killed_slurmctld_has_lost_is_submitted_again(
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One of the last seconds before its death may not be saved yet."""
    monkeypatch.setattr(commands, "_REGISTER_S", 1.0)
    other = await busy(cluster, "-N3")
    state = Path(cluster.environment["SLURM_CLUSTER_ROOT"]) / "state"
    async with opened(config_of(tmp_path, nodes=2)) as scheduler:
        nodes = asyncio.create_task(scheduler.nodes())
        [lost] = set(cluster.jobs()) - {other}
        cluster.run(str(SCRIPT), "ctld", "KILL")
        for saved in state.glob("job_state*"):
            saved.unlink()
        cluster.run(str(SCRIPT), "ctld", "start")
        for node in await asyncio.wait_for(nodes, LIMIT_S):
            assert await is_served(scheduler, node.facts)
        assert f"job={lost} was lost by slurmctld: it is submitted again" in caplog.text
        assert len(cluster.jobs()) == 1
    await until(lambda: cluster.jobs() == [])
    await until(lambda: cluster.left_overs() == [])


@pytest.mark.slow
@pytest.mark.usefixtures("idle_agents")
async def test_a_slurmctld_that_stands_still_is_waited_for_and_gets_one_job(
    cluster: Cluster, tmp_path: Path
) -> None:
    before = jobs_ever(cluster)
    timer = begin_outage(cluster, "STOP")
    timer.start()
    try:
        async with opened(config_of(tmp_path, nodes=2)) as scheduler:
            timer.join()
            nodes = await scheduler.nodes()
            assert len(cluster.jobs()) == 1
            for node in nodes:
                assert await is_served(scheduler, node.facts)
    finally:
        timer.join()
    await until(lambda: cluster.jobs() == [])
    await until(lambda: cluster.left_overs() == [])
    assert len(jobs_ever(cluster) - before) == 1
