"""A run whose ranks cannot repeat their steps goes back in place, and finishes."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from integration.scripts.tiny_run import letter_prompts, partial
from integration.test_dead_ranks import memory_of
from waiting import wait_until

from areal_sc import GRPOConfig, PPOTrainer, SingleTurnWorkflow, TrainController
from areal_sc.controller.ledger.ledger_account import GroupAccount, read_account
from areal_sc.metadata import BatchMetadata
from areal_sc.records.metrics_log import History, read_metrics
from areal_sc.run.run_folder import RunFolder

TOTAL_STEPS = 5
SNAPSHOT_STEP = 3
DEATHS_AT = (2, 4)
"""Versions: before there is a snapshot on the disk, and after."""


def test_every_step_is_trained_once_in_the_history_that_survives(
    tiny_config: Callable[..., GRPOConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots in memory are deleted."""
    config = tiny_config(
        f"run_dir={tmp_path / 'run'}",
        f"total_steps={TOTAL_STEPS}",
        f"checkpoint.every_steps={SNAPSHOT_STEP}",
    )
    folder, deaths = RunFolder(config.run_dir), list(DEATHS_AT)
    compute = TrainController.compute_proximal_logprobs

    def compute_and_die(actor: TrainController, batch: BatchMetadata) -> BatchMetadata:
        computed = compute(actor, batch)
        if deaths and actor.version == deaths[0]:
            deaths.pop(0)
            lose_all_but_the_disk(actor)
        return computed

    def lose_all_but_the_disk(actor: TrainController) -> None:
        if actor.version > SNAPSHOT_STEP:
            wait_until(folder.snapshots)
        assert actor.ranks.state.sources
        kept = list(memory_of(actor.scheduler).glob("snapshots-train/*"))
        assert kept, "there is no snapshot in memory to lose"
        for snapshot in kept:
            shutil.rmtree(snapshot)
        os.kill(actor.fleet.members[0].worker.pid, signal.SIGKILL)

    monkeypatch.setattr(TrainController, "compute_proximal_logprobs", compute_and_die)
    summary = PPOTrainer(config).fit(SingleTurnWorkflow(partial), letter_prompts(64, seed=0))

    events = [r for r in read_metrics(folder.metrics_path) if r.get("name") == "went_back"]
    assert [(event["from_step"], event["step"]) for event in events] == [(2, 0), (4, SNAPSHOT_STEP)]
    assert all("train workers died" in event["cause"] for event in events)
    history = History.read(folder.metrics_path)
    assert [metrics.step for metrics in history.steps] == list(range(1, TOTAL_STEPS + 1))
    assert {metrics.num_rejected_groups for metrics in history.steps} == {0}
    rows_a_step = config.rollout.train_batch_groups * config.rollout.group_size
    assert (summary.num_steps, summary.num_rows_trained) == (TOTAL_STEPS, TOTAL_STEPS * rows_a_step)
    assert summary.num_rows_trained_twice == 0

    groups: list[GroupAccount] = []
    account = read_account(folder.ledger, groups.append)
    assert (account.rows_lost, account.trained_again) == (0, [])
    survived = [(lineage.begun_at, lineage.counts_to) for lineage in account.lineages]
    assert survived == [(0, 0), (0, SNAPSHOT_STEP), (SNAPSHOT_STEP, TOTAL_STEPS)]
    trained = Counter(g.step for g in groups if g.outcome == "trained" and not g.is_undone)
    assert trained == dict.fromkeys(range(TOTAL_STEPS), config.rollout.train_batch_groups)
    of_prompts = Counter(g.index for g in groups if g.outcome == "trained" and not g.is_undone)
    assert set(of_prompts.values()) == {1}, "prompts come again, but are trained once"
    assert max(g.versions[1] for g in groups if g.versions and g.step == 0) == 0
    assert len({group.group for group in groups}) == account.totals["admitted"]
