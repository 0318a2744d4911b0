"""A second model that is trained on the same batches by a loss of one's own, and a frozen one."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import transformers as hf
from integration.run_process import REPOSITORY
from integration.scripts.tiny_run import by_letters, letter_prompts, partial

from areal_sc import (
    GRPOConfig,
    RolloutController,
    SingleTurnWorkflow,
    TrainController,
    make_actor,
    make_generator,
    start,
)
from areal_sc.algorithms.named_advantage import kl_of_row
from areal_sc.algorithms.named_loss import NamedLoss
from areal_sc.algorithms.token_function import TokenFunction
from areal_sc.engines.handles import make_model
from areal_sc.errors import ConfigError, WorkflowError
from areal_sc.metadata import BatchMetadata
from areal_sc.schedulers.base import Scheduler

LOSS = """
from areal_sc.algorithms.losses import Metric


def imitate(tokens, *, weight):
    penalty = (tokens.logprobs - tokens.fields["reference_logprobs"]).square().mean() / 1e6
    loss = -weight * tokens.logprobs.sum() / tokens.num_loss_tokens
    weights = tokens.logprobs.detach() * 0 + weight
    return loss + penalty, {"weight": Metric.max(weights)}
"""


def documented_blocks(*beginnings: str) -> list[str]:
    """The Python of docs/own-loop.md that begins so."""
    page = (REPOSITORY / "docs" / "own-loop.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    return [next(it for it in blocks if it.startswith(beginning)) for beginning in beginnings]


def test_a_recipe_of_ones_own_on_two_ranks(
    tiny_config: Callable[..., GRPOConfig],
    scheduler: Scheduler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GSPO, its sequence mean, and an advantage with a discount a turn, as the guide has them."""
    recipe = "\n\n".join(documented_blocks("# recipe.py", "def discounted"))
    (tmp_path / "recipe.py").write_text(recipe)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = tiny_config(
        "actor.parallel.data=2",
        "actor.ppo.loss=recipe:gspo",
        "actor.ppo.loss_settings={clip: 0.1}",
        "actor.ppo.num_minibatches=2",
        "actor.optimizer.lr=1e-2",
        "total_steps=4",
    )
    actor = TrainController(make_actor(config.actor), scheduler)
    rollout = RolloutController(make_generator(config.rollout), scheduler)
    function = TokenFunction("recipe:discounted", {"discount": 0.5})
    with start(actor, rollout):
        for step in range(2):
            batch = rollout.prepare_batch(
                letter_prompts(16, seed=0), SingleTurnWorkflow(by_letters)
            )
            batch = actor.compute_advantages(batch)
            batch = actor.compute(batch, function, field="advantages")
            assert batch.rows[0].advantage is None
            batch = actor.compute_proximal_logprobs(batch)
            stats = actor.ppo_update(batch)
            assert stats["num_updates"] >= 1, "a minibatch of equal answers has no gradient"
            assert stats["num_skipped_updates"] == 0
            assert stats["loss"] != 0
            actor.publish_weights(rollout)
            assert actor.version == step + 1
        batch = rollout.prepare_batch(letter_prompts(16, seed=0), SingleTurnWorkflow(by_letters))
        with pytest.raises(ConfigError, match=r"token function: expected .* got 'nowhere:at_all'"):
            actor.compute(batch, "nowhere:at_all", field="advantages")
        with pytest.raises(WorkflowError, match=r"discounted' raised ValueError: .*, not 'adva"):
            actor.compute(batch, function, field="advantages")  # there are none to discount


OWN_FIELDS = """
import torch

from areal_sc import SingleTurnWorkflow, TensorMetadata
from areal_sc.algorithms.losses import Metric


def by_choices(tokens):
    place, choices = tokens.fields["place"], tokens.fields["choices"]
    assert place.dtype == choices.dtype == torch.int32
    assert choices.shape == (len(place), 2)
    is_right = (choices[:, 1] == 2 * choices[:, 0]) & (place == tokens.rows.position)
    loss = -tokens.mean(tokens.logprobs * tokens.fields["advantages"], "token")
    of_rows = tokens.rows.fields
    pairs = zip(of_rows["found"], of_rows["picture"], strict=True)
    for row, (found, picture) in enumerate(pairs):
        assert found.dtype == torch.int16
        assert found[:, 0].tolist() == [0, 1, 2][: tokens.rows.num_tokens[row]]
        of_group = int(picture[0, 0, 0])
        assert torch.equal(picture, torch.full((8, 8, 3), of_group, dtype=torch.uint8))
    assert of_rows["difficulty"].shape == tokens.rows.reward.shape
    seen = {"right": is_right.float(), "difficulty": tokens.fields["difficulty"]}
    metrics = {name: Metric.mean(values) for name, values in seen.items()}
    return loss, metrics | {"weighed": Metric.sum(place * tokens.fields["advantages"])}


def of_place(tokens):
    return tokens.fields["choices"][:, 1] - 2 * tokens.fields["choices"][:, 0] + 0.5
"""

