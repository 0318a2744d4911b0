"""Jobs that slurmctld has forgotten are noted before they are submitted again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_sc.config.placement import Purpose
from areal_sc.config.schema import SchedulerConfig
from areal_sc.config.slurm_jobs import JobPlan, job_plans
from areal_sc.config.slurm_settings import RolloutNodes, SlurmConfig
from areal_sc.errors import ConfigError
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.slurm import commands, jobs
from areal_sc.schedulers.slurm.commands import JobState
from areal_sc.schedulers.slurm.jobs import Job, JobRecord, Jobs, JobsFile, RunJobs

FORGOTTEN = JobState("COMPLETED", reason=commands.FORGOTTEN)


@pytest.fixture
def lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """The jobs of a run, of which `17` is forgotten."""
    config = SchedulerConfig(run_dir=str(tmp_path), slurm=SlurmConfig(nodes=1))
    [plan] = job_plans(config.slurm)
    known = RunJobs("run", "", [JobRecord("one", plan, is_own=True, job_id="17")])
    joins: Any = SimpleNamespace(invite=lambda *_: "secret")
    monkeypatch.setattr(commands, "look_at", lambda ids: dict.fromkeys(ids, FORGOTTEN))
    monkeypatch.setattr(commands, "found_job", lambda _: "")
    return Jobs(config, RunFolder(tmp_path), known, {}, joins)


def test_a_script_that_is_killed_meanwhile_has_noted_the_name(
    lost: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start looks for what became of it."""

    def submit(script: str, name: str, variables: Mapping[str, str]) -> str:
        noted = JobsFile.read(RunFolder(tmp_path))
        assert noted is not None
        assert [(job.name, job.job_id) for job in noted.jobs] == [("one", "")]
        return "18"

    monkeypatch.setattr(commands, "submit", submit)
    job = lost.of("17")
    lost.check_start(job, 0)
    assert job.job_id == "18"
    noted = JobsFile.read(RunFolder(tmp_path))
    assert noted is not None
    assert [(job.name, job.job_id) for job in noted.jobs] == [("one", "18")]


def test_one_that_slurm_does_not_take_again_can_be_ended(
    lost: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(*_: object) -> str:
        raise ConfigError("no")

    monkeypatch.setattr(commands, "submit", submit)
    monkeypatch.setattr(jobs, "end_jobs", lambda *_, **__: True)
    job = lost.of("17")
    with pytest.raises(ConfigError):
        lost.check_start(job, 0)
    lost.end_one(job, 0.0, are_told=False)


def test_an_allocation_is_as_it_is_and_no_heterogeneous_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = SlurmConfig(rollout=RolloutNodes(nodes=1, constraint="other"))
    started: list[JobPlan] = []
    joins: Any = None
    known = RunJobs("run", "")
    config = SchedulerConfig(run_dir="r", slurm=slurm)
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setattr(commands, "host_names", lambda _: ["node1", "node2"])
    jobs = Jobs(config, RunFolder(tmp_path), known, {}, joins)
    monkeypatch.setattr(jobs, "start_step", lambda job, *_, **__: started.append(job.plan))
    [job] = jobs.begin()
    assert (job.job_id, started) == ("5", [job.plan])
    assert job.plan.shares == {Purpose.train: 1, Purpose.rollout: 1}, "one step for both kinds"
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    with pytest.raises(ConfigError, match="runs in the heterogeneous job 5, whose nodes are not"):
        Jobs(config, RunFolder(tmp_path), known, {}, joins).begin()


def test_why_a_job_waits_is_logged_once_and_not_when_its_expected_start_moves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    [plan] = job_plans(SlurmConfig(nodes=1))
    job = Job("17", "one", plan, is_own=True)
    looks = [("Priority", "N/A"), ("Priority", "10:00"), ("Priority", "11:00"), ("Held", "N/A")]
    for reason, start in [looks[0], *looks, looks[-1]]:
        job.check_waits(JobState("PENDING", reason=reason, start=start))
        assert f"{reason}, expected start {start}" in job.told
    said = [record.getMessage().partition("reason ")[2] for record in caplog.records]
    expected = ["Priority, expected start N/A", "Priority, expected start 10:00"]
    assert said == [*expected, "Held, expected start N/A"]
