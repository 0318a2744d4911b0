"""The rows of the batch that is being trained go with their worker; the run goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from integration.scripts.tiny_run import letter_prompts, partial

from areal_sc import GRPOConfig, PPOTrainer, RolloutController, SingleTurnWorkflow, TrainController
from areal_sc.controller.ledger.ledger_account import GroupAccount, read_account
from areal_sc.metadata import BatchMetadata
from areal_sc.run.run_folder import RunFolder

TOTAL_STEPS = 3
LOST_STEP = 2


def test_a_run_forms_a_lost_batch_anew(
    tiny_config: Callable[..., GRPOConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed before the update reads them. Without shared memory they lie in the worker."""
    config = tiny_config(
        f"run_dir={tmp_path / 'run'}", f"total_steps={TOTAL_STEPS}", "transport.shared_memory=off"
    )
    given: list[BatchMetadata] = []
    prepare = RolloutController.prepare_batch
    compute = TrainController.compute_proximal_logprobs

    def prepare_and_note(rollout: RolloutController, *args: Any) -> BatchMetadata:
        given.append(prepare(rollout, *args))
        controllers.append(rollout)
        return given[-1]

    def compute_and_kill(actor: TrainController, batch: BatchMetadata) -> BatchMetadata:
        computed = compute(actor, batch)
        if len(given) == LOST_STEP:
            os.kill(controllers[0].fleet.members[0].worker.pid, signal.SIGKILL)
        return computed

    controllers: list[RolloutController] = []
    monkeypatch.setattr(RolloutController, "prepare_batch", prepare_and_note)
    monkeypatch.setattr(TrainController, "compute_proximal_logprobs", compute_and_kill)
    summary = PPOTrainer(config).fit(SingleTurnWorkflow(partial), letter_prompts(64, seed=0))
    assert [batch.global_step for batch in given] == [0, 1, 1, 2]
    lost, again = given[1:3]
    assert {row.attempt for row in lost.rows} == {0}
    assert lost.batch_id != again.batch_id
    assert summary.num_rows_trained == sum(b.total_batch_size for b in (given[0], *given[2:]))
    assert summary.num_rows_trained_twice == 0
    groups: list[GroupAccount] = []
    account = read_account(RunFolder(config.run_dir).ledger, groups.append)
    assert (account.rows_lost, account.trained_again) == (0, [])
    attempts = {group.group: group.attempt for group in groups if group.outcome == "trained"}
    assert attempts == {row.group_id: row.attempt for b in (given[0], *given[2:]) for row in b.rows}
    assert set(attempts.values()) == {0, 1}
    log = (RunFolder(config.run_dir).logs / "controller.log").read_text()
    assert f"ranks are back at version={LOST_STEP - 1}" in log, "the update had begun"
