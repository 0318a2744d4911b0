"""What the process beside the script does when that is gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import json

from areal_sc.config.slurm_jobs import job_plans
from areal_sc.config.slurm_settings import SlurmConfig
from areal_sc.errors import ConfigError, RunFolderError, SchedulerSilent
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.run_owner import TERM, Owner
from areal_sc.schedulers.slurm import commands, guard
from areal_sc.schedulers.slurm.jobs import JobRecord, JobsFile, RunJobs

GONE = Owner(3, "login1", 7, 100, 1000.0)


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was cancelled, in SLURM's place, which has one job until then."""
    found: list[str] = []
    monkeypatch.setattr(commands, "named_jobs", lambda _: {} if found else {"17": "PENDING"})
    monkeypatch.setattr(commands, "cancel", found.extend)
    monkeypatch.setattr(guard, "_LOOK_S", 0.01)
    monkeypatch.setattr(guard, "_PAUSE_S", 0.01)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    [plan] = job_plans(SlurmConfig(nodes=1))
    JobsFile(folder, RunJobs("run", "")).note(jobs=[JobRecord("one", plan, is_own=True)])
    return folder


def wait_and_cancel(
    monkeypatch: pytest.MonkeyPatch, folder: RunFolder, is_newest: Callable[[], bool]
) -> None:
    monkeypatch.setattr(guard, "_is_newest", lambda *_: is_newest())
    guard.watch(folder, GONE, 0.1)


def test_jobs_are_cancelled_although_the_folder_or_slurm_did_not_answer_for_a_while(
    monkeypatch: pytest.MonkeyPatch, folder: RunFolder, cancelled: list[str]
) -> None:
    answers = iter([RunFolderError("stale"), OSError("stale")])
    named = iter([SchedulerSilent("busy"), ConfigError("SLURM_CONF cannot be read")])

    def is_newest() -> bool:
        if (failure := next(answers, None)) is not None:
            raise failure
        return True

    def named_jobs(_: list[str]) -> dict[str, str]:
        if (failure := next(named, None)) is not None:
            raise failure
        return {} if cancelled else {"17": "PENDING"}

    monkeypatch.setattr(commands, "named_jobs", named_jobs)
    wait_and_cancel(monkeypatch, folder, is_newest)
    assert cancelled == ["17"]


def test_a_script_that_starts_while_slurm_answers_keeps_its_jobs(
    monkeypatch: pytest.MonkeyPatch, folder: RunFolder, cancelled: list[str]
) -> None:
    started: list[bool] = []
    monkeypatch.setattr(commands, "named_jobs", lambda _: started.append(True) or {"17": "PENDING"})
    wait_and_cancel(monkeypatch, folder, lambda: not started)
    assert started
    assert cancelled == []


def test_what_a_slurmctld_tells_late_or_has_forgotten_to_cancel_is_cancelled_in_the_end(
    monkeypatch: pytest.MonkeyPatch, folder: RunFolder, cancelled: list[str]
) -> None:
    """It was away for long, and has died again before it had saved what it was told."""
    silences = [SchedulerSilent("away")] * 30
    told = iter([{}, {"17": "PENDING"}, {"17": "RUNNING"}, {"17": "COMPLETING"}])

    def named_jobs(_: list[str]) -> dict[str, str]:
        if silences:
            raise silences.pop()
        return next(told)

    monkeypatch.setattr(commands, "named_jobs", named_jobs)
    monkeypatch.setattr(commands, "is_just_back", lambda: not cancelled)
    monkeypatch.setattr(guard, "_LONGEST_PAUSE_S", 0.01)
    wait_and_cancel(monkeypatch, folder, lambda: True)
    assert cancelled == ["17", "17"]
    assert list(told) == []


def test_the_next_start_of_the_script_has_its_jobs(
    monkeypatch: pytest.MonkeyPatch, folder: RunFolder, cancelled: list[str]
) -> None:
    wait_and_cancel(monkeypatch, folder, lambda: False)
    assert cancelled == []


@pytest.mark.parametrize(
    ("owner", "expected"),
    [
        (GONE, ["17"]),
        (replace(GONE, term=4, pid=8), []),
        (replace(GONE, pid=8, start_ticks=200, began_s=2000.0), []),  # of a folder made anew
    ],
)
def test_jobs_are_cancelled_of_the_script_that_is_gone_alone(
    folder: RunFolder, cancelled: list[str], owner: Owner, expected: list[str]
) -> None:
    (folder.path / TERM).write_bytes(json.encode(owner))
    guard.watch(folder, GONE, 0.1)
    assert cancelled == expected
