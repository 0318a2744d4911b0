"""What SLURM's commands are asked, and what is made of their answers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from msgspec import json
from unit.schedulers.slurm.conftest import SILENT, stand_in

from areal_sc.config.slurm_jobs import job_plans
from areal_sc.config.slurm_settings import SlurmConfig
from areal_sc.errors import ConfigError, SchedulerSilent
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.slurm import commands, taken_jobs
from areal_sc.schedulers.slurm.commands import HOPELESS_REASONS, JobState
from areal_sc.schedulers.slurm.jobs import JobRecord, RunJobs
from areal_sc.schedulers.slurm.taken_jobs import find_earlier
from areal_sc.transport.security.keys import RunKeys


def test_a_submission_that_was_accepted_without_an_answer_is_not_repeated(bin_folder: Path) -> None:
    calls = stand_in(bin_folder, "sbatch", SILENT)
    looks = stand_in(bin_folder, "squeue", "echo 17")
    assert commands.submit("#!/bin/sh\n", "areal_sc-1", {}) == "17"
    assert len(calls.read_text().splitlines()) == 1
    assert "-n areal_sc-1" in looks.read_text()


def test_a_submission_that_was_not_accepted_is_repeated(bin_folder: Path) -> None:
    once = f'[ -e {bin_folder}/asked ] && echo "18;one"'
    calls = stand_in(bin_folder, "sbatch", f"{once} || {{ touch {bin_folder}/asked; {SILENT}; }}")
    stand_in(bin_folder, "squeue", "true")
    assert commands.submit("#!/bin/sh\n", "areal_sc-1", {}) == "18"
    assert len(calls.read_text().splitlines()) == 2


def test_a_submission_that_never_gets_an_answer_is_given_up(
    bin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = bin_folder / "sbatch.calls"
    stand_in(bin_folder, "sbatch", f'[ "$(wc -l <{calls})" -gt 2 ] && echo 17 || {{ {SILENT}; }}')
    stand_in(bin_folder, "squeue", "true")
    monkeypatch.setattr(commands, "_LOOKS_S", 0.0)
    with pytest.raises(SchedulerSilent, match="sbatch: Socket timed out"):
        commands.submit("#!/bin/sh\n", "areal_sc-1", {})


@pytest.mark.parametrize("said", ["welcome to the site\\n17\\n", "17;cluster\\n", "welcome\\n"])
def test_the_id_is_known_whatever_else_a_sites_wrapper_says(bin_folder: Path, said: str) -> None:
    calls = stand_in(bin_folder, "sbatch", f"printf '{said}'")
    stand_in(bin_folder, "squeue", "echo 17")
    assert commands.submit("#!/bin/sh\n", "areal_sc-1", {}) == "17"
    [call] = calls.read_text().splitlines()
    assert "--export=ALL" in call.split(), "whatever SBATCH_EXPORT says"


def test_what_a_sites_wrapper_says_beside_the_answers_is_left_out(bin_folder: Path) -> None:
    greets = "echo '*** welcome to 2 clusters ***'; "
    stand_in(bin_folder, "squeue", f"{greets}echo '17|RUNNING|None|N/A|n[1-2]'")
    stand_in(bin_folder, "scontrol", f"{greets}echo n1; echo n2")
    stand_in(bin_folder, "sinfo", f"{greets}echo 512+; echo 1024")
    assert commands.look_at(["17"])["17"] == JobState("RUNNING", frozenset({"n1", "n2"}), "None")
    assert not commands.is_silent("n1")
    stand_in(bin_folder, "squeue", f"{greets}echo '17|RUNNING'")
    assert commands.named_jobs(["one"]) == {"17": "RUNNING"}
    stand_in(bin_folder, "squeue", f"{greets}echo 17")
    assert commands.found_job("one") == "17"
    stand_in(bin_folder, "sinfo", f"{greets}echo n1.site; echo n2.site")
    assert commands.node_addresses([""]) == ["n1.site", "n2.site"]


def test_words_in_another_encoding_are_shown_as_far_as_they_can_be_read(bin_folder: Path) -> None:
    stand_in(bin_folder, "sbatch", r"printf 'Konto \374berzogen' >&2; exit 1")
    with pytest.raises(ConfigError, match="Konto \N{REPLACEMENT CHARACTER}berzogen"):
        commands.submit("#!/bin/sh\n", "areal_sc-1", {})


def test_a_script_that_begins_waits_for_slurmctld(
    bin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_LOOK_AGAIN_S", 0.01)
    once = f"[ -e {bin_folder}/asked ] && echo '17|PENDING|None|N/A|'"
    stand_in(bin_folder, "squeue", f"{once} || {{ touch {bin_folder}/asked; {SILENT}; }}")
    [plan] = job_plans(SlurmConfig())
    waits = JobRecord("one", plan, is_own=True, job_id="17")
    assert taken_jobs._not_ended([waits], has_agents=False) == [waits]


def test_no_answer_is_neither_an_end_nor_a_refusal(bin_folder: Path) -> None:
    stand_in(bin_folder, "squeue", SILENT)
    with pytest.raises(SchedulerSilent, match="squeue: Socket timed out"):
        commands.look_at(["17"])


def test_a_slurmctld_that_has_just_come_back_refuses_nothing(
    bin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = "echo 'Requested node configuration is not available' >&2; exit 1"
    for does, error in ((refuses, ConfigError), (SILENT, SchedulerSilent)):
        stand_in(bin_folder, "sbatch", does)
        with pytest.raises(error):
            commands.run_command(["sbatch"])
    stand_in(bin_folder, "sbatch", refuses)  # it does not know its nodes yet
    for _ in range(2):
        with pytest.raises(SchedulerSilent, match=r"just come back: Requested node config"):
            commands.run_command(["sbatch"])
    monkeypatch.setattr(commands, "_REGISTER_S", 0.0)
    with pytest.raises(ConfigError, match="Requested node config"):
        commands.run_command(["sbatch"])


def test_a_refusal_and_a_missing_command_say_what_to_do(
    bin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(bin_folder, "sbatch", "echo 'project is over budget' >&2; exit 1")
    with pytest.raises(ConfigError, match=r"SLURM refuses `sbatch .*: project is over budget"):
        commands.submit("#!/bin/sh\n", "areal_sc-1", {})
    script = "#!/bin/sh\n#SBATCH --nodes=2\n#SBATCH --mem=9G\n#SBATCH --output=/a\n"
    with pytest.raises(ConfigError, match=r"asked for: --nodes=2 --mem=9G"):
        commands.submit(script, "areal_sc-1", {})
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_CONF", str(bin_folder / "slurm.conf"))
        with pytest.raises(ConfigError, match=r"SLURM_CONF=\S+/slurm\.conf cannot be read"):
            commands.submit("#!/bin/sh\n", "areal_sc-1", {})
    monkeypatch.setenv("PATH", str(bin_folder))
    with pytest.raises(ConfigError, match=r"no command sinfo on PATH.*scheduler\.type=local"):
        commands.node_addresses([""])
    (bin_folder / "sinfo").write_text("not for you")
    with pytest.raises(ConfigError, match=r"sinfo cannot be started \(Permission denied\)"):
        commands.node_addresses([""])


def test_a_job_that_is_forgotten_has_ended(bin_folder: Path) -> None:
    for command in ("squeue", "scancel"):
        says = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; false"
        stand_in(bin_folder, command, says)
    assert commands.look_at(["17"])["17"].has_ended
    assert commands.steps_of("17", "one") == []
    assert commands.num_restarts("17") == 0
    commands.cancel(["17"])
    commands._silence.back_s = time.monotonic()  # it may not have read its jobs yet
    with pytest.raises(SchedulerSilent, match="just come back: slurm_load_jobs error"):
        commands.look_at(["17"])


def test_a_look_tells_state_nodes_and_reason(bin_folder: Path) -> None:
    stand_in(bin_folder, "squeue", "echo '17|RUNNING|None|2026-01-02T03:04:05|node3'")
    expected = JobState("RUNNING", frozenset(["node3"]), "None", "2026-01-02T03:04:05")
    assert commands.look_at(["16", "17"])["17"] == expected
    assert not expected.has_ended
    stand_in(bin_folder, "squeue", "echo '2        '")
    assert commands.num_restarts("17") == 2


def test_jobs_of_an_older_format_end_by_their_names(bin_folder: Path) -> None:
    """They were components of one job, and their file has fields that there are no more."""
    plan = {"request": {}, "shares": {"any": 1}, "num_jobs": 1}
    jobs = [
        {"name": "one", "plan": plan | {"component": it}, "is_own": True, "job_id": f"17+{it}"}
        for it in range(2)
    ]
    folder, keys = RunFolder(bin_folder / "run"), RunKeys.create()
    folder.path.mkdir()
    old = {"run_id": keys.run_id, "settings": "", "jobs": jobs, "lent": []}
    folder.jobs_path.write_bytes(json.encode(old))
    waits = f"[ -e {bin_folder}/scancel.calls ] || printf '17|PENDING\\n18|PENDING\\n'"
    looks = stand_in(bin_folder, "squeue", waits)
    ended = stand_in(bin_folder, "scancel", "true")
    assert find_earlier(folder, keys, "new").known == RunJobs(keys.run_id, "new")
    assert ended.read_text() == "--state=PENDING 17 18\n"
    assert all("-n one,one" in look for look in looks.read_text().splitlines())


def test_what_a_surrounding_job_says_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "100")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    found = commands.environment({"MORE": "1"})
    assert "SLURM_MEM_PER_CPU" not in found
    assert (found["SLURM_CONF"], found["SBATCH_ACCOUNT"], found["MORE"]) == (
        *("/etc/slurm.conf", "mine", "1"),
    )


@pytest.mark.parametrize(
    ("reason", "is_hopeless"),
    [
        *((it, True) for it in ("PartitionTimeLimit", "PartitionNodeLimit", "InvalidQOS")),
        *((it, True) for it in ("QOSMaxWallDurationPerJobLimit", "AssocMaxNodePerJobLimit")),
        *((it, False) for it in ("Resources", "Priority", "None", "PartitionDown", "BeginTime")),
        *((it, False) for it in ("QOSMaxNodePerUserLimit", "AssocGrpNodeLimit", "JobHeldAdmin")),
    ],
)
def test_reasons_that_others_can_end_are_waited_for(reason: str, is_hopeless: bool) -> None:
    assert bool(HOPELESS_REASONS.fullmatch(reason)) == is_hopeless
