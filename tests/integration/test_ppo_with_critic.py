"""PPO as its paper has it: advantages of tokens from a critic, and a reward with a KL in it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from integration.run_process import open_gate, tiny_run

from areal_sc.config.schema import CriticConfig, GRPOConfig
from areal_sc.errors import ConfigError
from areal_sc.trainer.models_beside import ModelsBeside

ALGORITHM = (
    *("actor.algorithm=ppo", "actor.ppo.kl_place=reward", "actor.ppo.kl_coefficient=0.05"),
    *("actor.ppo.num_minibatches=1", "critic.optimizer.lr=1e-2", "total_steps=4"),
)


def test_policy_and_critic_are_trained_together(tmp_path: Path, tiny_model_folder: Path) -> None:
    models = (f"reference.path={tiny_model_folder}", f"critic.path={tiny_model_folder}")
    with tiny_run(tmp_path / "run", tiny_model_folder, *ALGORITHM, *models) as run:
        open_gate(tmp_path / "run")
        open_gate(tmp_path / "run")
        run.finish()
        steps = [step["train"] for step in run.records("step")]
        run.wait_until_gone()
    assert len(steps) == 4
    for step in steps:
        assert step["num_updates"] == step["critic_num_updates"] == 1
        assert step["num_loss_tokens"] == step["critic_num_loss_tokens"]
        assert step["critic_explained_variance"] <= 1
        assert math.isfinite(step["critic_value_error"])
    assert steps[0]["critic_value"] == 0, "a new head gives 0"
    assert steps[-1]["critic_value"] != 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantage": "gae"}, r"critic.path: no value, but .* needs values .*advantage gae"),
        ({"kl_coefficient": 0.1}, r"reference.path: no value, but .* needs reference_logprobs"),
        ({"loss": "top_k_kl"}, r"teacher.path: no value, but .* needs teacher_top_logprobs"),
        ({"loss": "dpo"}, r"actor.ppo.loss: expected a loss of single rows .* DPOTrainer"),
        ({}, r"actor.ppo.advantage: expected gae with critic.path .*, got group"),
    ],
)
def test_models_and_algorithms_that_do_not_go_together(
    settings: dict[str, Any], message: str
) -> None:
    config = GRPOConfig(critic=CriticConfig(path="" if settings else "critic"))
    for name, value in settings.items():
        setattr(config.actor.ppo, name, value)
    scheduler: Any = None
    with pytest.raises(ConfigError, match=message):
        ModelsBeside(config, scheduler)
