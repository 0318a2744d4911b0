"""A second model that is trained on the same batches by a loss of one's own, and a frozen one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from integration.scripts.tiny_run import letter_prompts, partial

from areal_sc import (
    GRPOConfig,
    RolloutController,
    SingleTurnWorkflow,
    TrainController,
    make_actor,
    make_generator,
    start,
)
from areal_sc.algorithms.named_loss import NamedLoss
from areal_sc.errors import ConfigError
from areal_sc.schedulers.base import Scheduler

LOSS = """
from areal_sc.algorithms.losses import Metric


def imitate(tokens, *, weight):
    penalty = (tokens.logprobs - tokens.fields["reference_logprobs"]).square().mean() / 1e6
    loss = -weight * tokens.logprobs.sum() / tokens.num_loss_tokens
    weights = tokens.logprobs.detach() * 0 + weight
    return loss + penalty, {"weight": Metric.max(weights)}
"""


def test_a_critic_is_trained_by_its_own_loss_and_a_frozen_model_stays(
    tiny_config: Callable[..., GRPOConfig],
    scheduler: Scheduler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "loss_of_critic.py").write_text(LOSS)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = tiny_config("actor.optimizer.lr=1e-2", "total_steps=4")
    actor = TrainController(make_actor(config.actor), scheduler)
    critic = TrainController(make_actor(config.actor), scheduler, role="critic")
    frozen = TrainController(make_actor(config.actor, is_frozen=True), scheduler, role="ref")
    rollout = RolloutController(make_generator(config.rollout), scheduler)
    loss = NamedLoss("loss_of_critic:imitate", {"weight": 2.0})
    with start(actor, critic, frozen, rollout):
        for step in range(3):
            batch = rollout.prepare_batch(letter_prompts(16, seed=0), SingleTurnWorkflow(partial))
            batch = frozen.compute_logprobs(batch, field="reference_logprobs")
            stats = critic.update(batch, loss)
            assert (stats["weight"], stats["num_updates"], critic.version) == (2.0, 1, step + 1)
            again = critic.update(batch, loss, advances=False)
            assert again["loss"] < stats["loss"], "it has learned from these rows"
            plain = critic.update(batch, "cross_entropy", num_minibatches=2, advances=False)
            assert (plain["num_updates"], critic.version) == (2, step + 1)
            batch = actor.compute_advantages(batch)
            batch = actor.compute_proximal_logprobs(batch)
            actor.ppo_update(batch)
            actor.publish_weights(rollout)
        # the next batch: what was computed for the last one went with its publication
        batch = rollout.prepare_batch(letter_prompts(16, seed=0), SingleTurnWorkflow(partial))
        with pytest.raises(ConfigError, match="no module 'nowhere'"):
            critic.update(batch, "nowhere:loss")
        with pytest.raises(ConfigError, match="loss_of_critic:imitate"):
            critic.update(batch, "loss_of_critic:imitate")  # its weight is missing
        assert critic.update(batch, "cross_entropy")["num_updates"] == 1, "nothing is broken"
        with pytest.raises(ConfigError, match="the model of role 'ref' is frozen"):
            frozen.update(batch, "cross_entropy")
        (held,) = frozen.worker_stats()
    assert held["store_bytes"] < 100_000
