"""The engine as one process: what its updates do, report and refuse, and what it writes."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import save_qwen2
from small_disk import small_disk
from transformers import AutoModelForCausalLM

from areal_sc.algorithms.losses import LossTokens, Metric, Metrics
from areal_sc.algorithms.named_loss import CROSS_ENTROPY, NamedLoss, loss_of
from areal_sc.config.ppo_settings import ClipCenter, PPOConfig
from areal_sc.config.schema import ActorConfig, Dtype, OptimizerConfig
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.engines.fsdp.optimizer import local_part
from areal_sc.engines.fsdp.spread_vocabulary import SpreadRows
from areal_sc.engines.training.updates.update_trace import UpdateTrace
from areal_sc.errors import (
    CheckpointError,
    ConfigError,
    ModelError,
    WorkerStartError,
    WorkflowError,
)
from areal_sc.metadata import RowMetadata
from areal_sc.transport.packed_rows import PackedRows

VOCABULARY = 30
LENGTHS = (7, 2, 12, 5, 9, 1)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    folder = save_qwen2(tmp_path_factory.mktemp("model"), **sizes, **heads)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def actor_config(model_folder: Path, **ppo: Any) -> ActorConfig:
    return ActorConfig(
        path=str(model_folder),
        device="cpu",
        max_tokens_per_micro_batch=16,
        logprob_chunk_tokens=5,
        seed=0,
        optimizer=OptimizerConfig(lr=1e-2, max_grad_norm=0.0, total_steps=10),
        ppo=PPOConfig(**{"behavior_weight_cap": 1.3, **ppo}),
    )


@pytest.fixture
def engine(model_folder: Path) -> Iterator[FSDPEngine]:
    engine = FSDPEngine(actor_config(model_folder))
    engine.initialize(0, 1, "")
    yield engine
    engine.close()


def make_rows(seed: int = 0) -> PackedRows:
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(LENGTHS)
    mask = torch.cat([torch.arange(length) >= min(2, length) for length in LENGTHS])
    fields = {
        "input_ids": torch.randint(VOCABULARY, (num_tokens,), generator=generator).int(),
        "loss_mask": mask,
        "behavior_logprobs": -3.4 + 0.5 * torch.rand(num_tokens, generator=generator),
        "proximal_logprobs": -3.4 + 0.5 * torch.rand(num_tokens, generator=generator),
        "versions": torch.randint(4, (num_tokens,), generator=generator).int(),
        "temperatures": torch.tensor([0.5, 1.0, 1.7])[torch.arange(num_tokens) % 3],
    }
    for name in ("behavior_logprobs", "proximal_logprobs"):
        fields[name][~mask] = math.nan  # nothing outside of the mask may matter
    advantages = torch.randn(len(LENGTHS), generator=generator).tolist()
    return PackedRows(fields, LENGTHS, tuple(advantages))


def ppo_update(
    engine: FSDPEngine, minibatches: list[PackedRows], **options: Any
) -> dict[str, float]:
    return engine.update(minibatches, loss_of(engine.config.ppo), **options)


def weights(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    return {n: v.clone() for bucket in engine.gather_weights(1000) for n, v in bucket}


def plain_logprobs(model: Any, rows: PackedRows) -> list[torch.Tensor]:
    """Per row, [length] float64 at the tokens' temperatures, if they have any; the first is 0."""
    logprobs = []
    for index in range(rows.num_rows):
        fields = rows.take([index]).fields
        tokens = fields["input_ids"].long()
        logits = model(tokens[None]).logits[0, :-1]
        if "temperatures" in fields:
            logits = logits / fields["temperatures"][1:, None].double()
        found = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        logprobs.append(torch.cat([torch.zeros(1), found]))
    return logprobs


