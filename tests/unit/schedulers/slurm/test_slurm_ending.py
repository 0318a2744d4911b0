"""Jobs are ended whatever slurmctld does meanwhile, in whose place commands stand here."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.schedulers.slurm.conftest import SILENT, stand_in

from areal_sc.schedulers.slurm import commands

REFUSES = "echo 'Job update not available right now' >&2; exit 1"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LOOK_S", "_LOOK_AGAIN_S", "CANCEL_AGAIN_S"):
        monkeypatch.setattr(commands, name, 0.01)


def is_ended(*, are_told: bool = False) -> bool:
    return commands.end_jobs(["one"], [], 0.0, are_told=are_told)


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
@pytest.mark.parametrize("are_told", [False, True])
def test_what_slurm_refuses_to_cancel_is_cancelled_later(
    bin_folder: Path, state: str, *, are_told: bool
) -> None:
    refused, ended = bin_folder / "refused", bin_folder / "ended"
    does = f"[ -e {refused} ] && touch {ended} || {{ touch {refused}; {REFUSES}; }}"
    calls = stand_in(bin_folder, "scancel", does)
    stand_in(bin_folder, "squeue", f"[ -e {ended} ] || echo '17|{state}'")
    assert is_ended(are_told=are_told)
    assert [call.split()[-1] for call in calls.read_text().splitlines()] == ["17", "17"]


def test_what_a_slurmctld_that_died_has_forgotten_is_cancelled_again(bin_folder: Path) -> None:
    calls = bin_folder / "scancel.calls"
    stand_in(bin_folder, "squeue", f"[ $(cat {calls} | wc -l) -ge 4 ] || echo '17|RUNNING'")
    stand_in(bin_folder, "scancel", "true")
    calls.touch()
    assert is_ended()


def test_a_submission_that_slurmctld_had_still_before_it_is_cancelled(bin_folder: Path) -> None:
    looks, calls = bin_folder / "squeue.calls", bin_folder / "scancel.calls"
    told = f"[ $(wc -l <{looks}) -eq 2 ] || [ -e {calls} ] || echo '17|PENDING'"
    stand_in(bin_folder, "squeue", f"[ $(wc -l <{looks}) -eq 1 ] && {{ {SILENT}; }}; {told}")
    stand_in(bin_folder, "scancel", "true")
    assert is_ended()
    assert calls.read_text() == "--state=PENDING 17\n"
    assert not commands.named_jobs(["one"])


def test_what_was_cancelled_without_an_answer_is_waited_for(bin_folder: Path) -> None:
    looks = bin_folder / "squeue.calls"
    running = "[ $n -eq 1 ] && echo RUNNING || echo COMPLETING"
    state = f'n=$(wc -l <{looks}); [ $n -gt 6 ] || echo "17|$({running})"'
    stand_in(bin_folder, "squeue", state)
    stand_in(bin_folder, "scancel", SILENT)
    assert is_ended(are_told=True)
    assert len(looks.read_text().splitlines()) > 6
