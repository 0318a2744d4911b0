"""Trainer and generator as processes that share a CUDA device: new weights come through."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration.run_process import TINY_YAML
from integration.scripts.episodes import by_letters
from integration.scripts.tiny_run import letter_prompts

from areal_sc import (
    FSDPPPOActor,
    GRPOConfig,
    LocalGenerator,
    RolloutController,
    SingleTurnWorkflow,
    TrainController,
    load_config,
    make_scheduler,
    start,
)
from areal_sc.config.schema import Device, Dtype

pytestmark = pytest.mark.gpu

PROMPTS = letter_prompts(16, seed=3)
WORKFLOW = SingleTurnWorkflow(by_letters)


@pytest.mark.parametrize("method", ["pull", "disk"])
@pytest.mark.parametrize(("dtype", "same_kl"), [(Dtype.float32, 1e-6), (Dtype.bfloat16, 2e-3)])
def test_rows_are_sampled_by_the_trainers_weights(
    device: Device,
    tiny_model_folder: Path,
    tmp_path: Path,
    method: str,
    dtype: Dtype,
    same_kl: float,
) -> None:
    """Rows sampled after an update have the log-probabilities that the trainer computes.

    One update of lr 1e-2 moves this divergence far above `same_kl`, as the last step shows.
    """
    settings = {
        "run_dir": tmp_path / "run",
        "actor.path": tiny_model_folder,
        "actor.device": device,
        "rollout.device": device,
        "actor.dtype": dtype,
        "actor.optimizer.lr": 1e-2,
        "weight_update.method": method,
        "task.gate": "unused",
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    config = load_config(["--config", str(TINY_YAML), *overrides], GRPOConfig)
    scheduler = make_scheduler(config.scheduler)
    actor = TrainController(FSDPPPOActor(config.actor), scheduler)
    rollout = RolloutController(LocalGenerator(config.rollout), scheduler)
    try:
        with start(actor, rollout):
            for step in range(3):
                rows = actor.compute_advantages(rollout.rollout_batch(PROMPTS, WORKFLOW, 4))
                assert {v for row in rows.rows for v, _ in row.version_spans} == {step}
                stats = actor.ppo_update(actor.compute_proximal_logprobs(rows))
                assert stats["behavior_kl"] < same_kl, f"version {step}"
                if step < 2:
                    actor.publish_weights(rollout)
                    rollout.wait_for_weights()
            moved = actor.ppo_update(actor.compute_proximal_logprobs(rows))
            assert moved["behavior_kl"] > 10 * same_kl, "old weights would be noticed"
    finally:
        scheduler.close()