def reference_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def test_logprobs_of_trained_tokens(engine: FSDPEngine, model_folder: Path) -> None:
    rows = replace(make_rows(), advantages=None)
    expected = torch.cat(plain_logprobs(reference_model(model_folder), rows))
    expected = expected.masked_fill(~rows.fields["loss_mask"], 0)
    found = engine.forward(rows, "logprobs")
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), expected, atol=1e-5)
    # what is known to be left out of the update needs none
    known = replace(rows, advantages=(1.0, 0.5, 0.0, -1.0, 0.0, 2.0))
    is_left_out = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    is_left_out[9:21] = is_left_out[26:35] = True
    found = engine.forward(known, "logprobs")
    assert torch.allclose(found.double(), expected.masked_fill(is_left_out, 0), atol=1e-5)
    assert engine.forward(rows.take([]), "logprobs").shape == (0,)


@pytest.mark.parametrize("dtype", list(Dtype))
def test_an_engine_that_has_slept_trains_on_as_if_it_had_not(
    model_folder: Path, dtype: Dtype
) -> None:
    found = []
    for sleeps in (False, True):
        engine = FSDPEngine(replace(actor_config(model_folder), dtype=dtype))
        engine.initialize(0, 1, "")
        for step in range(3):
            if sleeps:
                engine.sleep()
                parameters = engine._model.causal_lm.parameters()
                held = [local_part(p.detach()).untyped_storage() for p in parameters]
                # those that are mapped from the model file stay
                assert not any(it.nbytes() for it in held if it.resizable())
                assert not any(it.untyped_storage().nbytes() for it in engine._optimizer.tensors)
                engine.wake()
            metrics = ppo_update(engine, [make_rows(step)], step=step)
        found.append((weights(engine), metrics))
        engine.close()
    (expected, metrics), (trained, others) = found
    assert metrics == others
    assert all(torch.equal(expected[name], trained[name]) for name in expected)


def test_entropy_of_trained_tokens(engine: FSDPEngine, model_folder: Path) -> None:
    rows = replace(make_rows(), advantages=None)
    model, expected = reference_model(model_folder), []
    for index in range(rows.num_rows):
        row = rows.take([index]).fields
        logits = model(row["input_ids"].long()[None]).logits[0, :-1]
        logprobs = (logits / row["temperatures"][1:, None].double()).log_softmax(-1)
        expected += [torch.zeros(1), -(logprobs.exp() * logprobs).sum(-1)]
    whole = torch.cat(expected).masked_fill(~rows.fields["loss_mask"], 0)
    assert torch.allclose(engine.forward(rows, "entropy").double(), whole, atol=1e-5)
    with pytest.raises(ValueError, match="logprobs, entropy, which a model with head=lm gives"):
        engine.forward(rows, "values")