OWN_RETURNS = """


class Halved(Noted):
    async def run_episode(self, prompt, engine):
        row = await super().run_episode(prompt, engine)
        num_more = sum(row.loss_mask) - 1
        row.returns = [(row.reward / 2, 1), (row.reward, num_more)] if num_more else []
        return row
"""


def weighed_by_hand(batch: BatchMetadata) -> float:
    """Sum of place * advantage over the trained tokens of one group's rows, which end with them."""
    rewards = [[row.reward / 2] * bool(row.returns) + [row.reward] for row in batch.rows]
    mean = fmean(fmean(its) for its in rewards)
    std = fmean(fmean((it - mean) ** 2 for it in its) for its in rewards) ** 0.5
    total = 0.0
    for row, its in zip(batch.rows, rewards, strict=True):
        first = row.sequence_length - row.num_loss_tokens
        of_places = [its[0]] + its[-1:] * (row.num_loss_tokens - 1)
        total += sum(
            place * (it - mean) / (std + 1e-6) for place, it in enumerate(of_places, first)
        )
    return total


def test_fields_and_returns_of_a_workflow_reach_the_loss(
    tiny_config: Callable[..., GRPOConfig],
    scheduler: Scheduler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On two ranks, one of which has no row of a minibatch; several values a token among them.

    Of each answer the first token has half the return of the others.
    """
    (documented,) = documented_blocks("class Noted")
    (tmp_path / "own_fields.py").write_text(f"{OWN_FIELDS}\n\n{documented}{OWN_RETURNS}")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = tiny_config(
        "actor.parallel.data=2",
        "actor.ppo.loss=own_fields:by_choices",
        "actor.ppo.num_minibatches=2",
        "rollout.train_batch_groups=1",
        "rollout.group_size=3",
        "total_steps=4",
    )
    workflow = importlib.import_module("own_fields").Halved(by_letters)
    actor = TrainController(make_actor(config.actor), scheduler)
    rollout = RolloutController(make_generator(config.rollout), scheduler)
    prompts = [{**it, "difficulty": 0.25, "color": 7} for it in letter_prompts(16, seed=0)]
    with start(actor, rollout):
        for _ in range(2):
            batch = rollout.prepare_batch(prompts, workflow)
            assert set(batch.fields) >= {"place", "choices", "difficulty", "found", "picture"}
            batch = actor.compute(batch, "own_fields:of_place", field="made")
            batch = actor.compute_proximal_logprobs(actor.compute_advantages(batch))
            stats = actor.ppo_update(batch)
            assert (stats["right"], stats["difficulty"]) == (1.0, 0.25)
            assert any(row.returns for row in batch.rows)
            assert stats["weighed"] == pytest.approx(weighed_by_hand(batch), rel=1e-4, abs=1e-4)
            actor.publish_weights(rollout)


def test_the_documents_field_reaches_its_loss(
    tiny_config: Callable[..., GRPOConfig],
    scheduler: Scheduler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that are not trusted have the loss 0; a field that no row has is named."""
    (documented,) = documented_blocks("# own_field.py")
    assert len([line for line in documented.splitlines() if line.strip()]) <= 15
    gone = "tokens.rows.spread(tokens.rows.fields['gone'])"
    wrong = f"def wrong(tokens):\n    return tokens.mean(tokens.logprobs * {gone}), {{}}\n"
    (tmp_path / "own_field.py").write_text(f"{documented}\n\n{wrong}")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = tiny_config(
        *("actor.ppo.loss=own_field:trusted", "rollout.train_batch_groups=1", "total_steps=4"),
    )
    workflow = importlib.import_module("own_field").Graded(by_letters)
    actor = TrainController(make_actor(config.actor), scheduler)
    rollout = RolloutController(make_generator(config.rollout), scheduler)
    prompts = [{**it, "trust": 0.0} for it in letter_prompts(16, seed=0)]
    with start(actor, rollout):
        batch = actor.compute_advantages(rollout.prepare_batch(prompts, workflow))
        assert any(row.advantage for row in batch.rows)
        assert actor.ppo_update(actor.compute_proximal_logprobs(batch))["loss"] == 0
        actor.publish_weights(rollout)
        batch = actor.compute_advantages(rollout.prepare_batch(prompts, workflow))
        with pytest.raises(WorkflowError, match=r"\(the first is of group .* not 'gone'"):
            actor.update(batch, NamedLoss("own_field:wrong"))


FIXED_ROWS = """
from areal_sc import Trajectory, Workflow


class FixedRows(Workflow):
    async def run_episode(self, prompt, engine):
        mask = prompt["mask"]
        return Trajectory(
            input_ids=prompt["ids"],
            loss_mask=mask,
            behavior_logprobs=[-0.5 * trained for trained in mask],
            versions=[-1 + trained for trained in mask],
            temperatures=[1.0] * len(mask),
            reward=prompt["number"],
        )
"""


def test_what_models_say_of_rows_is_part_of_their_rewards(
    tiny_config: Callable[..., GRPOConfig],
    scheduler: Scheduler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reward model and the KL to a reference, on two ranks each, against transformers."""
    (tmp_path / "fixed_rows.py").write_text(FIXED_ROWS)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = tiny_config(
        *("actor.parallel.data=2", "rollout.group_size=1", "rollout.train_batch_groups=5"),
        *("actor.ppo.kl_place=reward", "actor.ppo.kl_coefficient=0.5", "actor.ppo.advantage=none"),
        *("actor.ppo.advantage_std=none", "actor.ppo.kl_estimator=k1", "total_steps=4"),
        "actor.max_tokens_per_micro_batch=64",
        *("reference.path=${actor.path}", f"reward_model.path={tmp_path / 'scores'}"),
    )
    with_learned_positions = hf.GPT2Config(
        **{"vocab_size": 64, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2},
        **{"num_labels": 1, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0},
    )
    torch.manual_seed(0)
    of_scores: Any = hf.AutoModelForSequenceClassification.from_config(with_learned_positions)
    torch.nn.init.normal_(of_scores.score.weight)
    of_scores.save_pretrained(tmp_path / "scores")
    masks = ["0111", "01011", "001100", "01", "0" * 50 + "1" * 14]  # turns, context, a whole row
    rows = [
        {
            "number": number,
            "ids": [3 + (7 * number + 5 * place) % 36 for place in range(len(mask))],
            "mask": [int(letter) for letter in mask],
        }
        for number, mask in enumerate(masks)
    ]
    actor = TrainController(make_actor(config.actor), scheduler)
    scorer = TrainController(make_model(config, "reward_model"), scheduler, role="scorer")
    reference = TrainController(make_model(config, "reference"), scheduler, role="reference")
    rollout = RolloutController(make_generator(config.rollout), scheduler)
    workflow = importlib.import_module("fixed_rows").FixedRows()
    with start(actor, scorer, reference, rollout):
        batch = rollout.prepare_batch(rows, workflow)
        batch = reference.compute_logprobs(batch, field="reference_logprobs")
        with pytest.raises(ConfigError, match="kl_place=reward: expected rewards with the KL"):
            actor.compute_advantages(batch)
        with pytest.raises(ValueError, match="expected scores, of a model"):
            scorer.score(batch, "values")
        scored = batch.add_rewards(scorer.score(batch, "scores"))
        kls = actor.score(scored, kl_of_row(config.actor.ppo))
        scored = actor.compute_advantages(scored.add_rewards([-0.5 * kl for kl in kls]))
        actor.ppo_update(actor.compute_proximal_logprobs(scored))
        actor.publish_weights(rollout)
    lm = hf.AutoModelForCausalLM.from_pretrained(config.actor.path, dtype=torch.float64)
    of_scores = of_scores.double().eval()
    for before, after in zip(batch.rows, scored.rows, strict=True):
        row = rows[int(before.reward)]
        ids, mask = torch.tensor([row["ids"]]), torch.tensor(row["mask"]).bool()
        end = int(mask.nonzero()[-1]) + 1
        with torch.no_grad():
            score = of_scores.score(of_scores.transformer(ids[:, :end])[0])[0, -1, 0]
            logprobs = lm(ids).logits[0, :-1].log_softmax(-1)
        kl = (-0.5 - logprobs[torch.arange(len(mask) - 1), ids[0, 1:]])[mask[1:]].sum()
        expected = before.reward + float(score) - 0.5 * float(kl)
        assert after.reward == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert after.advantage == after.reward


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
