"""A script with three models: what one computes for another, and what survives deaths."""

from __future__ import annotations

import os
import re
import signal
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from integration.run_process import PATIENT, SCRIPTS, RunProcess, open_gate, tiny_run
from integration.test_killed_scripts import num_lives

from areal_sc.controller.ledger.ledger_account import GroupAccount, read_account

THREE_MODELS = SCRIPTS / "three_models.py"
NUM_STEPS = 12
ROWS_A_STEP = 4 * 2
NUM_FREE_STEPS = 8
SETTINGS = (
    *PATIENT,
    f"total_steps={NUM_STEPS}",
    f"task.num_free_episodes={NUM_FREE_STEPS * ROWS_A_STEP}",
    *("actor.ppo.loss=reference_loss:to_reference", "actor.ppo.num_minibatches=1"),
    *("checkpoint.keep_rows_steps=1", "checkpoint.memory_every_steps=1"),
)


def kill_worker(run: RunProcess, role: str) -> None:
    """The first rank of a role, which came of this start of the script."""
    names = dict[int, str]()
    for pid in run.processes():
        with suppress(OSError):  # it has ended since
            names[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
    (pid,) = [pid for pid, name in names.items() if f"areal:{role}/0".endswith(name)]
    os.kill(pid, signal.SIGKILL)


def test_three_models_go_on_where_the_script_was_killed(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"

    def start(place: str) -> RunProcess:
        monkeypatch.setenv("DIE_AT", place)
        run = tiny_run(run_dir, tiny_model_folder, *SETTINGS, script=THREE_MODELS)
        return stack.enter_context(run)

    with ExitStack() as stack:
        runs = []
        for place in ("computing", "trained", "sealed", "recorded", "taking_over"):
            run = start(place)
            runs.append(run)
            assert run.wait() == -signal.SIGKILL, f"{place}\n{run.story()}"
        for role in ("ref", "imitator", "train"):
            assert num_lives(run_dir, f"{role}-0") == 1, run.story()
        run = start("")
        runs.append(run)
        run.wait_until(lambda: f"step={NUM_FREE_STEPS} " in run.output, "the gate")
        assert "taken=True" in run.output
        for role in ("ref", "imitator"):
            kill_worker(runs[0], role)
        for role in ("ref", "imitator"):
            run.wait_until(lambda role=role: num_lives(run_dir, f"{role}-0") == 2, "a new life")
        open_gate(run_dir)
        run.finish()
        groups: list[GroupAccount] = []
        account = read_account(run_dir / "ledger", groups.append)
        run.wait_until_gone()
    assert [group.attempt for group in groups] == [0] * 4 * NUM_STEPS, run.story()
    assert (account.rows_lost, account.trained_again, account.version) == (0, [], NUM_STEPS)
    assert len(account.lineages) == 1
    told = "".join(run.output for run in runs)
    steps = re.findall(r"^step=(\d+) gap=(\S+) reference_bytes=(\S+)$", told, re.M)
    gaps = {int(step): float(gap) for step, gap, _ in steps}
    assert gaps[1] < 1e-5, "the reference model is what the policy began as"
    assert gaps[NUM_STEPS] > 1e-3
    held = [float(num_bytes) for _, _, num_bytes in steps]
    assert max(held) <= 3 * held[0], "a step's field at a time, or two"