def test_prompts_and_rows_of_advantage_zero_cost_nothing_they_need_not(
    engine: FSDPEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    forward = engine._forward

    def counting(batch: Any, *args: Any) -> Any:
        seen.append((len(batch.input_ids), len(batch.positions)))
        return forward(batch, *args)

    monkeypatch.setattr(engine, "_forward", counting)
    rows = make_rows()
    num_trained = int(rows.fields["loss_mask"].sum())
    engine.forward(replace(rows, advantages=None), "logprobs")
    # rows of 2 and 1 tokens have no trained one
    assert [sum(counts) for counts in zip(*seen, strict=True)] == [33, num_trained]

    seen.clear()
    rows = replace(rows, advantages=(1.0, 0.5, 0.0, -1.0, 0.0, 2.0))
    stats = ppo_update(engine, [rows], step=0)
    assert [sum(counts) for counts in zip(*seen, strict=True)] == [7 + 5, 5 + 3]
    assert (stats["num_loss_tokens"], stats["num_effective_tokens"]) == (num_trained, 5 + 3)

    stats = ppo_update(engine, [replace(rows, advantages=(0.0,) * 6)], step=0)
    assert (stats["num_updates"], stats["num_effective_tokens"], stats["loss"]) == (0, 0, 0)
    assert math.isnan(stats["entropy"])


@pytest.mark.parametrize(
    ("ppo", "proximal_name", "behavior_name"),
    [
        ({}, "proximal_logprobs", "behavior_logprobs"),
        ({"clip_center": ClipCenter.behavior}, "behavior_logprobs", "behavior_logprobs"),
        ({"clip_center": ClipCenter.interpolated}, "interpolated", "behavior_logprobs"),
        ({"behavior_weight": "none"}, "proximal_logprobs", "proximal_logprobs"),
        ({"num_minibatches": 1}, "own", "behavior_logprobs"),
        ({"num_minibatches": 1, "behavior_weight": "none"}, "own", "own"),
    ],
)
@pytest.mark.parametrize("min_token_version", [None, 2])
def test_loss_and_gradient_of_each_form_of_ppo(
    ppo: dict[str, Any],
    proximal_name: str,
    behavior_name: str,
    min_token_version: int | None,
    model_folder: Path,
) -> None:
    config = actor_config(model_folder, **ppo)
    config.optimizer = replace(config.optimizer, lr=0.0)
    engine = FSDPEngine(config)
    engine.initialize(0, 1, "")
    rows = make_rows()
    given = rows
    if proximal_name != "proximal_logprobs":
        kept = {k: v for k, v in rows.fields.items() if k != "proximal_logprobs"}
        given = replace(rows, fields=kept)
    stats = ppo_update(engine, [given], step=4, min_token_version=min_token_version)

    model = reference_model(model_folder)
    logprobs = torch.cat(plain_logprobs(model, rows))
    mask = rows.fields["loss_mask"]
    if min_token_version is not None:
        mask = mask & (rows.fields["versions"] >= min_token_version)
    advantages = torch.repeat_interleave(
        torch.tensor(rows.advantages, dtype=torch.float64), torch.tensor(LENGTHS)
    )[mask]
    behavior, staleness = rows.fields["behavior_logprobs"], 4 - rows.fields["versions"]
    between = behavior + (1 - 1 / staleness) * (logprobs.detach() - behavior)
    known = {**rows.fields, "own": logprobs.detach(), "interpolated": between}
    proximal = known[proximal_name].double()[mask]
    weight = (proximal - known[behavior_name].double()[mask]).exp()
    ratio = (logprobs[mask] - proximal).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * weight
    loss = -gain[weight <= 1.3].sum() / mask.sum()
    loss.backward()
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in model.parameters()))
    assert stats["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert stats["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert stats["num_loss_tokens"] == int(mask.sum())
    assert stats["num_tokens"] == sum(LENGTHS)
    assert stats["ratio"] == pytest.approx(ratio.mean().item(), rel=1e-5)
    assert stats["capped_fraction"] == pytest.approx((weight > 1.3).double().mean().item())
    clipped = ratio.clamp(0.8, 1.2) * advantages < ratio * advantages
    assert stats["clip_fraction"] == pytest.approx(clipped.double().mean().item())
    engine.close()


def test_advantages_of_tokens(engine: FSDPEngine) -> None:
    """A field of one number a token takes the place of one a row; a row of 0 costs nothing."""
    rows = make_rows()
    per_row = torch.tensor(rows.advantages).repeat_interleave(torch.tensor(LENGTHS))
    as_field = replace(rows, fields={**rows.fields, "advantages": per_row}, advantages=None)
    engine.config.optimizer.lr = 0.0
    expected = ppo_update(engine, [rows], step=0)
    assert ppo_update(engine, [as_field], step=0) == expected

    is_late = torch.cat([torch.arange(length) >= 5 for length in LENGTHS])
    late = replace(as_field, fields={**rows.fields, "advantages": per_row.where(is_late, 0.0)})
    stats = ppo_update(engine, [late], step=0)
    is_trained = rows.fields["loss_mask"]
    assert stats["num_loss_tokens"] == int(is_trained.sum())
    learns = [
        bool((mask & late).any())
        for mask, late in zip(is_trained.split(LENGTHS), is_late.split(LENGTHS), strict=True)
    ]
    in_such_rows = torch.tensor(learns).repeat_interleave(torch.tensor(LENGTHS))
    assert stats["num_effective_tokens"] == int((is_trained & in_such_rows).sum())
    assert stats["num_effective_tokens"] < stats["num_loss_tokens"]
    masked = replace(rows, fields={**rows.fields, "loss_mask": is_trained & is_late})
    alone = ppo_update(engine, [masked], step=0)
    expected_loss = alone["loss"] * alone["num_loss_tokens"] / stats["num_loss_tokens"]
    assert stats["loss"] == pytest.approx(expected_loss, rel=1e-5)


def test_every_minibatch_is_one_update_at_the_learning_rate_of_the_step(
    model_folder: Path,
) -> None:
    config = actor_config(model_folder)
    config.optimizer = OptimizerConfig(lr=1.0, total_steps=10, warmup_steps=4)
    engine = FSDPEngine(config)
    engine.initialize(0, 1, "")
    minibatches = [make_rows(seed) for seed in range(3)]
    stats = ppo_update(engine, minibatches, step=1)
    assert stats["num_updates"] == 3
    assert stats["lr"] == 0.5
    # 35 tokens with something to train in at most 16 a micro-batch
    assert stats["num_micro_batches"] == 9
    assert stats["num_skipped_updates"] == 0
    engine.close()


def test_the_first_minibatch_with_tokens_makes_its_own_proximal_logprobs(
    engine: FSDPEngine,
) -> None:
    """One without any before it has changed no weight."""
    rows = make_rows()
    fields = {k: v for k, v in rows.fields.items() if k != "proximal_logprobs"}
    empty = replace(
        rows, fields={**fields, "loss_mask": torch.zeros_like(rows.fields["loss_mask"])}
    )
    stats = ppo_update(engine, [empty, replace(rows, fields=fields)], step=0)
    assert stats["num_updates"] == 1
    assert stats["proximal_kl"] == 0


def test_nan_stands_for_what_the_first_minibatch_makes(engine: FSDPEngine, tmp_path: Path) -> None:
    """A later one has its own values: the step is that with values which were computed before."""
    first, second = make_rows(), make_rows()
    known = engine.forward(first, "logprobs")
    engine.begin_snapshot(tmp_path / "snapshot").result()
    found = []
    for values in (known, torch.full_like(known, torch.nan)):
        engine.load_snapshot(tmp_path / "snapshot")
        given = replace(first, fields={**first.fields, "proximal_logprobs": values})
        later = replace(second, fields={**second.fields, "proximal_logprobs": known})
        stats = ppo_update(engine, [given, later], step=0)
        assert stats["proximal_kl"] > 0
        found.append(weights(engine))
    for name, values in found[0].items():
        torch.testing.assert_close(found[1][name], values, atol=1e-6, rtol=0)


def test_a_trace_has_the_numbers_of_the_tokens_of_chosen_rows(
    engine: FSDPEngine, model_folder: Path
) -> None:
    rows = make_rows()
    groups = (3, 3, 3, 16, 16, 3)
    episodes = (0, 0, 1, 0, 0, 2)
    numbers = (0, 1, 0, 2, 1, 0)  # this rank has a part of the episodes
    rows = replace(
        rows,
        metadata=tuple(
            RowMetadata(group, 0, length, 0.0, 0, (), episode, row=number)
            for group, length, episode, number in zip(
                groups, LENGTHS, episodes, numbers, strict=True
            )
        ),
    )
    own = plain_logprobs(reference_model(model_folder), rows)
    first = replace(rows, fields={k: v for k, v in rows.fields.items() if k[:3] != "pro"})
    second = replace(rows, advantages=(0.0,) * 4 + rows.advantages[4:])  # type: ignore[index]
    trace = UpdateTrace(lambda row: row.group_id == 16)
    ppo_update(engine, [first, second], step=0, trace=trace)
    traced = list(trace.rows())
    assert [(it.minibatch, it.metadata.episode, it.metadata.row) for it in traced] == [
        *((0, 0, 2), (0, 0, 1)),
        *((1, 0, 2), (1, 0, 1)),
    ]
    for it, number in zip(traced, (3, 4, 3, 4), strict=True):
        fields = rows.take([number]).fields
        mask = fields["loss_mask"]
        proximal = fields["proximal_logprobs"] if it.minibatch else own[number].float()
        expected = (proximal - fields["behavior_logprobs"])[mask]
        if (it.minibatch, number) == (1, 3):  # without an advantage it goes through no forward
            expected = torch.full_like(expected, torch.nan)
        torch.testing.assert_close(it.gaps, expected, atol=1e-5, rtol=0, equal_nan=True)
        assert torch.equal(it.entropies.isnan(), expected.isnan())
        advantage = (second if it.minibatch else rows).advantages[number]  # type: ignore[index]
        assert it.advantages.tolist() == pytest.approx([advantage] * int(mask.sum()))
    assert traced[0].entropies.max() <= math.log(VOCABULARY)


def test_trainer_and_sampler_are_compared_on_tokens_of_the_same_weights(
    engine: FSDPEngine,
) -> None:
    """Those of the first minibatch that the step's version has sampled."""
    rows = make_rows()
    own = engine.forward(rows, "logprobs")
    fields = {**rows.fields, "versions": torch.arange(len(own), dtype=torch.int32) % 2 + 4}
    given = replace(rows, fields=fields)
    is_compared = rows.fields["loss_mask"] & (fields["versions"] == 5)
    starts = torch.tensor([0, *itertools.accumulate(LENGTHS)][:-1])
    is_compared[starts] = False
    advantages = torch.tensor(rows.advantages).repeat_interleave(torch.tensor(LENGTHS))
    is_compared &= advantages != 0
    gaps = (engine.forward(rows, "logprobs") - fields["behavior_logprobs"]).abs()
    expected = float(gaps[is_compared].mean())
    worst = gaps.masked_fill(~is_compared, 0).argmax()
    stats = ppo_update(engine, [given, given], step=5)
    assert stats["mismatch_token"] == rows.fields["input_ids"][worst]
    of_worst = {"max": gaps, "sampler_logprob": fields["behavior_logprobs"]}
    for name, values in of_worst.items():
        assert stats[f"mismatch_{name}"] == pytest.approx(float(values[worst]), rel=1e-4)
    found = stats["mismatch_sampler_logprob"] - stats["mismatch_trainer_logprob"]
    assert abs(found) == pytest.approx(stats["mismatch_max"], rel=1e-4)
    assert stats["mismatch"] == pytest.approx(expected, rel=1e-4)
    assert "num_compared_tokens" not in stats
    assert "mismatch" not in ppo_update(engine, [given], step=6)


def reinforce(tokens: LossTokens) -> tuple[torch.Tensor, Metrics]:
    """A loss of which nobody knows that it is zero without an advantage."""
    gains = tokens.fields["advantages"] * tokens.logprobs
    return -gains.sum() / tokens.num_loss_tokens, {}


def no_gradient(tokens: LossTokens) -> tuple[torch.Tensor, Metrics]:
    return torch.zeros(()), {"seen": Metric.sum(tokens.logprobs)}


@pytest.mark.parametrize(
    ("loss", "advantage"),
    [
        (NamedLoss("policy_gradient", {"clip_low": 0.2, "clip_high": 0.2}), 0.0),
        (reinforce, 0.0),
        (no_gradient, 1.0),
        # every token's ratio is far above the bound, and the gain is cut
        (NamedLoss("policy_gradient", {"clip_low": 0.2, "clip_high": 0.2}), 1.0),
    ],
)
def test_nothing_to_learn_moves_no_weight(engine: FSDPEngine, loss: Any, advantage: float) -> None:
    """Neither AdamW's momentum of the steps before nor weight decay."""
    ppo_update(engine, [make_rows()], step=0)
    before, num_updates = weights(engine), engine._optimizer.num_updates
    rows = replace(make_rows(), advantages=(advantage,) * len(LENGTHS))
    rows.fields["proximal_logprobs"] -= 9.0
    stats = engine.update([rows], loss, step=1)
    assert (stats["num_updates"], stats["num_skipped_updates"], stats["grad_norm"]) == (0, 0, 0)
    assert all(torch.equal(before[name], value) for name, value in weights(engine).items())
    assert engine._optimizer.num_updates == num_updates
    assert stats["lr"] == 1e-2  # the schedule counts training steps, whether they teach or not


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (0.5, "expected a scalar tensor and a dict of metrics, got 0.5"),
        ((0.5, {}), r"expected a scalar tensor and a dict of metrics, got \(0.5, {}\)"),
        ((torch.ones(2), {}), "expected a scalar tensor"),
        ((torch.zeros(()), {"a": 0.5}), "metric a: expected a Metric of one number, got 0.5"),
        ((torch.zeros(()), {"loss": Metric.sum(torch.zeros(1))}), "metric loss"),
    ],
)
def test_what_a_loss_may_not_return(engine: FSDPEngine, returned: Any, message: str) -> None:
    before = weights(engine)
    with pytest.raises(WorkflowError, match=f"train rank 0: the loss raised .*{message}"):
        engine.update([make_rows()], lambda _: returned, step=0)
    assert all(torch.equal(before[name], value) for name, value in weights(engine).items())


