"""Adapters of one process: where they go, what is trained and written, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as hf
from builders import engines_on, packed_rows
from random_models import random_model
from safetensors.torch import load_file

from areal_sc.algorithms.named_loss import CROSS_ENTROPY
from areal_sc.config.lora_settings import LoraConfig
from areal_sc.config.schema import (
    ActivationCheckpointing,
    ActorConfig,
    ModelHead,
    OptimizerConfig,
)
from areal_sc.engines.base import BASE_LOGPROBS
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.engines.handles import make_actor
from areal_sc.engines.training.adapters.adapter_probe import PROBE_NAME, AdapterProbe
from areal_sc.engines.training.adapters.lora import LoraLinear, add_adapters, lora_layers
from areal_sc.errors import CheckpointError, ConfigError, ModelError
from areal_sc.sizing.machine import Machine
from areal_sc.sizing.model_folder import read_model_shape

ROWS = packed_rows((4, 5))
Build = Callable[..., FSDPEngine]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    """Engines on one model, with a large learning rate."""
    random_model(vocab_size=30).save_pretrained(tmp_path / "model")
    optimizer = OptimizerConfig(lr=1e-2)
    with engines_on(tmp_path / "model") as build_engine:
        yield lambda lora, **settings: build_engine(lora=lora, optimizer=optimizer, **settings)


def train(engine: FSDPEngine, num_steps: int = 3) -> None:
    for step in range(num_steps):
        engine.update([ROWS], CROSS_ENTROPY, step=step)


def published(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    return {n: v.clone() for bucket in engine.gather_weights(1000) for n, v in bucket}


def test_rank_8_of_a_model_of_half_a_billion_trains_less_than_a_fiftieth() -> None:
    config = hf.Qwen2Config(
        **{"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864},
        **{"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = hf.Qwen2ForCausalLM(config)
    size = sum(parameter.numel() for parameter in model.parameters())
    add_adapters(model, LoraConfig(rank=8))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert len(lora_layers(model)) == 24 * 7
    assert trained == 24 * 8 * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864))
    assert trained <= 0.02 * size


def test_the_plan_counts_what_the_adapter_takes(tmp_path: Path, build: Build) -> None:
    engine = build(LoraConfig(rank=4, targets=["q_proj", "up_proj"]))
    moments = list(engine._optimizer.moments().values())
    counted = sum(m["exp_avg"].numel() + m["exp_avg_sq"].numel() for m in moments)
    shape = read_model_shape(tmp_path / "model")
    assert shape is not None
    (full,), (plan,) = (
        make_actor(config).plan_worker(0, shape, ["cpu"], Machine())
        for config in (replace(engine.config, lora=LoraConfig()), engine.config)
    )
    assert plan.optimizer_bytes == 4 * counted
    assert plan.parameter_bytes == full.parameter_bytes // 2 + 4 * counted
    assert plan.copy_bytes == 4 * counted // 2 * 3
    assert plan.store_bytes == full.store_bytes
    alone = replace(engine.config, lora=replace(engine.config.lora, publish_merged=False))
    (plan,) = make_actor(alone).plan_worker(0, shape, ["cpu"], Machine())
    assert plan.store_bytes == 4 * counted  # of as many numbers: two versions, or two moments


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_under_the_adapter_stays_and_still_speaks(build: Build, dtype: str) -> None:
    lora = LoraConfig(rank=4)
    engine, frozen = build(lora, dtype=dtype), build(lora, dtype=dtype, is_frozen=True)
    base = frozen.forward(ROWS, "logprobs")
    assert torch.equal(engine.forward(ROWS, "logprobs"), base)  # a new one changes nothing
    train(engine)
    assert (engine.forward(ROWS, "logprobs") - base).abs().max() > 0.1
    assert torch.equal(engine.forward(ROWS, BASE_LOGPROBS), base)
    assert (engine.forward(ROWS, "logprobs") - base).abs().max() > 0.1
    with pytest.raises(ValueError, match=r"expected one of logprobs, entropy, .*'base_logprobs'"):
        frozen.forward(ROWS, BASE_LOGPROBS)
    assert not lora_layers(frozen._model.causal_lm)


def test_adapter_and_merged_model_and_what_is_published_say_the_same(
    build: Build, tmp_path: Path
) -> None:
    engine = build(LoraConfig(rank=4, alpha=6, targets=["self_attn.q_proj", "down_proj"]))
    train(engine)
    expected = engine.forward(ROWS, "logprobs")
    engine.begin_save_hf(tmp_path / "merged").result()
    engine.begin_save_hf(tmp_path / "unstaged", is_staged=False).result()
    engine.config.lora.save_merged = False
    engine.begin_save_hf(tmp_path / "adapter").result()
    engine.begin_save_hf(tmp_path / "published", is_staged=False).result()  # as by method disk

    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for name, values in published(engine).items():
        assert torch.equal(values, model.get_parameter(name)), name
    found = []
    for row in torch.split(ROWS.fields["input_ids"].long(), ROWS.lengths):
        logprobs = model(row[None]).logits[0, :-1].log_softmax(-1)
        found += [0.0, *logprobs.gather(1, row[1:, None])[:, 0].tolist()]
    mask = ROWS.fields["loss_mask"]
    assert torch.tensor(found)[mask].tolist() == pytest.approx(expected[mask].tolist(), abs=1e-5)
    whole = load_file(tmp_path / "merged" / "model.safetensors")
    for other in ("unstaged", "published"):
        written = load_file(tmp_path / other / "model.safetensors")
        assert all(torch.equal(whole[name], written[name]) for name in whole)

    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["down_proj", "self_attn.q_proj"]
    lora = replace(engine.config.lora, path=str(tmp_path / "adapter"))
    assert torch.equal(build(lora).forward(ROWS, "logprobs"), expected)
    assert torch.equal(build(lora, is_frozen=True).forward(ROWS, "logprobs"), expected)


def test_an_adapter_alone_is_published_with_what_it_changes(build: Build, tmp_path: Path) -> None:
    engine = build(LoraConfig(rank=4, targets=["q_proj"], publish_merged=False))
    train(engine)
    unfilled, values = engine.published_parts()
    given = dict(zip(unfilled, values, strict=True))
    probe = AdapterProbe.from_tensor(given.pop(PROBE_NAME))
    assert all(value.dtype == torch.float32 for value in given.values())
    engine.begin_save_hf(tmp_path / "published", is_staged=False).result()
    assert AdapterProbe.read(tmp_path / "published") == probe
    written = load_file(tmp_path / "published" / "adapter_model.safetensors")
    assert {f"base_model.model.{name}.weight" for name in given} == written.keys()
    for name, value in given.items():
        assert torch.equal(written[f"base_model.model.{name}.weight"].flatten(), value)

    engine.begin_save_hf(tmp_path / "merged").result()
    of_each = []
    for folder in ("merged", "model"):
        model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        row = torch.tensor([probe.token_ids])
        logprobs = model(row).logits[0, :-1].double().log_softmax(-1)
        of_each.append(logprobs.gather(1, row[0, 1:, None])[:, 0])
    changes = (of_each[0] - of_each[1]).tolist()
    assert probe.bare == pytest.approx(of_each[1].tolist(), abs=1e-5)
    assert probe.changes == pytest.approx(changes, abs=1e-5)
    assert probe.size > 0.02


def test_a_snapshot_is_of_this_adapter(build: Build, tmp_path: Path) -> None:
    lora = LoraConfig(rank=4, targets=["q_proj"])
    engine = build(lora)
    train(engine)
    engine.begin_snapshot(tmp_path / "snapshot").result()
    train(engine)
    again = build(lora)
    again.load_snapshot(tmp_path / "snapshot")
    train(again)
    one, other = published(engine), published(again)
    assert all(torch.equal(one[name], other[name]) for name in one)
    for wrong in (LoraConfig(rank=2, targets=["q_proj"]), LoraConfig(rank=4), LoraConfig()):
        with pytest.raises(CheckpointError, match=r"it holds another model .*(lora_A|absent)"):
            build(wrong).load_snapshot(tmp_path / "snapshot")


def test_a_critic_trains_its_value_head_beside_the_adapter(build: Build, tmp_path: Path) -> None:
    engine = build(LoraConfig(rank=2, save_merged=False), head=ModelHead.value)
    trained = {n for n, p in engine._model.causal_lm.named_parameters() if p.requires_grad}
    assert "score.weight" in trained
    assert all(name.endswith(("lora_A", "lora_B", "score.weight")) for name in trained)
    assert published(engine).keys() == {
        name
        for name, _ in engine._model.causal_lm.named_parameters()
        if not name.endswith(("lora_A", "lora_B"))
    }
    engine.begin_save_hf(tmp_path / "critic").result()  # whole, or its head were lost
    assert "score.weight" in load_file(tmp_path / "critic" / "model.safetensors")


def test_dropout_is_of_an_adapters_inputs_in_updates_alone() -> None:
    torch.manual_seed(0)
    layer = LoraLinear(200, 200, bias=False)
    torch.nn.init.zeros_(layer.weight)
    layer.lora_A, layer.lora_B = (torch.nn.Parameter(torch.eye(200)) for _ in "AB")
    layer.scale, layer.dropout, layer.is_adapted = 2.0, 0.25, True
    inputs = torch.ones(50, 200)
    with torch.no_grad():
        assert torch.equal(layer(inputs), 2 * inputs)
    outputs = layer(inputs)
    left_out = outputs == 0
    assert torch.allclose(outputs[~left_out], torch.tensor(2 / 0.75))
    assert 0.23 < float(left_out.float().mean()) < 0.27  # 10,000 draws: four deviations


def test_activations_that_are_computed_again_have_the_same_dropout(build: Build) -> None:
    trained = []
    for settings in ({}, {"activation_checkpointing": ActivationCheckpointing.layers}):
        engine = build(LoraConfig(rank=4, dropout=0.5), **settings)
        torch.manual_seed(1)
        train(engine)
        trained.append(published(engine))
    torch.manual_seed(2)
    engine = build(LoraConfig(rank=4))
    train(engine)
    one, other, without = *trained, published(engine)
    assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)
    assert any((one[name] - without[name]).abs().max() > 1e-3 for name in one)


@pytest.mark.parametrize("targets", [["lm_head"], ["q_proj", "embed_tokens"], ["proj"]])
def test_a_target_that_is_no_linear_layer_of_a_decoder_layer_is_refused(
    build: Build, targets: list[str]
) -> None:
    words = r"expected names of linear layers .* are down_proj, gate_proj, k_proj, .*; got "
    with pytest.raises(ModelError, match=words + targets[-1]):
        build(LoraConfig(rank=4, targets=targets))


def test_an_adapter_that_does_not_fit_is_refused(build: Build, tmp_path: Path) -> None:
    lora = LoraConfig(rank=4, targets=["q_proj"], save_merged=False)
    build(lora).begin_save_hf(tmp_path / "adapter").result()
    lora = replace(lora, path=str(tmp_path / "adapter"))
    for wrong, words in (
        (replace(lora, rank=2), "actor.lora.rank: expected 4, which the adapter in .* has, got 2"),
        (replace(lora, alpha=2.0), "actor.lora.alpha: expected 16.0, which .* has, got 2"),
        (replace(lora, targets=["k_proj"]), "k_proj.lora_A.weight to be .* by actor.lora and"),
        (replace(lora, path=str(tmp_path)), "cannot read adapter_config.json"),
    ):
        with pytest.raises(ModelError, match=words):
            build(wrong)
    path = tmp_path / "adapter" / "adapter_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"use_dora": True}))
    with pytest.raises(ModelError, match=r"expected an adapter without use_dora, got True"):
        build(lora)
    path.write_text(json.dumps(settings))
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        build(lora)


def test_megatron_refuses_an_adapter() -> None:
    config = ActorConfig(path="model", engine="megatron", lora=LoraConfig(rank=8))
    with pytest.raises(ConfigError, match=r"actor.lora.rank: expected 0 .*fsdp trains adapters"):
        make_actor(config).check(None)
