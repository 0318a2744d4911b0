"""Jobs that slurmctld has forgotten are noted before they are submitted again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_sc.config.schema import SchedulerConfig
from areal_sc.config.slurm_jobs import job_plans
from areal_sc.config.slurm_settings import SlurmConfig
from areal_sc.errors import ConfigError
from areal_sc.run_folder import RunFolder
from areal_sc.schedulers.slurm import commands, jobs
from areal_sc.schedulers.slurm.commands import JobState
from areal_sc.schedulers.slurm.jobs import Jobs
from areal_sc.schedulers.slurm.jobs_file import JobRecord, JobsFile, RunJobs

FORGOTTEN = JobState("COMPLETED", reason=commands._FORGOTTEN)


@pytest.fixture
def lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """The jobs of a run, of which `17` is forgotten."""
    config = SchedulerConfig(run_dir=str(tmp_path), slurm=SlurmConfig(nodes=1))
    [plan] = job_plans(config.slurm)
    known = RunJobs("run", "", [JobRecord("one", plan, is_own=True, job_id="17")])
    joins: Any = SimpleNamespace(invite=lambda *_: "secret")
    steps: Any = None
    monkeypatch.setattr(commands, "look_at", lambda ids: dict.fromkeys(ids, FORGOTTEN))
    monkeypatch.setattr(commands, "found_job", lambda _: "")
    return Jobs(config, RunFolder(tmp_path), known, {}, steps, joins)


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