def test_a_loss_that_exits_or_turns_gradients_off_changes_nothing_else(
    engine: FSDPEngine,
) -> None:
    def off(tokens: LossTokens) -> tuple[torch.Tensor, Metrics]:
        loss = tokens.logprobs.sum()
        torch.set_grad_enabled(False)
        return loss, {}

    def exits(tokens: LossTokens) -> tuple[torch.Tensor, Metrics]:
        sys.exit(3)

    assert engine.update([make_rows()], off, step=0)["num_updates"] == 1
    with pytest.raises(WorkflowError, match="the loss raised SystemExit: 3"):
        engine.update([make_rows()], exits, step=1)


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("error", [Wordless(), WorkflowError("")])
def test_a_loss_whose_error_has_no_words_is_told_all_the_same(
    engine: FSDPEngine, error: Exception
) -> None:
    def loss(tokens: LossTokens) -> tuple[torch.Tensor, Metrics]:
        raise error

    with pytest.raises(WorkflowError, match=f"train rank 0: .*{type(error).__name__}"):
        engine.update([make_rows()], loss, step=0)


def test_values_that_are_not_finite_skip_the_update(
    engine: FSDPEngine, caplog: pytest.LogCaptureFixture
) -> None:
    before = weights(engine)
    rows = replace(make_rows(), advantages=(math.inf,) * len(LENGTHS))
    stats = ppo_update(engine, [rows], step=0)
    assert (stats["num_updates"], stats["num_skipped_updates"]) == (0, 1)
    assert "skipped: gradient_norm=" in caplog.text
    assert all(torch.equal(before[name], value) for name, value in weights(engine).items())


