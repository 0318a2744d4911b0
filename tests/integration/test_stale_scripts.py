"""A script that wakes after its successor does nothing more."""

from __future__ import annotations

import signal
from pathlib import Path

from integration.run_process import PATIENT, tiny_run

from areal_sc.controller.ledger.ledger_account import read_account
from areal_sc.errors import StaleTerm


def test_a_script_that_wakes_after_its_successor_leaves_everything_to_it(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    run_dir = tmp_path / "run"
    settings = (*PATIENT, "total_steps=100000", "checkpoint.every_steps=2")
    with tiny_run(run_dir, tiny_model_folder, *settings) as first:
        first.wait_for_step(2)
        first.send(signal.SIGSTOP)
        reached = first.steps()[-1]
        (run_dir / ".lock").unlink()  # on some file systems it does not keep others out anyway
        with tiny_run(run_dir, tiny_model_folder, *settings) as second:
            second.wait_until(lambda: second.steps()[-1] >= reached + 3, "three steps of its own")
            first.send(signal.SIGCONT)
            assert first.wait() == StaleTerm.exit_code, first.story()
            said = " ".join(first.output.split())
            assert f"has taken the run over (term 2: process {second.pid} on " in said
            assert "this one, of term 1, ends and leaves everything to it" in said
            assert "Traceback" not in first.output
            newest = second.steps()[-1]
            second.wait_for_step(newest + 3)
            assert (run_dir / "keys.json").exists()
            second.send(signal.SIGINT)
            assert second.wait() == 130, second.story()
        first.wait_until_gone()
    account = read_account(run_dir / "ledger", lambda group: None)
    assert (account.rows_lost, account.trained_again, len(account.lineages)) == (0, [], 1)
