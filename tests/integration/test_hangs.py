"""Workers that live and do not get on: noticed at their limits, told with stacks, started again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from integration.scripts.hanging_loss import MARKER
from integration.test_heartbeats import LIMIT_S, orders, scheduler_in
from integration.test_weight_publication import PROMPTS, WORKFLOW, controllers, train_step
from waiting import wait_until

from areal_sc import GRPOConfig, make_scheduler
from areal_sc.errors import CheckpointError, WorkerStartError
from areal_sc.fleet.fleet import Fleet
from areal_sc.fleet.runtime import Runtime

HANG_LIMIT_S = 15


def test_ranks_that_hang_are_started_again_and_the_step_is_repeated(
    tiny_config: Callable[..., GRPOConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = tiny_config(
        f"run_dir={tmp_path / 'run'}",
        "actor.parallel.data=2",
        "actor.ppo.loss=integration.scripts.hanging_loss:hanging_loss",
        f"transport.call_timeout_s={HANG_LIMIT_S}",
        f"transport.write_timeout_s={HANG_LIMIT_S}",
    )
    marker = tmp_path / "marker"
    monkeypatch.setenv(MARKER, str(marker))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # for the loss
    scheduler = make_scheduler(config.scheduler)
    try:
        with controllers(config, scheduler) as (actor, rollout):
            batch = actor.compute_advantages(rollout.rollout_batch(PROMPTS, WORKFLOW, 2))
            batch = actor.compute_proximal_logprobs(batch)
            pids = [member.worker.pid for member in actor.fleet.members]
            marker.write_text("loss 1")
            metrics = actor.ppo_update(batch)
            assert not marker.exists()
            assert not {member.worker.pid for member in actor.fleet.members} & set(pids)
            assert "update on train/" in caplog.text
            assert "transport.call_timeout_s" in caplog.text
            assert "last heartbeat is" in caplog.text
            stacks = caplog.text.split("where its threads are:")[1]
            assert "in hang_once" in stacks, "that of the rank which hangs"
            assert "train/0:\n" in stacks
            assert "torch/distributed" in stacks, "that of the rank which waits for it"
            actor.publish_weights(rollout)
            rollout.wait_for_weights()

            wait_until(lambda: not actor._ranks.memory.is_writing)
            marker.write_text("disk 0")
            with pytest.raises(CheckpointError, match="finish_write on train/0"):
                actor.begin_snapshot().result(LIMIT_S)
            assert "in hanging_sync" in caplog.text
            assert train_step(actor, rollout) != metrics, "the run goes on"
    finally:
        scheduler.close()


async def test_a_worker_that_is_stopped_before_it_serves_is_noticed_soon(tmp_path: Path) -> None:
    scheduler = scheduler_in(tmp_path, startup_timeout_s=LIMIT_S)
    runtime = Runtime.create(scheduler.keys)
    fleet = Fleet(scheduler, runtime, lambda event: None)
    try:
        stopped = [replace(order, engine="stopped") for order in orders(1)]
        with pytest.raises(WorkerStartError, match=r"its process \d+ is stopped \(SIGSTOP\)"):
            await fleet.launch(stopped)
    finally:
        await fleet.close()
        await runtime.transport.close()
        scheduler.close()