def test_what_rows_must_have(engine: FSDPEngine) -> None:
    rows = make_rows()
    with pytest.raises(WorkflowError, match=r"rank 0: loss .* raised ValueError: .*'advantages'"):
        ppo_update(engine, [replace(rows, advantages=None)], step=0)
    fields = {k: v for k, v in rows.fields.items() if k != "proximal_logprobs"}
    with pytest.raises(WorkflowError, match="not 'proximal_logprobs'"):
        ppo_update(engine, [rows, replace(rows, fields=fields)], step=0)
    unmasked = replace(rows, advantages=None)
    greedy = {**rows.fields, "temperatures": torch.zeros(sum(LENGTHS))}
    with pytest.raises(ValueError, match="temperatures of asked tokens must be above 0, got 0"):
        engine.forward(replace(unmasked, fields=greedy), "logprobs")
    long_row = PackedRows(
        {"input_ids": torch.zeros(17, dtype=torch.int32), "loss_mask": torch.ones(17).bool()}, (17,)
    )
    with pytest.raises(ValueError, match=r"rank 0: row 0 has 17 tokens.* at most 16"):
        engine.update([long_row], CROSS_ENTROPY, step=0)


def test_tied_weights_are_exported_once(engine: FSDPEngine, model_folder: Path) -> None:
    names = [name for bucket in engine.gather_weights(1000) for name, _ in bucket]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert names == [name for name, _ in reference_model(model_folder).named_parameters()]


def test_a_saved_folder_holds_the_model_and_its_companions(
    engine: FSDPEngine, tmp_path: Path
) -> None:
    engine.update([make_rows()], CROSS_ENTROPY, step=0)
    folder = tmp_path / "deep" / "final"
    for _ in range(2):  # the second one replaces the first
        engine.begin_save_hf(folder, is_staged=False).result(60)
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    assert [path.name for path in folder.parent.iterdir()] == ["final"]
    loaded = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    assert all(torch.equal(loaded[name], value) for name, value in weights(engine).items())


@pytest.mark.parametrize("kind", ["begin_save_hf", "begin_snapshot"])
def test_a_failed_write_names_its_cause_and_leaves_the_former(
    kind: str, engine: FSDPEngine, tmp_path: Path
) -> None:
    folder = tmp_path / "target"
    getattr(engine, kind)(folder).result()
    former = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    engine.update([make_rows()], CROSS_ENTROPY, step=0)
    refused = pytest.raises(CheckpointError, match=rf"cannot write {folder}.*File too large")
    with refused, small_disk():
        getattr(engine, kind)(folder).result()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == former
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_torchrun_must_start_as_many_ranks_as_the_settings_have(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank would take all rows for its own."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"actor.parallel makes 1 rank.*this is rank 1 of 2"):
        FSDPEngine(actor_config(model_folder)).initialize()


def test_an_engine_that_cannot_start(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        FSDPEngine(actor_config(tmp_path)).initialize(0, 1, "")
    with pytest.raises(
        WorkerStartError, match=r"cannot join .* expected tcp://host:port or .*'here'"
    ):
        FSDPEngine(actor_config(model_folder)).initialize(0, 2, "here")
    if not torch.cuda.is_available():
        config = replace(actor_config(model_folder), device="cuda")
        with pytest.raises(ConfigError, match=r"actor\.device: cuda, but this machine has no"):
            FSDPEngine(config).initialize(0, 1, "")


def test_temperatures_are_not_rounded_to_bfloat16(model_folder: Path) -> None:
    """0.07 would become 0.0698."""
    engine = FSDPEngine(replace(actor_config(model_folder), dtype=Dtype.bfloat16))
    engine.initialize(0, 1, "")

    def logprobs(temperature: float) -> torch.Tensor:
        """Of every token after the same two."""
        rows = torch.stack([torch.tensor([3, 4, token]) for token in range(VOCABULARY)])
        fields = {
            "input_ids": rows.flatten().int(),
            "loss_mask": torch.tensor([False, False, True]).repeat(VOCABULARY),
            "temperatures": torch.full((rows.numel(),), temperature),
        }
        packed = PackedRows(fields, (3,) * VOCABULARY, (1.0,) * VOCABULARY)
        return engine.forward(packed, "logprobs").view(-1, 3)[:, 2]

    try:
        expected = (logprobs(1.0).double() / 0.07).log_softmax(0)
        assert (logprobs(0.07) - expected).abs().max() < 2e-5
    finally:
        engine.close()


def test_ranks_meet_once_where_memory_has_room_for_it(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 8 bytes a parameter in float32, in four fifths of what a full micro-batch leaves."""
    engine = FSDPEngine(actor_config(model_folder))
    engine.initialize(0, 1, "")
    needed = 8 * sum(shape.numel() for shape in engine._parts.shapes.values())
    assert not engine._takes_room(1.0, 0), "on a CPU"
    monkeypatch.setattr(FSDPEngine, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 1500)
    for fullness, taken in ((1.0, 1000), (0.5, 1400)):  # what was held before is all of it
        for room, is_enough in ((needed / 0.8 + 1, True), (needed / 0.8 - 1, False)):
            free = room + taken - 1500
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 1 << 40))
            assert engine._takes_room(fullness, 600) == is_enough

    def find_none(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 40, 1 << 40))
    assert engine._takes_room(1.0, 600)
    monkeypatch.setattr(torch, "empty", find_none)
    assert not engine._takes_room(1.0, 600), "another process has taken it meanwhile"
    engine.close()


def test_an_update_that_fills_little_of_a_micro_batch_does_not_tell_what_a_full_one_needs(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FSDPEngine(actor_config(model_folder))
    engine.initialize(0, 1, "")
    monkeypatch.setattr(engine, "_takes_room", lambda *_: True)
    for num_tokens, is_known in ((0, False), (7, False), (8, True)):
        engine._find_room_to_meet_once(num_tokens, 0)
        assert engine._is_room_known == engine._model.meets_once == is_known
    engine.close()


@pytest.mark.parametrize("meets_once", [False, True])
@pytest.mark.parametrize("is_backward", [False, True], ids=["forward", "backward"])
def test_a_pass_that_has_failed_leaves_nothing_to_the_next(
    model_folder: Path, tmp_path: Path, *, is_backward: bool, meets_once: bool
) -> None:
    engine = FSDPEngine(replace(actor_config(model_folder), cpu_offload=True))  # FSDP, on one rank
    engine.initialize(0, 1, "")
    if meets_once:
        engine._model.meet_once()
    engine.begin_snapshot(tmp_path / "snapshot").result()
    expected = ppo_update(engine, [make_rows()], step=0)
    after = weights(engine)

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    def fail_backward(_: Any, __: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fail)

    last = engine._model.body.layers[-1].mlp
    hook = last.register_forward_hook(fail_backward if is_backward else fail)
    with pytest.raises(RuntimeError, match="no memory"):
        ppo_update(engine, [make_rows(1)], step=1)
    hook.remove()
    engine.load_snapshot(tmp_path / "snapshot")
    assert ppo_update(engine, [make_rows()], step=0) == expected
    assert all(torch.equal(values, after[name]) for name, values in weights(engine).items())
    engine.close()


def test_spread_rows_forget_the_gradients_of_a_pass_that_has_failed(engine: FSDPEngine) -> None:
    own = torch.zeros(4, 2)
    rows = SpreadRows(4, engine.world, torch.float32, piece_bytes=8, meets_once=True)
    engine._model.spread_rows = [rows]
    rows.take_gradient(own, torch.ones(4, 2), range(4))
    with pytest.raises(RuntimeError, match="no memory"), engine._model.computing():
        raise RuntimeError("no memory")
    assert not rows.new_gradient(own, 4).any()
    rows.finish()
    assert own.grad is None


def test_what_a_failed_update_has_added_up_is_forgotten(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where ranks meet once an update, FSDP holds the gradients of earlier micro-batches."""
    engine = FSDPEngine(replace(actor_config(model_folder), cpu_offload=True))  # FSDP, on one rank
    engine.initialize(0, 1, "")
    engine._model.meet_once()
    engine.begin_snapshot(tmp_path / "snapshot").result()
    expected = ppo_update(engine, [make_rows()], step=0)
    assert expected["num_micro_batches"] > 1
    after = weights(engine)
    engine.load_snapshot(tmp_path / "snapshot")
    begun = list[bool]()
    begin = engine._model.begin_micro_batch

    def fail_at_the_second(*, is_last: bool) -> None:
        begun.append(is_last)
        if len(begun) == 2:
            raise RuntimeError("no memory")
        begin(is_last=is_last)

    monkeypatch.setattr(engine._model, "begin_micro_batch", fail_at_the_second)
    with pytest.raises(RuntimeError, match="no memory"):
        ppo_update(engine, [make_rows(1)], step=0)
    engine.load_snapshot(tmp_path / "snapshot")
    assert ppo_update(engine, [make_rows()], step=0) == expected
    assert all(torch.equal(values, after[name]) for name, values in weights(engine).items())
    engine.close()
